"""Codebook and step lookups in ONNX, run by onnxruntime with its graph optimizations and without: every id, and the bits of the values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from khtst_compile.errors import LoweringError
from khtst_compile.lower.onnx import export_onnx
from khtst_compile.lower.onnx_codebook import window
from khtst_compile.ops.codebook import LARGEST, exact_scores
from khtst_compile.program import Program, TensorSpec
from tests.targets.codebooks import CASES, Book, Grid, bad_rows, grid, near_ties, random_rows, step_rows

LOOKUP, STEPS = torch.ops.khtst.codebook_lookup.default, torch.ops.khtst.step_lookup.default
LEVELS = (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)


class Lookup(nn.Module):
    """z (.., d) -> values (.., v), ids (.., levels)."""

    def __init__(self, book: Book):
        super().__init__()
        self.running = book.running
        for name in ("codes", "bias", "table"):
            self.register_buffer(name, getattr(book, name))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return LOOKUP(z, self.codes, self.bias, self.table, self.running, False)


class Steps(nn.Module):
    """z (.., d) -> values (.., d), ids (..)."""

    def __init__(self, made: Grid):
        super().__init__()
        for name in ("thresholds", "steps", "basis"):
            self.register_buffer(name, getattr(made, name))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return STEPS(z, self.thresholds, self.steps, self.basis)


def program_of(module: nn.Module, z: torch.Tensor) -> Program:
    """All leading axes of z dynamic; outputs values and ids."""
    names = ("batch", "seq", "heads")[: z.dim() - 1]
    dims = {i: torch.export.Dim(name) for i, name in enumerate(names)}
    example = torch.zeros(*range(3, 2 + z.dim()), z.shape[-1])
    ep = torch.export.export(module.eval(), (example,), dynamic_shapes=(dims,), strict=False)
    values, ids = module(example)
    outputs = (
        TensorSpec("values", "float32", (*names, *values.shape[len(names) :])),
        TensorSpec("ids", "int32", (*names, *ids.shape[len(names) :])),
    )
    return Program(ep, (TensorSpec("z", "float32", (*names, z.shape[-1])),), outputs, dict.fromkeys(names, (0, 1 << 20)))


def run(path: Path | bytes, z: torch.Tensor, level: ort.GraphOptimizationLevel) -> tuple[torch.Tensor, torch.Tensor]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.graph_optimization_level = 1, 3, level
    session = ort.InferenceSession(path if isinstance(path, bytes) else str(path), options, providers=["CPUExecutionProvider"])
    values, ids = session.run(None, {"z": z.numpy()})
    return torch.from_numpy(values), torch.from_numpy(ids)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(module: nn.Module, z: torch.Tensor, folder: Path) -> Path:
    """Ids equal, values to the bit."""
    export_onnx(program_of(module, z), folder / "m.onnx")
    want_values, want_ids = module(z)
    for level in LEVELS:
        values, ids = run(folder / "m.onnx", z, level)
        assert ids.dtype == torch.int32 and torch.equal(ids, want_ids), f"{int((ids != want_ids).sum())} ids differ ({level})"
        assert same_bits(values, want_values), level
    return folder / "m.onnx"


@pytest.mark.parametrize("name", CASES)
def test_ids_and_values_to_the_bit(name: str, tmp_path: Path) -> None:
    book = CASES[name]()
    z = torch.cat([random_rows(book, 120), near_ties(book, 120), bad_rows(book)])
    check(Lookup(book), z, tmp_path)


@pytest.mark.parametrize("lead", [(0,), (0, 3), (4, 0), (2, 3), (1, 1), (2, 3, 4)])
def test_leading_axes(lead: tuple[int, ...], tmp_path: Path) -> None:
    book = CASES["residual"]()
    rows = random_rows(book, max(1, int(np.prod(lead))))[: int(np.prod(lead))]
    check(Lookup(book), rows.reshape(*lead, rows.shape[-1]), tmp_path)


def test_many_near_ties_of_one_large_codebook(tmp_path: Path) -> None:
    """Most rows are a rounding from a tie: a product of matrices alone decides hundreds of them otherwise."""
    book = CASES["large"]()
    z = near_ties(book, 2000)
    check(Lookup(book), z, tmp_path)
    scores = z @ book.codes[0].T
    plain = (scores if book.bias is None else scores + book.bias[0]).argmax(-1)
    assert int((plain != Lookup(book)(z)[1][:, 0]).sum()) > 50, "the sample must be able to show the fault"


def test_memory_is_the_codebooks(tmp_path: Path) -> None:
    """Rows that all need every code, since all codes are the same: they are scored row by row, and the first code wins."""
    torch.manual_seed(0)
    code = torch.randn(1, 64)
    book = Book(code.repeat(1, 512, 1), None, torch.randn(1, 512, 8), True)
    z = torch.randn(40, 64)
    path = check(Lookup(book), z, tmp_path)
    assert not Lookup(book)(z)[1].any()
    model = onnx.load(path)
    (loop,) = [n for n in model.graph.node if n.op_type == "Loop"]
    inner = {n.op_type for n in loop.attribute[0].g.node}
    assert "Mul" in inner and "MatMul" not in inner
    assert sum(n.op_type == "MatMul" for n in model.graph.node) == 1


@pytest.mark.parametrize("features, count", [(1, 7), (17, 40), (64, 300), (384, 64)])
@pytest.mark.parametrize("scale", [1e-22, 1.0, 1e12])
def test_the_window_holds(features: int, count: int, scale: float) -> None:
    """No score of float32 sums, here in orders of torch's own, is farther from the written order's than half the window."""
    g = torch.Generator().manual_seed(features)
    codes, bias = torch.randn(count, features, generator=g), torch.randn(count, generator=g)
    z = torch.randn(50, features, generator=g) * scale
    slope, offset = window(codes.numpy(), bias.numpy())
    width = z.double().norm(dim=-1, keepdim=True) * slope + offset
    row, code = (i.reshape(-1) for i in torch.meshgrid(torch.arange(50), torch.arange(count), indexing="ij"))
    exact = exact_scores(z[row], codes[code], bias[code]).reshape(50, count).double()
    for scores in (z @ codes.T + bias, (z.flip(-1) @ codes.flip(-1).T) + bias):
        assert ((scores.double() - exact).abs() <= width / 2).all()
    assert (width / 2).max() <= 1e-3 * max(scale, 1e-3) * features, "a window that wide would settle nothing"


@pytest.mark.parametrize("which", ["codes", "bias"])
def test_a_planted_fault_is_found(which: str, tmp_path: Path) -> None:
    """One element of one stored code, or one bias, off by a little: the check above sees it."""
    book = CASES["bias"]()
    z = near_ties(book, 400)
    path = check(Lookup(book), z, tmp_path)
    model = onnx.load(path)
    shape = list(book.codes[0].shape) if which == "codes" else [book.codes.shape[1]]
    (stored,) = [t for t in model.graph.initializer if list(t.dims) == shape and t.data_type == 1 and f".{which}." in t.name]
    array = onnx.numpy_helper.to_array(stored).copy()
    array[1] += 1e-3
    stored.CopyFrom(onnx.numpy_helper.from_array(array, stored.name))
    _, ids = run(model.SerializeToString(), z, LEVELS[0])
    assert not torch.equal(ids, Lookup(book)(z)[1])


def test_codes_whose_scores_could_be_infinite_are_refused(tmp_path: Path) -> None:
    book = Book(torch.full((1, 4, 512), LARGEST), None, torch.zeros(1, 4, 512), True)
    z = torch.zeros(3, 512)
    with pytest.raises(LoweringError, match="scale the codes down"):
        export_onnx(program_of(Lookup(book), z), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("features, most", [(1, 2), (4, 8), (9, 2), (16, 5), (33, 64)])
def test_steps(features: int, most: int, tmp_path: Path) -> None:
    made = grid(features, most)
    check(Steps(made), step_rows(made, 200), tmp_path)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (2, 3), (2, 3, 4)])
def test_steps_of_leading_axes(lead: tuple[int, ...], tmp_path: Path) -> None:
    made = grid(5, 4)
    rows = step_rows(made, max(5, int(np.prod(lead))))[: int(np.prod(lead))]
    check(Steps(made), rows.reshape(*lead, 5), tmp_path)
