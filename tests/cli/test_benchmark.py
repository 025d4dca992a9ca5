"""The parts of `bench` that need no model: which sizes, which inputs, which cores."""

from __future__ import annotations

import os

import numpy as np
import pytest

from khtst_compile.benchmark import bound, make_inputs, plan_shapes, shape_text
from khtst_compile.cli.console import table
from khtst_compile.errors import UsageError
from khtst_compile.signature import TensorSpec


def test_usual_shapes_stay_inside_the_axes() -> None:
    assert [shape_text(s) for s in plan_shapes({"axes": {"batch": [1, 64], "seq": [1, 512]}}, None)] == ["1x16", "1x128", "8x128"]
    assert [shape_text(s) for s in plan_shapes({"axes": {"batch": [1, 4], "seq": [8, 64]}}, None)] == ["1x16", "1x64", "4x64"]
    assert plan_shapes({"axes": {"batch": [2, 2]}}, None) == [{"batch": 2}]
    assert plan_shapes({"axes": {}}, None) == [{}]


def test_asked_shapes_are_checked() -> None:
    axes = {"axes": {"batch": [1, 4], "seq": [1, 64]}}
    assert plan_shapes(axes, [(4, 64)]) == [{"batch": 4, "seq": 64}]
    with pytest.raises(UsageError, match="one for each dynamic axis"):
        plan_shapes(axes, [(4,)])
    with pytest.raises(UsageError, match=r"'seq' is 65; needed: 1\.\.64"):
        plan_shapes(axes, [(4, 65)])


def test_inputs_are_golden_ones_cut_or_repeated() -> None:
    specs = (TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("x", "float32", ("batch", 3)))
    golden = {"ids": np.arange(6).reshape(2, 3), "x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    feed = make_inputs(specs, {"batch": 3, "seq": 2}, golden)
    assert feed["ids"].tolist() == [[0, 1], [3, 4], [0, 1]] and feed["x"].shape == (3, 3)
    assert make_inputs(specs, {"batch": 1, "seq": 7}, golden)["ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0]]


def test_the_caller_is_bound_and_released() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pytest.raises(KeyError), bound([core]):
        assert os.sched_getaffinity(0) == {core}
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_tables_align_numbers_right_and_words_left() -> None:
    assert table(("name", "ms"), [("a", "10.5"), ("bcd", "9.5")]).splitlines() == [
        "name    ms",
        "----  ----",
        "a     10.5",
        "bcd    9.5",
    ]
