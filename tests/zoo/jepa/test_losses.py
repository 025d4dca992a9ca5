from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa.losses import AUXILIARY, collapse, combine, squared

Loss = Callable[[Tensor, float], Tensor]


def written_out(z: Tensor, gamma: float) -> float:
    """The formula term by term, in float64."""
    rows = z.reshape(-1, z.shape[-1]).double()
    n, d = rows.shape
    mean = [sum(rows[i, j].item() for i in range(n)) / n for j in range(d)]

    def covariance(j: int, k: int) -> float:
        return sum((rows[i, j].item() - mean[j]) * (rows[i, k].item() - mean[k]) for i in range(n)) / (n - 1)

    hinge = sum(max(0.0, gamma - covariance(j, j) ** 0.5) ** 2 for j in range(d)) / d
    return hinge + sum(covariance(j, k) ** 2 for j in range(d) for k in range(d) if j != k) / (2 * d)


def agrees_with_the_formula(loss: Loss) -> bool:
    """float64, a dozen rows: only rounding is left, 1e-15 of sums of some 100 products."""
    z = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.tensor([0.1, 0.5, 1, 2, 3])
    return all(abs(loss(z, g).item() - written_out(z, g)) < 1e-13 * (1 + written_out(z, g)) for g in (0.5, 1.0, 2.0))


def collapse_costs_gamma_squared(loss: Loss) -> bool:
    """To the bit, whatever the constant and the number of rows; gamma is such that sums of its square are exact."""
    constant = torch.tensor([0.1, -3.7, 1e4, 1e-5, 0.0, 7.3, 0.2, 1 / 3])
    return all(
        loss(constant.expand(n, 8).contiguous(), gamma).item() == gamma**2 for n in (2, 3, 7, 100) for gamma in (0.5, 1.0, 1.5)
    )


def planted_diagonal(z: Tensor, gamma: float) -> Tensor:
    """The mistake of keeping the diagonal of the covariance and dropping the rest."""
    rows = z.reshape(-1, z.shape[-1])
    std = rows.std(0)
    return (gamma - std).clamp(min=0).square().mean() + rows.var(0).square().sum() / (2 * z.shape[-1])


def planted_floor(z: Tensor, gamma: float) -> Tensor:
    """A floor under the variance, as is usual: collapse costs less than gamma^2."""
    rows = z.reshape(-1, z.shape[-1])
    covariance = rows.T.cov()
    between = covariance - torch.diag(covariance.diagonal())
    return (gamma - (rows.var(0) + 1e-4).sqrt()).clamp(min=0).square().mean() + between.square().sum() / (2 * z.shape[-1])


def test_v_is_its_formula() -> None:
    assert agrees_with_the_formula(collapse)
    assert not agrees_with_the_formula(planted_diagonal)


def test_v_at_collapse() -> None:
    assert collapse_costs_gamma_squared(collapse)
    assert not collapse_costs_gamma_squared(planted_floor)


def test_v_has_the_gradient_of_its_formula() -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(collapse, (z,))


def test_collapse_has_a_gradient_without_nan_and_next_to_it_one_that_leads_away() -> None:
    z = torch.full((8, 4), 0.3, requires_grad=True)
    collapse(z).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None and bool((z.grad == 0).all())
    near = (0.3 + 1e-3 * torch.randn(8, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    before = collapse(near)
    (gradient,) = torch.autograd.grad(before, near)
    assert collapse(near.detach() - 0.5 * gradient) < 0.99 * before


def test_correlated_features_cost_what_independent_ones_do_not() -> None:
    signs = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    assert collapse(signs) == 0
    assert collapse(signs[:, :1].expand(4, 2)) == pytest.approx((4 / 3) ** 2 / 2, rel=1e-6)  # two entries (4/3)^2 over 2d = 4


def test_one_row_has_no_variance() -> None:
    with pytest.raises(UsageError, match="1 row; needed: two or more"):
        collapse(torch.zeros(1, 4))


def test_the_error_is_per_feature_and_reaches_no_target() -> None:
    prediction, target = torch.zeros(2, 3, 5, requires_grad=True), torch.full((2, 3, 5), 2.0, requires_grad=True)
    loss = squared(prediction, target)
    assert loss == 4
    loss.backward()  # type: ignore[no-untyped-call]
    assert target.grad is None and prediction.grad is not None


def test_losses_add_up() -> None:
    parts = [torch.tensor(x) for x in (0.5, 0.25, 2.0)]
    made = combine(*parts, weight=4.0)
    assert made.total == 0.5 + 4 * 0.25 + AUXILIARY * 2 and made[1:] == tuple(parts)
