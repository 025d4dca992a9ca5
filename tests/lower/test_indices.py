"""Indices outside the tensor: clipped in the compiled program, so that nothing beside it is read or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.errors import LoweringError
from khtst_compile.lower.relax import kernel_graph
from khtst_compile.program import call_nodes

ROWS, WIDTH = 4, 16
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Indexed(nn.Module):
    """A float32 linear, and `function` of its result (batch or 4, 16) and of ids (4,) int64."""

    def __init__(self, function: Function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), ids)


# name -> (function, whether -1 means the last entry)
FUNCTIONS: dict[str, tuple[Function, bool]] = {
    "gather": (lambda y, i: y.gather(1, i[:, None]), False),
    "gather rows": (lambda y, i: y.gather(0, i[:, None]), False),
    "index_select": (lambda y, i: y.index_select(0, i), False),
    "scatter": (lambda y, i: y.scatter(0, i[:, None], y[:1].expand(4, WIDTH)), False),
    "scatter a value": (lambda y, i: y.scatter(1, i[:, None], 7.0), False),
    "index": (lambda y, i: y[i], True),
    "index of columns": (lambda y, i: y[:, i], True),
    "index of both axes": (lambda y, i: y[:, :4][i, i], True),
    "index_put": (lambda y, i: torch.index_put(y[:, :4], (i, i), y[:, 0]), True),
    "index_put, summed": (lambda y, i: torch.index_put(y[:, :4], (i, i), y[:, 0], True), True),
    "index_add": (lambda y, i: y.index_add(1, i, y[:, :4]), False),
}


def artifact_of(function: Function, folder: Path, batch: int | None = ROWS) -> tuple[nn.Module, kc.runtime.Artifact]:
    torch.manual_seed(0)
    module = Indexed(function).eval()
    shapes = {"x.0": (1, 8)} if batch is None else {"batch": (ROWS, ROWS)}
    program = capture_module(module, (torch.randn(ROWS, WIDTH), torch.tensor([0, 1, 2, 3])), shapes=shapes)
    kc.quantize(program, folder / "q", recipe="fp32")
    kc.lower(folder / "q", folder / "l", target="x86-avx2")
    return module, kc.load(folder / "l", threads=1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_index_is_clipped_to_the_tensor(name: str, tmp_path: Path) -> None:
    function, wraps = FUNCTIONS[name]
    module, loaded = artifact_of(function, tmp_path)
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    far, valid = np.array([10**12, -(10**12), 2, 99]), np.array([3, 0, 2, 3])
    columns = "column" in name or name in ("gather", "scatter a value", "index_add")
    valid = np.where(far > 50, WIDTH - 1, valid) if columns else valid
    with torch.no_grad():
        want = module(torch.from_numpy(x), torch.from_numpy(valid)).numpy()
    np.testing.assert_allclose(loaded.run({"x": x, "ids": valid})["output"], want, rtol=0, atol=1e-5)
    assert np.array_equal(loaded.run({"x": x, "ids": far})["output"], loaded.run({"x": x, "ids": valid})["output"])
    last = np.array([-1, 0, 1, 2])
    if wraps:
        with torch.no_grad():
            want = module(torch.from_numpy(x), torch.from_numpy(last)).numpy()
        np.testing.assert_allclose(loaded.run({"x": x, "ids": last})["output"], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gather rows", "index"])
def test_a_symbolic_size_bounds_too(name: str, tmp_path: Path) -> None:
    module, loaded = artifact_of(FUNCTIONS[name][0], tmp_path, batch=None)
    for rows in (1, 5, 8):
        x = np.random.default_rng(rows).standard_normal((rows, WIDTH), dtype=np.float32)
        valid = np.array([rows - 1, 0, 0, rows - 1])
        with torch.no_grad():
            want = module(torch.from_numpy(x), torch.from_numpy(valid)).numpy()
        got = loaded.run({"x": x, "ids": np.array([10**9, -(10**9), 0, rows])})["output"]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_mask_chooses_elements(tmp_path: Path) -> None:
    def fill(y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[y > 0] = 7.0
        return y + ids[:, None]

    module, loaded = artifact_of(fill, tmp_path)
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    with torch.no_grad():
        want = module(torch.from_numpy(x), torch.arange(4)).numpy()
    np.testing.assert_allclose(loaded.run({"x": x, "ids": np.arange(4)})["output"], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, i: y.put(i, y[:, 0]),
        lambda y, i: y.masked_scatter(y > 0, y),
        lambda y, i: nn.functional.embedding_bag(i[:, None], y),
    ],
    ids=["put", "masked_scatter", "embedding_bag"],
)
def test_forms_without_a_check_are_refused(function: Function, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="indexes memory unchecked"):
        artifact_of(function, tmp_path)


def test_an_index_that_is_in_range_by_its_making_costs_nothing() -> None:
    def rows(y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        counted = torch.arange(y.shape[0])[:, None]
        stored = torch.tensor([[3, 0], [1, 2]])[:, :1]
        return y[counted].sum() + y.gather(1, stored.expand(2, 4)[:1]) + ids[:, None]

    program = capture_module(Indexed(rows).eval(), (torch.randn(ROWS, WIDTH), torch.arange(4)), shapes={"x.0": (1, 8)})
    graph = kernel_graph(program).program.graph
    assert list(call_nodes(graph, torch.ops.aten.index.Tensor)) and list(call_nodes(graph, torch.ops.aten.gather.default))
    assert not list(call_nodes(graph, torch.ops.aten.clamp.default))
