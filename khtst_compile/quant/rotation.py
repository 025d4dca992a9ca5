"""The weight side of `khtst::rotate`: which block fits, and the matrix that meets a rotated activation."""

from __future__ import annotations

import torch

from khtst_compile.ops.rotate import LANES, hadamard


def fit_rotation(features: int, block: int, points: int | None) -> tuple[int, int] | None:
    """The (block, points) to use on that many features, or None where no power of two of at least 16 divides them.

    `block` is halved until it divides. points None means the full transform; the cheap form (block // 16) stays the cheap form of
    the smaller block, and becomes the full one where that would leave a single point.
    """
    cheap = points is not None and points != block
    while block >= LANES and features % block:
        block //= 2
    if block < LANES:
        return None
    small = block // LANES
    return (block, small) if cheap and small >= 2 else (block, block)


def rotate_columns(weight: torch.Tensor, block: int, points: int) -> torch.Tensor:
    """weight: (out_features, in_features) float -> `W @ H / points`, same shape and dtype, computed in float64.

    `linear(rotate(x), W H / points) = x H (H W.T) / points = x W.T`, because `H` is symmetric and `H @ H = points * I`.
    """
    h = hadamard(block, points) / points
    blocks = weight.to(torch.float64).reshape(weight.shape[0], -1, block)
    return (blocks @ h).reshape(weight.shape).to(weight.dtype)


def rotate_blocks(x: torch.Tensor, block: int, points: int, scale: float = 1.0) -> torch.Tensor:
    """x: (..., features) -> `scale * x @ H`, same shape, differentiable. For estimating errors: the additions come in another order
    than the operator's, so the two agree only up to float rounding."""
    h = hadamard(block, points, x.dtype) * scale
    return (x.reshape(-1, block) @ h).reshape(x.shape)
