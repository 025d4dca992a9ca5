"""Where a run keeps its intermediate values: shared safely, sized by the call at hand, and at no cost worth naming."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import khtst_compile as kc
from khtst_compile.errors import ResourceError
from khtst_compile.lower.plan import _share, _Value

Draw = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def fresh(library: Path) -> Any:
    return kc.load(library, threads=1)


def calls(loaded: Any, inputs: dict[str, np.ndarray]) -> list[str]:
    """The functions one run calls, in order."""
    names: list[str] = []

    def note(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
        if before:
            names.append(name)

    loaded._engine._vm.set_instrument(note)
    loaded.run(inputs)
    return names


def test_a_run_calls_kernels_and_little_else(fresh: Any, draw: Draw) -> None:
    fresh.run(draw(2, 5))
    names = calls(fresh, draw(2, 5))
    counted = Counter(n for n in names if n.startswith("vm.builtin."))
    assert not {"vm.builtin.alloc_storage", "vm.builtin.copy"} & counted.keys()
    # Each buffer is fetched once and no weight is; the outputs are made a tuple and checked against their types.
    assert counted["vm.builtin.tuple_getitem"] == len(fresh._engine._room.held) + len(fresh.outputs)
    assert counted["vm.builtin.make_tuple"] == 1
    # A tensor is made once for each buffer and shape, so the second of two equal blocks finds all it needs: eight kernels follow at once.
    second = next(i for i, n in reversed(list(enumerate(names))) if n.startswith("attention"))
    assert not [n for n in names[second : second + 8] if n.startswith("vm.builtin.")]
    assert sum(counted.values()) <= 60, counted  # a third are checks and shapes of inputs and outputs; none grows with the blocks


def test_results_are_the_callers(fresh: Any, draw: Draw) -> None:
    first = fresh.run(draw(3, 9, seed=1))["output"]
    kept = first.copy()
    second = fresh.run(draw(3, 9, seed=2))["output"]
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(first, second)
    first[:] = np.nan
    np.testing.assert_array_equal(fresh.run(draw(3, 9, seed=1))["output"], kept)


def test_inputs_stay_as_they_are_and_may_have_any_layout(fresh: Any, draw: Draw) -> None:
    inputs = draw(4, 6)
    want = fresh.run(inputs)["output"]
    odd = {"ids": np.asfortranarray(inputs["ids"]), "mask": np.repeat(inputs["mask"], 2, axis=1)[:, ::2]}
    odd["ids"] = odd["ids"].astype(odd["ids"].dtype.newbyteorder(">"))
    before = {k: v.copy() for k, v in odd.items()}
    np.testing.assert_array_equal(fresh.run(odd)["output"], want)
    for name, array in before.items():
        np.testing.assert_array_equal(odd[name], array)


def test_shapes_may_grow_and_shrink_from_call_to_call(library: Path, fresh: Any, draw: Draw) -> None:
    for batch, length in [(1, 1), (4, 40), (1, 3), (40, 4), (2, 64), (1, 1), (4, 40)]:
        inputs = draw(batch, length, seed=batch + length)
        want = kc.load(library, threads=1).run(inputs)["output"]
        np.testing.assert_array_equal(fresh.run(inputs)["output"], want)


def test_memory_follows_the_calls(fresh: Any, draw: Draw) -> None:
    def held(batch: int, length: int) -> int:
        fresh.run(draw(batch, length))
        return sum(fresh._engine._room.held)

    small, large = held(1, 8), held(16, 64)
    assert large > 64 * small  # 128 times as many rows, less what does not depend on them
    assert held(15, 64) == large  # near enough to be kept
    assert held(1, 8) == small


def test_a_call_too_large_for_memory_is_refused_and_the_next_one_runs(
    fresh: Any, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = fresh.run(draw(1, 8))["output"]
    sizes = fresh._engine._sizes
    monkeypatch.setattr(fresh._engine, "_sizes", lambda *inputs: [1 << 60 for _ in sizes(*inputs)])
    with pytest.raises(ResourceError, match="smaller batch"):
        fresh.run(draw(2, 8))
    monkeypatch.undo()
    np.testing.assert_array_equal(fresh.run(draw(1, 8))["output"], want)


@pytest.mark.parametrize("seed", range(20))
def test_values_needed_together_never_share_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [tvm.runtime.convert([int(n)]) for n in range(1, 5)]
    values = []
    for place in range(60):
        kind = int(rng.integers(4))
        factors = (0, 1) if rng.random() < 0.7 else (0,)
        values.append(_Value(place, shapes[kind], "int8", place, place + int(rng.integers(12)), factors, kind + 1))
    buffers = _share(values)
    assert sorted(v.var for b in buffers for v in b.values) == list(range(60))
    assert len(buffers) < 30  # sharing happens
    for buffer in buffers:
        assert all(v.factors == buffer.values[0].factors and v.count <= buffer.values[0].count for v in buffer.values)
        spans = sorted((v.first, v.last) for v in buffer.values)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
