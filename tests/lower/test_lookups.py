"""Lookups in codebooks on their way through the compiler: taps, replay, verification, listings, threads, and what finds which fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import fx, nn

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.capture.factory import capture_module
from khtst_compile.listing import list_kernels
from khtst_compile.lower.independent import independent_axis
from khtst_compile.lower.relax import Graph, kernel_graph
from khtst_compile.lower.replay import replay
from khtst_compile.lower.replay_lookups import REGRET, judge_lookup, regret
from khtst_compile.program import Program
from khtst_compile.runtime import WEIGHTS
from tests.targets.codebooks import Book, Grid, book, grid

LOOKUP, STEPS = torch.ops.khtst.codebook_lookup.default, torch.ops.khtst.step_lookup.default


class Stepped(nn.Module):
    """x (batch, n, 12) -> what an inner linear, a grid and an outer linear make of it, and int64 ids (batch, n)."""

    def __init__(self, made: Grid):
        super().__init__()
        for name in ("thresholds", "steps", "basis"):
            self.register_buffer(name, getattr(made, name))
        self.inner, self.outer = nn.Linear(12, made.basis.numel()), nn.Linear(made.basis.numel(), 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = STEPS(self.inner(x), self.thresholds, self.steps, self.basis)
        return self.outer(values), ids.long()


class Coded(nn.Module):
    """x (batch, n, 12) -> values (batch, n, v), ids of the first level int64 (batch, n), and of all levels (batch, n, levels) int64."""

    def __init__(self, made: Book, between: Callable[[torch.Tensor], torch.Tensor] = lambda z: z):
        super().__init__()
        self.running, self.between = made.running, between
        for name in ("codes", "bias", "table"):
            self.register_buffer(name, getattr(made, name))
        self.inner = nn.Linear(12, made.codes.shape[-1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, ids = LOOKUP(self.between(self.inner(x)), self.codes, self.bias, self.table, self.running, True)
        return values, ids[..., 0].long(), torch.stack([ids[..., i].long() for i in range(ids.shape[-1])], -1)


def samples(count: int = 24) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 6, 12)).astype(np.float32)


def captured(module: nn.Module) -> Program:
    return capture_module(module.eval(), (torch.from_numpy(samples(3)),), shapes={"batch": (1, 64)}, source="coded")


def quantized(module: nn.Module, folder: Path, recipe: str = "w8a8") -> Path:
    np.save(folder / "x.npy", samples())
    kc.quantize(captured(module), folder / "q", calib=folder / "x.npy", recipe=recipe)
    return folder / "q"


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid behind an int8 linear, quantized ("q"), lowered ("x86") and exported ("onnx")."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("stepped")
    quantized(Stepped(grid(9, 5)), folder)
    kc.lower(folder / "q", folder / "x86", target="x86-avx2")
    kc.export(folder / "q", folder / "onnx")
    return folder


def test_a_grid_is_one_kernel_whose_ids_are_a_tap(stepped: Path) -> None:
    taps = kc.inspect(stepped / "x86")["taps"]
    assert [(t["kind"], t["features"]) for t in taps if t["operator"] == "step_lookup"] == [("float", 9), ("ids", None)]
    loaded, program = kc.load(stepped / "x86"), kc.load(stepped / "x86").manifest["program"]
    assert [call["operator"] for call in program].count("step_lookup") == 1
    for size in (1, 5):
        out = loaded.run({loaded.inputs[0].name: samples(size)})
        assert [v.dtype for v in out.values()] == [np.float32, np.int64]
    assert loaded.manifest["independent"] == "batch"


@pytest.mark.parametrize("engine", ["x86", "onnx"])
def test_verify_finds_it_the_same(engine: str, stepped: Path) -> None:
    for reference in (stepped / "q", None):
        report = kc.verify(stepped / engine, reference=reference)
        assert report.ok, report.table()
    report = kc.verify(stepped / engine, reference=stepped / "q")
    (ids,) = [r for r in report.rows if r.site and r.what.endswith("ids")]
    assert (ids.value, ids.budget) == (0.0, 0.0)


def test_a_fault_in_a_table_of_steps_is_named(stepped: Path, tmp_path: Path) -> None:
    shutil.copytree(stepped / "x86", tmp_path / "bad")
    manifest = json.loads((tmp_path / "bad" / artifact.MANIFEST).read_text())
    data = np.fromfile(tmp_path / "bad" / WEIGHTS, np.uint8)
    (entry,) = [e for e in manifest["weights"] if e["dtype"] == "float32" and e["shape"] == [5 * 16]]
    data[entry["offset"] : entry["offset"] + 4 * 5 * 16].view(np.float32)[:] *= np.float32(1 + 2**-22)
    data.tofile(tmp_path / "bad" / WEIGHTS)
    manifest["files"][WEIGHTS]["sha256"] = artifact.sha256(tmp_path / "bad" / WEIGHTS)
    (tmp_path / "bad" / artifact.MANIFEST).write_text(json.dumps(manifest))
    report = kc.verify(tmp_path / "bad", reference=stepped / "q")
    assert report.first_over is not None and report.first_over.what == "step_lookup values"


def test_the_listing_has_it(stepped: Path) -> None:
    (row,) = [r for r in list_kernels(stepped / "x86").rows if r.operator == "step_lookup"]
    assert (row.macs, row.outputs, row.shapes[-1]) == (0, 2, row.shapes[0][:-1])


def taps_of(graph: Graph, x: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and taps as a perfect engine returns them."""
    seen: dict[str, Any] = {}

    def keep(node: Any, value: Any) -> Any:
        seen[node.name] = value
        return value

    with torch.no_grad():
        outputs = graph.program.run({graph.program.inputs[0].name: x}, keep)
    return [v.numpy() for v in outputs.values()], [seen[t.node].numpy().copy() for t in graph.taps]


def report_of(graph: Graph, x: torch.Tensor, outputs: list[np.ndarray], taps: list[np.ndarray]) -> list[str]:
    """What is over its budget."""
    rows = replay(graph, outputs, taps, {graph.program.inputs[0].name: x})
    return [r.what for r in rows if not r.ok]


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("generic", [False, True])
def test_replay_of_codebooks(running: bool, generic: bool) -> None:
    """One id that is not the nearest, one bit of a value: each is over its budget, whether the vectors are known to the bit or not."""
    torch.manual_seed(1)
    graph = kernel_graph(captured(Coded(book(3, 30, 8, bias=True, running=running), torch.tanh if generic else lambda z: z)))
    x = torch.from_numpy(samples(4))
    at = {t.kind: i for i, t in enumerate(graph.taps) if t.operator == "codebook_lookup"}
    assert graph.taps[at["ids"]].features == 3 and graph.taps[at["float"]].features == 8
    outputs, taps = taps_of(graph, x)
    assert report_of(graph, x, outputs, taps) == []
    wrong = [t.copy() for t in taps]
    wrong[at["ids"]][0, 0, 1] = (wrong[at["ids"]][0, 0, 1] + 1) % 30
    assert "codebook_lookup ids" in report_of(graph, x, outputs, wrong)
    wrong = [t.copy() for t in taps]
    wrong[at["float"]].view(np.int32)[1, 2, 3] ^= 1
    assert report_of(graph, x, outputs, wrong)[0] == "codebook_lookup values"
    wrong = [t.copy() for t in taps]
    wrong[at["ids"]][0, 0, 0] = 30
    assert "codebook_lookup ids" in report_of(graph, x, outputs, wrong)


def test_a_tie_that_other_roundings_break_is_no_fault() -> None:
    """Two codes that score within a rounding of the vectors': either is right where the vectors themselves are not known to the bit."""
    made = book(1, 20, 8)
    z = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)) * 3
    first, second = (z @ made.codes[0].T)[0].topk(2).indices.tolist()
    apart = made.codes[0, first] - made.codes[0, second]
    z = z - (z @ apart) / apart.square().sum() * apart
    lost = [regret(z, made.codes, None, made.table, True, torch.tensor([[i]], dtype=torch.int32)) for i in range(20)]
    assert max(lost[first], lost[second]) < 1e-6
    assert min(v for i, v in enumerate(lost) if i not in (first, second)) > REGRET


def test_steps_beside_a_threshold() -> None:
    """Of vectors that are known but for roundings a feature next to a threshold may take the step on either side, and no other feature."""
    made = Grid(
        torch.tensor([[0.0, 1.0]]).repeat(3, 1), torch.tensor([[-1.0, 0.0, 1.0]]).repeat(3, 1), torch.tensor([1, 3, 9]).int()
    )
    z = torch.tensor([[0.5, 1.0 + 1e-6, -0.5]])
    operands = [z, made.thresholds, made.steps, made.basis]
    node = fx.Graph().call_function(STEPS)

    def over(output: int, got: torch.Tensor) -> list[bool]:
        return [not r.ok for r in judge_lookup("", "", node, output, got, None, operands, exact=False)]

    assert over(0, torch.tensor([[0.0, 1.0, -1.0]])) == over(0, torch.tensor([[0.0, 0.0, -1.0]])) == [False]
    assert over(0, torch.tensor([[1.0, 1.0, -1.0]])) == over(0, torch.tensor([[0.0, -1.0, -1.0]])) == [True]
    far = z - torch.tensor([[0.0, 0.3, 0.0]])
    assert [not r.ok for r in judge_lookup("", "", node, 1, torch.tensor([8]), None, [far, *operands[1:]], exact=False)] == [True]


@pytest.mark.parametrize("module", [lambda: Coded(book(2, 30, 8, bias=True)), lambda: Stepped(grid(9, 5))])
def test_samples_of_a_batch_are_independent(module: Callable[[], nn.Module]) -> None:
    assert independent_axis(kernel_graph(captured(module())).program) == "batch"


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A residual codebook behind an int8 linear, quantized ("q") and exported ("onnx")."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("coded")
    quantized(Coded(book(3, 30, 8, bias=True)), folder)
    kc.export(folder / "q", folder / "onnx")
    return folder


def test_onnx_is_verified_id_by_id(coded: Path) -> None:
    report = kc.verify(coded / "onnx", reference=coded / "q")
    assert report.ok, report.table()
    assert [r.value for r in report.rows if r.what in ("ids", "values")] == [0.0, 0.0]
    assert kc.verify(coded / "onnx").ok


def test_a_fault_in_a_stored_code_is_named(coded: Path, tmp_path: Path) -> None:
    shutil.copytree(coded / "onnx", tmp_path / "bad")
    path = tmp_path / "bad" / artifact.ONNX_MODEL
    model = onnx.load(path)
    stored = [t for t in model.graph.initializer if list(t.dims) == [30, 8] and ".codes." in t.name]
    assert len(stored) == 3
    array = onnx.numpy_helper.to_array(stored[1]).copy()
    array[:] = array[::-1]
    stored[1].CopyFrom(onnx.numpy_helper.from_array(array, stored[1].name))
    onnx.save(model, path)
    manifest = json.loads((tmp_path / "bad" / artifact.MANIFEST).read_text())
    manifest["files"][artifact.ONNX_MODEL] = {"sha256": artifact.sha256(path), "bytes": path.stat().st_size}
    (tmp_path / "bad" / artifact.MANIFEST).write_text(json.dumps(manifest))
    report = kc.verify(tmp_path / "bad", reference=coded / "q")
    assert report.first_over is not None and report.first_over.what == "ids"


def test_ids_of_a_quantized_program_may_differ_as_much_as_measured(coded: Path) -> None:
    figures = kc.inspect(coded / "q")["golden"]["accuracy"]
    shares = {name: value for name, value in figures.items() if name.endswith("share that differs")}
    assert len(shares) == 2 and all(0 <= v < 0.5 for v in shares.values())
