"""What a joint-embedding predictor minimizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from khtst_compile.errors import UsageError

AUXILIARY = 0.01  # what layers' own losses count: a mixture's is 1 when it is balanced, and should not outweigh the predictions


class Losses(NamedTuple):
    """Each (): total is what is minimized; predictive the error of the predictions alone; variance V; auxiliary what layers inside add
    (a mixture's balance)."""

    total: Tensor
    predictive: Tensor
    variance: Tensor
    auxiliary: Tensor


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """mean over all rows of ||prediction - target||^2 / d. Both (..., d); -> (). No gradient reaches the target."""
    return (prediction - target.detach()).square().mean()


def collapse(z: Tensor, gamma: float = 1.0) -> Tensor:
    """V(z) = 1/d sum_j max(0, gamma - std_j)^2 + 1/(2d) sum_{i != j} Cov_ij^2, for z (..., d) of n >= 2 rows; -> ().

    After VICReg (Bardes, Ponce, LeCun, 2022), with the hinge squared; std and Cov over n - 1. At constant z it is gamma^2, to the bit: rows
    are taken relative to the first, which changes neither and leaves no rounding of a mean. There the gradient is 0 and not NaN.
    """
    rows = z.reshape(-1, z.shape[-1])
    if rows.shape[0] < 2:
        raise UsageError(f"V(z): z is {tuple(z.shape)}, {rows.shape[0]} row; needed: two or more, or there is no variance")
    rows = rows - rows[:1].detach()
    rows = rows - rows.mean(0)
    covariance = rows.T @ rows / (rows.shape[0] - 1)
    variances = covariance.diagonal()
    spread = variances > 0
    std = torch.where(spread, torch.where(spread, variances, 1.0).sqrt(), 0.0)
    between = covariance - torch.diag(variances)
    d = z.shape[-1]
    return (gamma - std).clamp(min=0).square().sum() / d + between.square().sum() / (2 * d)


def combine(predictive: Tensor, variance: Tensor, auxiliary: Tensor, weight: float) -> Losses:
    """predictive + weight V + AUXILIARY auxiliary."""
    return Losses(predictive + weight * variance + AUXILIARY * auxiliary, predictive, variance, auxiliary)
