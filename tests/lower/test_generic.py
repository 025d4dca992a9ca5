"""Operators without a kernel: TVM's importer and our schedules, against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.lower.build import fuse_generic
from khtst_compile.lower.importer import explicit_dtypes
from khtst_compile.lower.relax import kernel_graph, to_relax
from khtst_compile.targets.table import target


class Wrap(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


INTS, FLOATS = torch.arange(24).reshape(4, 6), torch.linspace(-2, 3, 24).reshape(4, 6)
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "int times float scalar": (lambda x: x * 1.001, INTS),
    "int divided": (lambda x: x / 3, INTS),
    "int plus float tensor": (lambda x: x + torch.tensor(0.5), INTS),
    "cumsum of bool": (lambda x: (x > 5).cumsum(1), INTS),
    "int compared with float": (lambda x: (x > 7.5).float(), INTS),
    "power": (lambda x: x**2 + 2 * x, FLOATS),
    "softmax": (lambda x: x.softmax(-1), FLOATS),
    "mean over rows": (lambda x: x.mean(0), FLOATS),
    "sum over columns": (lambda x: x.sum(-1, keepdim=True), FLOATS),
    "transposed and flattened": (lambda x: x.T.reshape(-1) + 1.0, FLOATS),
    "dynamic slice": (lambda x: torch.arange(64)[None, : x.shape[0]] + x[:, :1].T, FLOATS),
    "where": (lambda x: torch.where(x > 0, x, torch.zeros(())), FLOATS),
    "masked mean": (lambda x: (x * (x > 0)).sum(1) / (x > 0).sum(1).clamp(min=1), FLOATS),
    "largest and smallest": (lambda x: x.amax(-1) - x.amin((0, 1)), FLOATS),
    "selu": (lambda x: nn.functional.selu(x) + nn.functional.elu(x, 0.5), FLOATS),
    "sorted with equal elements": (lambda x: (x % 5).sort(dim=0, descending=True, stable=True)[1] * 10 + (x % 5).sort()[0], INTS),
    "places in a queue": (lambda x: x.argsort(dim=0, descending=True, stable=True).argsort(dim=0), (FLOATS * 2).round()),
    "largest three and smallest two": (
        lambda x: torch.cat([x.topk(3, 1)[0], x.topk(2, -1, largest=False)[1].float()], 1),
        FLOATS.sin(),
    ),
    "ids of levels, selected, widened and stacked": (
        lambda x: torch.stack([x[..., 1].long(), (x[..., 0] * 7).long() + x[..., 2]], -1),
        torch.arange(24, dtype=torch.int32).reshape(4, 2, 3),
    ),
    "concatenated": (lambda x: torch.cat([x, -x], -1).tanh(), FLOATS),
}


@pytest.mark.parametrize("name", CASES)
def test_generic_operators_compute_what_torch_does(name: str, tmp_path: Path) -> None:
    function, example = CASES[name]
    program = capture_module(Wrap(function), (example,))
    kc.quantize(program, tmp_path / "q", recipe="fp32")
    # `lower` itself compares the outputs with torch and raises OverBudget where they differ.
    kc.lower(tmp_path / "q", tmp_path / "l", target="x86-avx2")
    loaded = kc.load(tmp_path / "l", threads=1)
    x = torch.cat([example, example.flip(0)])
    want = function(x)
    got = loaded.run({"x": x.numpy()})["output"]
    assert got.dtype.name == str(want.dtype).removeprefix("torch.")
    torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-5, atol=1e-6)  # other order of sums, polynomial tanh and exp


def test_implied_conversions_become_explicit() -> None:
    program = capture_module(Wrap(lambda x: x * 1.001), (INTS,))
    casts = [n for n in explicit_dtypes(program).graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert len(casts) == 1 and casts[0].meta["val"].dtype is torch.float32


def test_what_has_no_kernel_is_fused_parallel_and_vectorized() -> None:
    program = capture_module(Wrap(lambda x: (x * 2 + 1).tanh().mean(1)), (torch.randn(4, 33, 48),))
    chosen = target("x86-avx2")
    import tvm

    with tvm.target.Target(chosen.tvm_target()):
        module = chosen.finalize(fuse_generic(to_relax(kernel_graph(program), chosen).module))
    functions = [f for _, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert functions
    for function in functions:
        text = function.script()
        assert "T.parallel(" in text and "T.vectorized(" in text, text
