"""Scales and rounding: what holds for any tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.quant.scales import (
    dequantize_weight,
    fake_quantize_rows,
    fake_quantize_weight,
    quantize_weight,
    round_straight_through,
    static_scale,
    weight_scales,
)

SIZES = st.sampled_from([1, 7, 8, 9, 31, 33])


@given(SIZES, SIZES, st.integers(0, 2**31 - 1), st.floats(1e-6, 1e6))
@settings(max_examples=60, deadline=None)
def test_weight_codes_are_within_half_a_step(out: int, features: int, seed: int, size: float) -> None:
    weight = torch.randn(out, features, generator=torch.Generator().manual_seed(seed)) * size
    codes, scales = quantize_weight(weight)
    assert codes.dtype is torch.int8 and int(codes.min()) >= -127
    # Half a step, and 1e-4 of one for the division and the product, each rounded to float32 at up to 127 steps.
    assert bool(((dequantize_weight(codes, scales) - weight).abs() <= (0.5 + 1e-4) * scales.unsqueeze(1)).all())
    assert bool((codes.abs().amax(1) == 127).all()), "the largest weight of each channel must use the last level"


def test_halves_round_to_even() -> None:
    codes, _ = quantize_weight(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -2.5]]))
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_a_row_of_zeros_has_scale_one_and_zero_codes() -> None:
    codes, scales = quantize_weight(torch.zeros(2, 3))
    assert scales.tolist() == [1.0, 1.0] and not codes.any()


@given(SIZES, SIZES, st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_fake_rows_are_what_the_operator_codes_stand_for(rows: int, features: int, seed: int) -> None:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    x[0] = 0
    codes, scale = quantize_rows_reference(x, None, None, 0, 0)
    # Equal codes; the product with the scale is one float32 rounding either way.
    torch.testing.assert_close(fake_quantize_rows(x), codes.float() * scale.unsqueeze(1), rtol=1e-6, atol=0)


def test_fake_weights_are_what_the_codes_stand_for() -> None:
    weight = torch.randn(9, 33)
    torch.testing.assert_close(fake_quantize_weight(weight), dequantize_weight(*quantize_weight(weight)), rtol=1e-6, atol=0)


def test_the_gradient_goes_straight_through() -> None:
    x = torch.tensor([0.4, 0.6, 2.5], requires_grad=True)
    y = round_straight_through(x)
    assert y.tolist() == [0.0, 1.0, 2.0]
    (grad,) = torch.autograd.grad((y * torch.tensor([1.0, 2.0, 3.0])).sum(), x)
    assert grad.tolist() == [1.0, 2.0, 3.0]


def test_a_scale_that_depends_on_the_input_passes_its_gradient() -> None:
    # d fq / d max = round(u) - u for an entry that is not the maximum: the noise grows with the step.
    x = torch.tensor([[127.0, 10.4]], requires_grad=True)
    (grad,) = torch.autograd.grad(fake_quantize_rows(x)[0, 1], x)
    assert grad[0, 0].item() == pytest.approx((10 - 10.4) / 127, abs=1e-5)  # a few float32 roundings of values near 10
    assert grad[0, 1].item() == pytest.approx(1.0, abs=1e-5)


def test_static_scale_spans_the_percentile() -> None:
    rows = torch.arange(1, 101, dtype=torch.float32).reshape(10, 10)
    assert static_scale(rows, 100).item() == pytest.approx(100 / 127)
    assert static_scale(rows, 90).item() == pytest.approx(90 / 127)
    assert static_scale(torch.zeros(2, 2), 100).item() == pytest.approx(1 / 127)


def test_scales_of_a_weight_without_columns() -> None:
    assert weight_scales(torch.zeros(2, 0)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("static", [None, torch.tensor([0.1])])
def test_a_nan_makes_the_scale_of_its_row_nan_and_no_other(static: torch.Tensor | None) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    x[1, 5] = torch.nan
    codes, scale = quantize_rows_reference(x, None, static, 0, 0)
    assert scale.isnan().tolist() == [False, True, False]
    assert codes[1, 5] == 0 and torch.equal(codes[0], quantize_rows_reference(x[:1], None, static, 0, 0)[0][0])
