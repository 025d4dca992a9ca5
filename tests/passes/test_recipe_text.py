"""What recipe text is refused for: at once, with one class of error, quoting what is wrong."""

from __future__ import annotations

import pytest

from khtst_compile.errors import UsageError
from khtst_compile.recipe import keep, parse, render


@pytest.mark.parametrize(
    "text, says",
    [
        ("rotate{block=7}", "pass 'rotate': rotation: block is 7"),
        ("rotate{block=-1}", "pass 'rotate': rotation: block is -1"),
        ("rotate{block=0}", "pass 'rotate': rotation: block is 0"),
        ("smooth{block=7}", "pass 'smooth': rotation: block is 7"),
        ("smooth{alpha=nan}", "pass 'smooth': alpha is nan"),
        ("smooth{max_evals=1}", "max_evals"),
        ("w8a8{percentile=0}", "percentile is 0"),
        ("rotate{block=64,block=128}", "gives 'block' twice"),
        ("w8a8{keep_fp32=a,b}", "'b' is no option=value"),
        ("w8a8{keep_fp32=a{b}", "cannot read"),
        ("w8a8{colour=red}", "no option 'colour'"),
    ],
)
def test_wrong_options_are_refused_when_the_recipe_is_read(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value) and str(caught.value).startswith("recipe: ")


@pytest.mark.parametrize("glob", ["a,b", "a{b", "a}", "a|b", "", "none"])
def test_a_glob_that_recipe_text_cannot_hold_is_refused(glob: str) -> None:
    with pytest.raises(UsageError, match="keep-fp32"):
        keep(parse("w8a8")[0], [glob])


def test_kept_sites_read_back() -> None:
    passes = [keep(p, ["layer.[05].*", "head"]) for p in parse("smooth | w8a8{keep_fp32=pool}")]
    assert parse(render(passes)) == passes
    assert "keep_fp32=pool;layer.[05].*;head" in render(passes)
