"""`khtst::rotate`: the block Walsh-Hadamard transform along the last axis, unnormalized, in one fixed order of additions.

The order of the stages is part of the meaning: every implementation (torch here, the TIR kernels) does the same float32
additions, so that all give the same bits. With `H` the transform's matrix, `H @ H.T = points * I`; the weight that meets a rotated
activation is therefore multiplied by `H / points`.
"""

from __future__ import annotations

import torch

from khtst_compile.errors import UsageError

LANES = 16  # features within a group of 16 are paired last: they share one vector register


def stage_strides(block: int, points: int) -> list[int]:
    """Distances of the butterflies in the order they are done: across groups of 16 first, then inside a group.

    The full form has `points == block`; the cheap form leaves out the stages inside a group of 16, so `points == block // 16`.
    """
    across = [LANES << i for i in range((block // LANES).bit_length() - 1)]
    within = [1, 2, 4, 8]
    return across + within if points == block else across


def check_rotation(block: int, points: int, features: int) -> None:
    """Raise UsageError unless (block, points) is a form that exists and fits `features`; block 0 means no rotation."""
    if block == 0:
        return
    if block < LANES or block & (block - 1):
        raise UsageError(f"rotation: block is {block}; needed: a power of two of at least {LANES}, or 0 for none")
    if points not in (block, block // LANES) or points < 2:
        raise UsageError(f"rotation: points is {points} with block {block}; use {block} (full) or {block // LANES} (cheap form)")
    if features % block:
        raise UsageError(f"rotation: block {block} must divide the {features} features; use a power of two that does, or 0")


def hadamard(block: int, points: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The transform's matrix: (block, block), entries in {-1, 0, 1}, symmetric, `H @ H = points * I`."""
    h2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    h = torch.ones(1, 1, dtype=dtype)
    for _ in range(points.bit_length() - 1):
        h = torch.kron(h, h2)
    return torch.kron(h, torch.eye(block // points, dtype=dtype)) if points != block else h


def rotate_reference(x: torch.Tensor, block: int, points: int) -> torch.Tensor:
    """x: (..., features) float -> the same shape, transformed in blocks of `block` consecutive features."""
    if block == 0:
        return x.clone()
    shape = x.shape
    v = x.reshape(-1, block)
    for stride in stage_strides(block, points):
        pairs = v.reshape(v.shape[0], block // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        v = torch.stack((a + b, a - b), dim=2).reshape(-1, block)
    return v.reshape(shape)


@torch.library.custom_op("khtst::rotate", mutates_args=())
def rotate(x: torch.Tensor, block: int, points: int) -> torch.Tensor:
    """x: (..., features) float32 -> (..., features) float32; see the module docstring."""
    check_rotation(block, points, x.shape[-1])
    return rotate_reference(x, block, points)


@rotate.register_fake
def _(x: torch.Tensor, block: int, points: int) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    # The matrix is symmetric, so its transpose is itself.
    block, points = ctx.block, ctx.points  # type: ignore[attr-defined]
    return rotate_reference(grad, block, points), None, None


def _setup(ctx: object, inputs: tuple[torch.Tensor, int, int], output: torch.Tensor) -> None:
    ctx.block, ctx.points = inputs[1], inputs[2]  # type: ignore[attr-defined]


rotate.register_autograd(_backward, setup_context=_setup)
