"""Rounding against second moments: the published update, column by column, and what it is for."""

from __future__ import annotations

import pytest
import torch

from khtst_compile.quant.rounding import BLOCK, Compensation, output_error
from khtst_compile.quant.scales import dequantize_weight, quantize_weight


def correlated(tokens: int, features: int, rank: int, seed: int = 0) -> torch.Tensor:
    """(tokens, features): a few directions that all features share, and noise a tenth of that."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(rank, features, generator=torch.Generator().manual_seed(99))
    return torch.randn(tokens, rank, generator=g) @ mixing + 0.1 * torch.randn(tokens, features, generator=g)


def by_definition(weight: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor, damping: float) -> torch.Tensor:
    """Optimal brain surgeon with the inverse of what is left taken anew for every column: w_F -= e_j H^-1[j, F] / H^-1[j, j]."""
    h = moments.double() + damping * float(moments.diagonal().double().mean()) * torch.eye(len(moments), dtype=torch.float64)
    w = weight.double() / scales.double()[:, None]
    codes = torch.zeros_like(w)
    left = torch.argsort(moments.diagonal().double(), descending=True, stable=True).tolist()
    while left:
        j = left[0]
        inverse = torch.linalg.inv(h[left][:, left])
        codes[:, j] = torch.round(w[:, j]).clamp(-127, 127)
        w[:, left] -= (w[:, j] - codes[:, j])[:, None] * inverse[0] / inverse[0, 0]
        left.pop(0)
    return codes.to(torch.int8)


@pytest.mark.parametrize("features", [1, 2, 9, BLOCK + 1, 2 * BLOCK + 3])
def test_equals_the_update_computed_without_factors_or_blocks(features: int) -> None:
    weight = torch.randn(5, features, generator=torch.Generator().manual_seed(1))
    x = correlated(4 * features, features, 3)
    _, scales = quantize_weight(weight)
    found = Compensation(x.T @ x, 0.1).round(weight, scales)
    wanted = by_definition(weight, scales, x.T @ x, 0.1)
    # A value that lies on a half within float64 rounding may go either way, and those after it follow: none does here.
    assert torch.equal(found, wanted)


def test_errors_cancel_on_tokens_that_were_not_seen() -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(2))
    x, held = correlated(600, 96, 8), correlated(300, 96, 8, seed=7)
    codes, scales = quantize_weight(weight)
    found = Compensation(x.T @ x).round(weight, scales)
    nearest, compensated = (output_error(weight, dequantize_weight(c, scales), held) for c in (codes, found))
    assert compensated < nearest / 4


def test_uncorrelated_features_are_rounded_to_nearest() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize_weight(weight)
    assert torch.equal(Compensation(torch.diag(torch.rand(40) + 0.1)).round(weight, scales), codes)


def test_codes_stay_in_range_where_compensation_asks_for_more() -> None:
    x = torch.ones(10, 1) @ torch.ones(1, 30)  # one direction: everything is owed to the last columns
    weight = torch.full((2, 30), 1.0)
    weight[:, ::2] = 0.996
    codes = Compensation(x.T @ x, 1e-4).round(weight, torch.full((2,), 1 / 127))
    assert int(codes.min()) >= -127 and int(codes.max()) <= 127


def test_a_feature_that_is_always_zero_takes_and_gives_nothing() -> None:
    x = correlated(200, 20, 3)
    x[:, 4] = 0
    weight = torch.randn(7, 20, generator=torch.Generator().manual_seed(4))
    nearest, scales = quantize_weight(weight)
    codes = Compensation(x.T @ x).round(weight, scales)
    rest = [i for i in range(20) if i != 4]
    # The mean of the moments, and so the damping, counts the zero as well: given here as what it comes to without it.
    alone = Compensation(x[:, rest].T @ x[:, rest], 0.1 * 19 / 20).round(weight[:, rest], scales)
    assert torch.equal(codes[:, 4], nearest[:, 4]) and torch.equal(codes[:, rest], alone)


@pytest.mark.parametrize(
    "bad", [torch.zeros(8, 8), torch.full((8, 8), torch.nan), torch.full((8, 8), torch.inf), torch.zeros(0, 0)]
)
def test_moments_that_say_nothing_are_not_usable(bad: torch.Tensor) -> None:
    assert not Compensation(bad).usable


def test_rows_are_rounded_alike_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(11, 24, generator=torch.Generator().manual_seed(5))
    x = correlated(100, 24, 4)
    _, scales = quantize_weight(weight)
    whole = Compensation(x.T @ x).round(weight, scales)
    monkeypatch.setattr("khtst_compile.quant.rounding.ROWS", 4)
    assert torch.equal(Compensation(x.T @ x).round(weight, scales), whole)


def test_output_error_weighs_by_gradients() -> None:
    weight = torch.eye(2)
    rounded = torch.tensor([[1.0, 0.1], [0.0, 1.0]])
    rows = torch.tensor([[0.0, 2.0]])
    assert output_error(weight, rounded, rows) == pytest.approx(0.04 / 4)
    assert output_error(weight, rounded, rows, torch.tensor([[1.0, 0.0]])) > 10 * output_error(
        weight, rounded, rows, torch.tensor([[0.1, 1.0]])
    )
