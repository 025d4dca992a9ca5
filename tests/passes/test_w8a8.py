"""`w8a8`: the integer program does what the operators say, takes the chain in, and keeps what it must in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from khtst_compile.capture import capture_module
from khtst_compile.contract import run_passes
from khtst_compile.errors import PassError, UsageError
from khtst_compile.linears import find_linears
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.passes import w8a8
from khtst_compile.passes.rotate import Rotate
from khtst_compile.passes.smooth import Smooth
from khtst_compile.passes.w8a8 import W8A8
from khtst_compile.program import call_nodes, site_of

aten, khtst = torch.ops.aten, torch.ops.khtst
CHAIN = [Smooth(alpha=0.5), Rotate(block=32, check=False)]


def quantized(program: Any, before: Any = (), **options: Any) -> Any:
    return run_passes(program, [*before, W8A8(**options)])


def count(program: Any, target: Any) -> int:
    return len(list(call_nodes(program.graph, target)))


@pytest.mark.parametrize(("name", "before"), [("w8a8.txt", ()), ("smooth_rotate_w8a8.txt", CHAIN)])
def test_golden(attention: Any, golden: Any, name: str, before: Any) -> None:
    golden(name, str(quantized(attention, before).graph) + "\n")


def test_the_whole_chain_moves_into_one_quantizer_a_group(attention: Any) -> None:
    after = quantized(attention, CHAIN)
    assert count(after, khtst.quantize_rows.default) == 3 and count(after, khtst.w8a8_linear.default) == 5
    assert count(after, khtst.rotate.default) == 0 and count(after, aten.linear.default) == 0
    assert count(after, aten.mul.Tensor) == count(attention, aten.mul.Tensor), "a smoothing multiply was left standing"
    assert after.history[-1]["changed"] == 5


def test_float_weights_are_gone(attention: Any) -> None:
    after = quantized(attention, CHAIN)
    matrices = {k: v for k, v in after.ep.state_dict.items() if v.dim() == 2}
    assert len(matrices) == 5 and all(v.dtype is torch.int8 for v in matrices.values())


def test_values_are_those_of_the_operators(make: Any, evaluate: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 8)))
    after = quantized(program)
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(5))
    (weight,) = (v for v in program.tensors().values() if v.dim() == 2)
    (bias,) = (v for v in program.tensors().values() if v.dim() == 1)
    scales = weight.abs().amax(1) / 127
    codes, row_scale = quantize_rows_reference(x, None, None, 0, 0)
    y = (codes.double() @ torch.round(weight / scales[:, None]).double().T) * (
        row_scale[..., None] * scales
    ).double() + bias.double()
    (out,) = after.run({after.inputs[0].name: x}).values()
    assert torch.equal(out, y.float())


def test_linear_after_linear_with_nothing_between(make: Any, evaluate: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 8)))
    for options in ({}, {"activations": "static"}):
        after = quantized(program, **options)
        assert count(after, khtst.w8a8_linear.default) == 2
        reference = evaluate(program)
        assert (evaluate(after) - reference).norm() < 0.1 * reference.norm()  # int8 with a 30-sigma channel: about 2 %


class Mixed(nn.Module):
    """A linear layer that reads few directions in many features, as layers of trained models do."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many, self.fc = nn.Linear(32, 4), nn.Linear(4, 64), nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.tanh(self.many(self.few(x))))


def codes_of(program: Any) -> list[list[list[int]]]:
    return [v.tolist() for v in program.ep.state_dict.values() if v.dtype is torch.int8]


def facts(program: Any) -> dict[str, Any]:
    found: dict[str, Any] = program.history[-1]["details"]
    return found


@pytest.mark.parametrize("before", [(), CHAIN])
def test_rounding_by_moments_leaves_less_error(make: Any, before: Any) -> None:
    program = make(Mixed())
    found = facts(quantized(program, before, keep_fp32="few;many"))["fc"]
    assert found["rounding"] == "gptq" and found["held_db"]["chosen"] < found["held_db"]["nearest"] - 3
    # Its price: single weights are further from what they were.
    nearest = facts(quantized(program, before, keep_fp32="few;many", rounding="nearest"))["fc"]
    assert nearest["rounding"] == "nearest" and nearest["weight_error_db"] < found["weight_error_db"]


def test_moments_that_mislead_are_not_followed(make: Any) -> None:
    program = make(Mixed())
    stats = program.stats
    (read,) = (linear.x.name for linear in find_linears(program.graph, program.tensors()) if site_of(linear.node) == "fc")
    direction = torch.linspace(-1, 1, 64) ** 3
    lie = {read: replace(stats.activations[read], moments=torch.outer(direction, direction) + 1e-6 * torch.eye(64))}
    misled = program.with_stats(replace(stats, activations={**stats.activations, **lie}))
    found = facts(quantized(misled, keep_fp32="few;many"))["fc"]
    assert found["rounding"] == "nearest" and found["held_db"]["chosen"] == found["held_db"]["nearest"]
    assert codes_of(quantized(misled, keep_fp32="few;many")) == codes_of(
        quantized(program, keep_fp32="few;many", rounding="nearest")
    )


def test_without_moments_weights_are_rounded_to_nearest(make: Any) -> None:
    program = make(Mixed())
    bare = {name: replace(seen, moments=None) for name, seen in program.stats.activations.items()}
    plain = quantized(program.with_stats(replace(program.stats, activations=bare)))
    assert {f["rounding"] for f in facts(plain).values()} == {"nearest"}
    assert codes_of(plain) == codes_of(quantized(program, rounding="nearest"))


class Tied(nn.Module):
    """The embedding's matrix is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 32)
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(ids)))


def test_a_tied_embedding_keeps_its_floats() -> None:
    from khtst_compile.capture import capture_module

    program = capture_module(Tied().eval(), (torch.arange(8).reshape(2, 4),))
    after = quantized(program)
    assert count(after, khtst.w8a8_linear.default) == 1 and count(after, aten.embedding.default) == 1
    assert sorted(str(v.dtype) for v in after.ep.state_dict.values() if v.shape == (24, 32)) == ["torch.float32", "torch.int8"]


@pytest.mark.parametrize("form", ["addmm", "mm", "matmul"])
def test_weights_stored_transposed(make: Any, evaluate: Any, form: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.ones(32, 24)), nn.Parameter(torch.ones(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if form == "addmm":
                return torch.addmm(self.b, x.flatten(0, 1), self.w)
            return torch.mm(x.flatten(0, 1), self.w) if form == "mm" else x @ self.w

    program = make(Product())
    after = quantized(program, CHAIN)
    assert count(after, khtst.w8a8_linear.default) == 1
    assert next(v for v in after.ep.state_dict.values() if v.dtype is torch.int8).shape == (24, 32)
    reference = evaluate(program)
    assert (evaluate(after) - reference).norm() < 0.05 * reference.norm()  # smoothed and rotated int8: about 1 %


def test_attention_products_are_not_linear_layers(make: Any) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) @ x.transpose(-1, -2)

    after = quantized(make(Scores()))
    assert after.history[-1]["changed"] == 1 and count(after, aten.matmul.default) == 1


def test_a_computed_weight_is_named(make: Any) -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.fc = nn.Parameter(torch.ones(24, 32)), nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.nn.functional.linear(x, self.w.tanh()))

    skipped = quantized(make(Computed())).history[-1]["skipped"]
    assert len(skipped) == 1 and "computed, not a constant" in skipped[0]["reason"]


def test_static_scales_are_constants(attention: Any, evaluate: Any) -> None:
    after = quantized(attention, CHAIN, activations="static")
    scales = {k: v for k, v in after.ep.state_dict.items() if k.endswith("_scale") and v.shape == (1,)}
    assert len(scales) == 3
    reference = evaluate(attention)
    dynamic = (evaluate(quantized(attention, CHAIN)) - reference).norm()
    static = (evaluate(after) - reference).norm()
    assert dynamic < static < 0.2 * reference.norm()


def test_a_static_scale_is_that_of_the_smoothed_and_rotated_rows(attention: Any) -> None:
    after = quantized(attention, CHAIN, activations="static")
    node = next(iter(call_nodes(after.graph, khtst.quantize_rows.default)))
    rows = run_passes(attention, [CHAIN[0]]).stats.activations[node.args[0].name]
    t = torch.ops.khtst.rotate(torch.cat([rows.rows, rows.held_rows]), 32, 32)
    assert after.tensors()[node.args[2].name].item() == pytest.approx(t.abs().max().item() / 127, rel=1e-6)


def test_percentile_clips(attention: Any) -> None:
    wide, narrow = (
        [v.item() for k, v in quantized(attention, activations="static", percentile=p).ep.state_dict.items() if v.shape == (1,)]
        for p in (100.0, 99.0)
    )
    assert all(n < w for n, w in zip(narrow, wide, strict=True))


def test_kept_and_tiny_layers_are_named(attention: Any, evaluate: Any) -> None:
    after = quantized(attention, keep_fp32="que*; head")
    assert {s["site"]: s["reason"] for s in after.history[-1]["skipped"]} == dict.fromkeys(
        ["query", "head"], "kept float32 as asked"
    )
    assert count(after, aten.linear.default) == 2
    none = quantized(attention, min_features=64).history[-1]
    assert none["changed"] == 0 and all("fewer than min_features=64" in s["reason"] for s in none["skipped"])


def test_layers_an_int32_cannot_sum_are_named(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8, "MAX_FEATURES", 31)
    history = quantized(attention).history[-1]
    assert history["changed"] == 0 and "could overflow" in history["skipped"][0]["reason"]


def test_details_name_every_layer(attention: Any) -> None:
    details = quantized(attention, CHAIN).history[-1]["details"]
    assert list(details) == ["query", "key", "value", "out", "head"]
    assert details["out"]["smoothed"] and details["out"]["block"] == 32 and details["out"]["weight_error_db"] < -35


def test_one_module_called_twice_is_two_layers(make: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.tanh(self.fc(x)))

    assert list(quantized(make(Twice())).history[-1]["details"]) == ["fc", "fc#2"]


def test_refuses_weights_that_are_not_finite(make: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 8)), calibrated=False)
    next(v for v in program.tensors().values() if v.dim() == 2)[0, 0] = float("inf")
    with pytest.raises(PassError, match="'0': its weight has NaN"):
        quantized(program)


def test_refuses_what_makes_no_sense(attention: Any, make: Any) -> None:
    with pytest.raises(UsageError, match="activations is 'none'"):
        quantized(attention, activations="none")
    with pytest.raises(UsageError, match="rounding is 'up'"):
        quantized(attention, rounding="up")
    with pytest.raises(UsageError, match="percentile is 0"):
        quantized(attention, percentile=0.0)
    with pytest.raises(PassError, match="never calibrated"):
        quantized(make(nn.Sequential(nn.Linear(32, 8)), calibrated=False), activations="static")
    with pytest.raises(PassError, match="nothing to quantize"):
        quantized(quantized(attention))


def test_a_layer_that_got_lost_is_caught(attention: Any, make: Any) -> None:
    with pytest.raises(PassError, match="5 linear layers went in, 1 quantized and 0 float32 came out"):
        W8A8().ensures(attention, quantized(make(nn.Sequential(nn.Linear(32, 8)))))


def test_products_in_other_forms_are_named() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.wide = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 3, padding=1)
            self.a, self.b, self.linear = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.wide(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.linear(torch.einsum("bsk,kn->bsn", x, self.a) @ (self.b * 2))

    program = run_passes(capture_module(Other().eval(), (torch.randn(4, 5, 16),)), [W8A8()])
    entry = program.history[-1]
    assert entry["changed"] == 1
    reasons = {s["site"]: s["reason"] for s in entry["skipped"]}
    assert len(reasons) == 3 and "a convolution of one point" in reasons["conv"]
    assert any("einsum 'bsk,kn->bsn'" in r for r in reasons.values())
    assert any("computed from constants" in r for r in reasons.values())
