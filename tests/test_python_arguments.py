"""Wrong types given to the Python interface: one UsageError that says what was needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile.errors import UsageError
from khtst_compile.signature import TensorSpec, check_inputs

SPECS = (TensorSpec("x", "float32", (2, 3)),)
CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "load nothing": (lambda out: kc.load(None), "artifact is None"),
    "load a number": (lambda out: kc.load(3), "artifact is 3"),
    "load with threads as text": (lambda out: kc.load(out, threads="2"), "threads is '2'"),
    "load with no threads": (lambda out: kc.load(out, threads=0), "threads is 0"),
    "load with a flag for threads": (lambda out: kc.load(out, threads=True), "threads is True"),
    "quantize nothing": (lambda out: kc.quantize(None, out), "model source is None"),
    "quantize to nowhere": (lambda out: kc.quantize("a:b", None), "output is None"),
    "quantize to an empty path": (lambda out: kc.quantize("a:b", ""), "output is ''"),
    "an array to calibrate on": (lambda out: kc.quantize("a:b", out, calib=np.zeros(3)), "calib is"),
    "a list as recipe": (lambda out: kc.quantize("a:b", out, recipe=["w8a8"]), "recipe is"),
    "a number to keep": (lambda out: kc.quantize("a:b", out, keep_fp32=[3]), "keep_fp32 is 3"),
    "shapes as text": (lambda out: kc.quantize("a:b", out, shapes="seq=1..4"), "shapes is"),
    "half a shape": (lambda out: kc.quantize("a:b", out, shapes={"seq": (1,)}), "(min, max)"),
    "a limit of none": (lambda out: kc.quantize("a:b", out, limit=0), "limit is 0"),
    "lower nothing": (lambda out: kc.lower(None, out), "artifact is None"),
    "export nothing": (lambda out: kc.export(None, out), "artifact is None"),
    "verify nothing": (lambda out: kc.verify(None), "artifact is None"),
    "verify against a number": (lambda out: kc.verify(out, reference=3), "reference is 3"),
    "inspect nothing": (lambda out: kc.inspect(None), "artifact is None"),
    "bench with threads as text": (lambda out: kc.bench(out, threads="1"), "threads is '1'"),
    "bench for no number of seconds": (lambda out: kc.bench(out, seconds=float("nan")), "seconds is nan"),
    "bench for ever": (lambda out: kc.bench(out, seconds=float("inf")), "seconds is inf"),
    "run on an array": (lambda out: check_inputs(np.zeros((2, 3)), SPECS, {}, {}), "needed: a dict from name to array"),
    "run on ragged lists": (lambda out: check_inputs({"x": [[1.0], [2.0, 3.0]]}, SPECS, {}, {}), "'x' is no array"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_type_is_a_usage_error(name: str, tmp_path: Path) -> None:
    call, says = CALLS[name]
    with pytest.raises(UsageError) as caught:
        call(tmp_path / "out")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_other_byte_order_is_converted() -> None:
    given = np.ones((2, 3), np.dtype(np.float32).newbyteorder("S"))
    (found,) = check_inputs({"x": given}, SPECS, {}, {})
    assert found.dtype.isnative and found.tolist() == given.tolist()
