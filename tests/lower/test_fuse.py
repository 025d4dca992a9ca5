"""What fusion recognizes, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.api import load_program
from khtst_compile.capture.factory import capture_module
from khtst_compile.lower.fuse import fuse
from khtst_compile.program import Program, call_nodes, check_program

aten, khtst = torch.ops.aten, torch.ops.khtst


@pytest.fixture(scope="module")
def program(quantized: Path) -> Program:
    loaded: Program = load_program(artifact.read(quantized))
    return loaded


def run(program: Program, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    return program.run({k: torch.from_numpy(v) for k, v in inputs.items()})["output"]


def test_every_part_of_a_transformer_is_fused(program: Program) -> None:
    fused, counts = fuse(program)
    check_program(fused)
    # Two blocks: q, k, v merge into one; out, up, down; and the head.
    found = {rule: n for rule, n in counts.items() if n}
    assert found == {"attention": 2, "projections": 2, "norms": 4, "embeddings": 1, "activations": 2, "linears": 9}
    left = {str(n.target) for n in fused.graph.nodes if n.op == "call_function"}
    for whole in ("layer_norm", "gelu", "scaled_dot_product_attention", "w8a8_linear", "aten.linear", "embedding"):
        assert not [t for t in left if whole in t], whole


def test_fusion_computes_the_same(program: Program, draw: Callable[..., dict[str, np.ndarray]]) -> None:
    fused, _ = fuse(program)
    for batch, length in ((1, 1), (3, 11), (5, 64)):
        inputs = draw(batch, length, seed=length)
        # The same torch operators on the same values; only the residual addition may be ordered differently (it is not).
        torch.testing.assert_close(run(fused, inputs), run(program, inputs), rtol=0, atol=1e-6)


def test_a_mask_of_keys_is_read_without_its_query_axis(program: Program) -> None:
    fused, _ = fuse(program)
    for node in call_nodes(fused.graph, khtst.attention.default):
        mask = node.args[3]
        assert tuple(mask.meta["val"].shape)[1:3] == (1, 1)  # type: ignore[union-attr]


def test_a_causal_mask_keeps_its_query_axis() -> None:
    class Causal(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = x.shape[2]
            seen = torch.arange(n)[None, :] <= torch.arange(n)[:, None]
            return nn.functional.scaled_dot_product_attention(x, x, x, seen[None, None])

    program = capture_module(Causal(), (torch.randn(2, 2, 5, 8),), shapes={"x.2": (1, 32)})
    fused, counts = fuse(program)
    assert counts["attention"] == 1
    node = next(call_nodes(fused.graph, khtst.attention.default))
    assert node.args[3].meta["val"].shape[2] != 1  # type: ignore[union-attr]
    x = torch.randn(3, 2, 9, 8)
    torch.testing.assert_close(fused.run({"x": x})["output"], program.run({"x": x})["output"], rtol=0, atol=1e-6)


class Shared(nn.Module):
    """A linear whose result is read twice, and a sum whose other side is broadcast: neither may be swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.shift = nn.Parameter(torch.randn(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return torch.relu(y) + y + (self.b(x) + self.shift)


def test_what_is_read_twice_or_broadcast_stays_outside() -> None:
    program = capture_module(Shared().eval(), (torch.randn(4, 16),))
    fused, counts = fuse(program)
    assert counts["linears"] == 2
    nodes = list(call_nodes(fused.graph, khtst.linear.default))
    assert [n.args[3] for n in nodes] == ["none", "none"]
    assert [n.args[4] for n in nodes] == [None, None]
    x = torch.randn(6, 16)
    torch.testing.assert_close(fused.run({"x": x})["output"], program.run({"x": x})["output"], rtol=0, atol=1e-6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.a(x))


def test_activation_then_residual_go_into_the_linear() -> None:
    program = capture_module(Residual().eval(), (torch.randn(4, 16),))
    fused, _ = fuse(program)
    node = next(call_nodes(fused.graph, khtst.linear.default))
    assert node.args[3] == "silu" and node.args[4] is not None
    assert not list(call_nodes(fused.graph, aten.add.Tensor, aten.silu.default))
    x = torch.randn(6, 16)
    torch.testing.assert_close(fused.run({"x": x})["output"], program.run({"x": x})["output"], rtol=0, atol=1e-6)


class Adaptive(nn.Module):
    """A norm and a linear whose scale and bias are computed: nothing a kernel could have packed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x, (16,), s.mean(0), s.amax(0))
        return nn.functional.linear(y, self.weight, s.amin(0))


def test_computed_scales_and_biases_are_left_to_the_generic_path(tmp_path: Path) -> None:
    program = capture_module(Adaptive().eval(), {"x": torch.randn(4, 16), "s": torch.randn(4, 16)})
    _, counts = fuse(program)
    assert counts["norms"] == counts["linears"] == 0
    kc.quantize(program, tmp_path / "q", recipe="fp32")
    kc.lower(tmp_path / "q", tmp_path / "l", target="x86-avx2")  # compares the outputs with torch


def test_rms_norm_is_fused_with_its_own_epsilon() -> None:
    program = capture_module(nn.RMSNorm(16).eval(), (torch.randn(4, 16) * 1e-3,))
    fused, counts = fuse(program)
    assert counts["norms"] == 1
    x = torch.randn(6, 16) * 1e-3
    name = program.inputs[0].name
    torch.testing.assert_close(fused.run({name: x})["output"], program.run({name: x})["output"], rtol=1e-6, atol=1e-7)
