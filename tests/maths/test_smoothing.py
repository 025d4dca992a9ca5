"""Smoothing factors and the error of a group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khtst_compile.quant.scales import fake_quantize_rows, fake_quantize_weight
from khtst_compile.quant.smoothing import GroupObjective, error_weights, smooth_factors, weight_maxima, zero_channels


@given(st.floats(0, 1), st.integers(0, 2**31 - 1))
@settings(max_examples=40, deadline=None)
def test_smoothing_keeps_the_product(alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    s = smooth_factors(x.abs().amax(0), weight_maxima([weight]), alpha)
    torch.testing.assert_close((x / s) @ (weight * s).T, x @ weight.T, rtol=1e-10, atol=1e-10)


def test_the_formula() -> None:
    s = smooth_factors(torch.tensor([16.0, 1.0]), torch.tensor([4.0, 0.25]), 0.5)
    assert s.tolist() == pytest.approx([2.0, 2.0])  # sqrt(16) / sqrt(4), sqrt(1) / sqrt(.25)
    assert smooth_factors(torch.tensor([16.0]), torch.tensor([4.0]), 1.0).item() == pytest.approx(16.0)
    assert smooth_factors(torch.tensor([16.0]), torch.tensor([4.0]), 0.0).item() == pytest.approx(0.25)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_channels_nothing_is_known_of_keep_factor_one(bad: float) -> None:
    maxima, fine = torch.tensor([bad, 3.0]), torch.tensor([2.0, 2.0])
    for s in (smooth_factors(maxima, fine, 0.7), smooth_factors(fine, maxima, 0.7)):
        assert s[0].item() == 1.0 and bool(s.isfinite().all())


def test_zero_channels_are_counted() -> None:
    assert zero_channels(torch.tensor([0.0, 1.0, 0.0])) == 2


def test_the_gradient_of_the_factors_is_exact() -> None:
    x_max = torch.tensor([0.3, 5.0, 40.0], dtype=torch.float64)
    w_max = torch.tensor([1.0, 0.2, 0.01], dtype=torch.float64)
    alpha = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: smooth_factors(x_max, w_max, a), (alpha,))


def test_the_gradient_of_smoothed_and_rotated_products_is_exact() -> None:
    # Without the rounding every step is smooth, so numerical differences must agree.
    from khtst_compile.quant.rotation import rotate_blocks

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 16, generator=generator, dtype=torch.float64)
    alpha = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    x_max, w_max = x.abs().amax(0), torch.rand(16, generator=generator, dtype=torch.float64) + 0.1
    assert torch.autograd.gradcheck(lambda a: rotate_blocks(x / smooth_factors(x_max, w_max, a), 16, 16).abs().amax(-1), (alpha,))


def test_layers_that_share_an_activation_share_the_maximum() -> None:
    assert weight_maxima([torch.tensor([[1.0, -5.0]]), torch.tensor([[-2.0, 1.0], [0.0, 0.0]])]).tolist() == [2.0, 5.0]


def test_error_is_relative_and_matches_the_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    x, held = torch.randn(20, 32, generator=generator), torch.randn(10, 32, generator=generator)
    weight = torch.randn(8, 32, generator=generator)
    fit_error, held_error = GroupObjective(x, held, [weight]).error(None)
    for rows, error in ((x, fit_error), (held, held_error)):
        y = rows @ weight.T
        expected = (fake_quantize_rows(rows) @ fake_quantize_weight(weight).T - y).square().sum() / y.square().sum()
        assert error.item() == pytest.approx(expected.item(), rel=1e-4)  # float32 sums in another order


def test_sensitivity_decides_which_outputs_count() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 32, generator=generator)
    weight = torch.randn(2, 32, generator=generator)
    weight[1, 0] = 500.0  # this channel loses everything but one weight
    only = [torch.tensor([[1.0, 0.0]]).repeat(20, 1), torch.tensor([[0.0, 1.0]]).repeat(20, 1)]
    first, second = (float(GroupObjective(x, x, [weight], [g], [g]).error(None)[0]) for g in only)
    alone, other = (float(GroupObjective(x, x, [weight[i : i + 1]]).error(None)[0]) for i in (0, 1))
    # GRAD_FLOOR lets 1e-4 of the other channel in.
    assert first == pytest.approx(alone, rel=0.2) or first < alone * 3
    assert (first < second) == (alone < other)
    assert first != pytest.approx(second, rel=0.1)


@pytest.mark.parametrize("grads", [torch.zeros(4, 2), torch.full((4, 2), float("nan"))])
def test_gradients_that_say_nothing_weigh_evenly(grads: torch.Tensor) -> None:
    y = torch.randn(4, 2)
    torch.testing.assert_close(error_weights(y, grads), error_weights(y, None))


def test_zero_outputs_give_a_finite_error() -> None:
    fit, held = GroupObjective(torch.zeros(4, 16), torch.zeros(0, 16), [torch.randn(3, 16)]).error(None)
    assert fit.item() == 0.0 and held.item() == 0.0


def test_the_rotation_that_follows_is_part_of_the_error() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(50, 128, generator=generator)
    x[:, 5] *= 60
    weight = torch.randn(16, 128, generator=generator)
    plain = float(GroupObjective(x, x, [weight]).error(None)[1])
    rotated = float(GroupObjective(x, x, [weight], None, None, 128, 128).error(None)[1])
    # One outlier of 60 sigma sets the step of its row; spread over 128 features it is 60 / sqrt(128) = 5.
    assert rotated < plain / 4


def test_infinite_rows_do_not_poison_the_error() -> None:
    x = torch.randn(6, 16)
    x[0, 0] = float("inf")
    x[1, 1] = float("nan")
    assert bool(GroupObjective(x, x, [torch.randn(3, 16)]).error(None)[0].isfinite())
