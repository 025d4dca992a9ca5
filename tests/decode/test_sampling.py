"""Draws follow the distribution they say, and text appears only when it is final."""

from __future__ import annotations

import numpy as np
import pytest

from khtst_compile.sampling import Sampling, probabilities
from khtst_compile.tokens import Writer

tokenizers = pytest.importorskip("tokenizers")

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def shares(sampling: Sampling, draws: int = 4000) -> np.ndarray:
    generator = np.random.default_rng(0)
    found = [sampling.pick(LOGITS, generator) for _ in range(draws)]
    return np.bincount(found, minlength=4) / draws


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(0.0), [0, 1, 0, 0]),
        (Sampling(1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(0.5), np.array([1, 16, 4, 9]) / 30),  # squares of the probabilities
        (Sampling(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(1.0, top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(1.0, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),  # of the kept three, 4/9 < 0.5
    ],
)
def test_shares(sampling: Sampling, wanted: list[float]) -> None:
    got = shares(sampling)
    # Four standard deviations of a share of 4000 draws.
    assert np.all(np.abs(got - wanted) <= 4 * np.sqrt(0.25 / 4000)), got
    assert np.all((got == 0) == (np.asarray(wanted) == 0))


def test_equal_logits_give_the_first() -> None:
    assert Sampling().pick(np.zeros(5, np.float32), np.random.default_rng(0)) == 0
    assert Sampling(1.0, top_k=1).pick(np.zeros(5, np.float32), np.random.default_rng(0)) == 0


def test_probabilities_of_large_logits() -> None:
    np.testing.assert_allclose(probabilities(np.array([1e30, 1e30], np.float32), 1.0), [0.5, 0.5])


def writer(*stops: str) -> tuple[Writer, dict[str, int]]:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Writer(tokenizer, stops), lambda text: tokenizer.encode(text).ids  # type: ignore[return-value]


def test_half_a_character_waits_for_its_rest() -> None:
    out, encode = writer()
    pieces = [out.push(i)[0] for i in encode("aß語b")]  # type: ignore[operator]
    assert "".join(pieces) == "aß語b" and pieces == ["a", "", "ß", "", "", "語", "b"]


def test_a_stop_is_held_back_and_cut() -> None:
    out, encode = writer("END", "xyz")
    got = [out.push(i) for i in encode("one EN xENDmore")]  # type: ignore[operator]
    assert [stopped for _, stopped in got].index(True) == len("one EN xEND") - 1
    assert "".join(text for text, _ in got) + out.rest() == "one EN x"
    out, encode = writer("END")
    assert "".join(out.push(i)[0] for i in encode("the EN")) == "the "  # type: ignore[operator]
    assert out.rest() == "EN" and out.rest() == ""
