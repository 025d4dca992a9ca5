"""A lowered program: right at every size, the same whatever the threads, honest about its inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.api import load_program
from khtst_compile.errors import OverBudget, UsageError
from khtst_compile.lower.relax import kernel_graph
from khtst_compile.lower.replay import replay
from khtst_compile.parity import relative_error_db

Draw = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def loaded(library: Path) -> Any:
    return kc.load(library, threads=1)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (2, 8), (3, 31), (5, 33), (2, 64)])
def test_every_kernel_agrees_at_awkward_sizes(quantized: Path, loaded: Any, draw: Draw, batch: int, length: int) -> None:
    inputs = draw(batch, length, seed=batch * 100 + length)
    graph = kernel_graph(load_program(artifact.read(quantized)))
    outputs, taps = loaded.run_with_taps(inputs)
    rows = replay(graph, list(outputs.values()), taps, {k: torch.from_numpy(v) for k, v in inputs.items()})
    assert len(rows) >= len(graph.taps)
    assert not [r for r in rows if not r.ok]


def test_both_functions_give_the_same_outputs(loaded: Any, draw: Draw) -> None:
    inputs = draw(3, 9)
    plain, (tapped, _) = loaded.run(inputs)["output"], loaded.run_with_taps(inputs)
    np.testing.assert_array_equal(plain, tapped["output"])


def test_outputs_follow_the_quantized_program(quantized: Path, loaded: Any, draw: Draw) -> None:
    inputs = draw(16, 12, seed=3)
    program = load_program(artifact.read(quantized))
    want = program.run({k: torch.from_numpy(v) for k, v in inputs.items()})["output"].numpy()
    # Kernels agree to a few ulp, but a code next to a tie may move by one and later layers pass that on; int8 noise itself is near -40 dB.
    assert relative_error_db(loaded.run(inputs)["output"], want) < -45


def test_threads_do_not_change_a_bit(library: Path, loaded: Any, draw: Draw) -> None:
    inputs = draw(7, 33, seed=5)
    one = loaded.run(inputs)["output"]
    two = kc.load(library, threads=2).run(inputs)["output"]
    np.testing.assert_array_equal(one, two)
    kc.load(library, threads=1)


def test_calls_from_several_threads(loaded: Any, draw: Draw) -> None:
    sizes = [(1, 3), (4, 12), (2, 40), (3, 7)]
    inputs = [draw(b, n, seed=i) for i, (b, n) in enumerate(sizes)]
    want = [loaded.run(x)["output"] for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(loaded.run(inputs[i])["output"], want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sizes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def bad(inputs: dict[str, np.ndarray], change: str) -> dict[str, np.ndarray]:
    ids, mask = inputs["ids"], inputs["mask"]
    return {
        "missing": {"ids": ids},
        "unknown": {**inputs, "more": ids},
        "dtype": {"ids": ids.astype(np.int32), "mask": mask},
        "rank": {"ids": ids[0], "mask": mask},
        "lengths": {"ids": ids, "mask": mask[:, :-1]},
        "too long": {"ids": np.zeros((1, 65), np.int64), "mask": np.ones((1, 65), bool)},
        "id too large": {"ids": np.full_like(ids, 50), "mask": mask},
        "id negative": {"ids": np.full_like(ids, -1), "mask": mask},
    }[change]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "missing \\['mask'\\]"),
        ("unknown", "unknown \\['more'\\]"),
        ("dtype", "input 'ids': dtype is int32; needed: int64"),
        ("rank", "input 'ids': shape is"),
        ("lengths", "axis 'seq'"),
        ("too long", "axis 'seq' is 65; needed: 1..64"),
        ("id too large", "values 50..50; needed: 0..49"),
        ("id negative", "values -1..-1; needed: 0..49"),
    ],
)
def test_wrong_inputs_are_refused_by_name(loaded: Any, draw: Draw, change: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loaded.run(bad(draw(2, 8), change))


def test_signature(loaded: Any) -> None:
    assert [(s.name, s.dtype, s.shape) for s in loaded.inputs] == [
        ("ids", "int64", ("batch", "seq")),
        ("mask", "bool", ("batch", "seq")),
    ]
    assert [(s.name, s.dtype, s.shape) for s in loaded.outputs] == [("output", "float32", ("batch", 7))]


def test_a_wrong_fusion_is_refused(quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of it is right, on the inputs it has: keys and values only change places."""
    from khtst_compile.lower import relax
    from khtst_compile.lower.fuse import fuse
    from khtst_compile.program import Program

    def wrong(program: Program) -> tuple[Program, dict[str, int]]:
        fused, counts = fuse(program)
        for node in fused.graph.nodes:
            if node.target is torch.ops.khtst.attention.default:
                q, k, v, *rest = node.args
                starts = list(rest[4])
                rest[4] = [starts[0], starts[2], starts[1]]
                node.args = (q, v, k, *rest)
        return fused, counts

    monkeypatch.setattr(relax, "fuse", wrong)
    with pytest.raises(OverBudget, match="output"):
        kc.lower(quantized, tmp_path / "x", target="x86-avx2")
    assert not (tmp_path / "x").exists()
