"""Which patches a predictor sees and which blocks it is asked for. Patches lie on a grid, numbered with the last axis fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from khtst_compile.errors import UsageError

Grid = tuple[int, ...]


class Mask(NamedTuple):
    """context: (n,) int64, the patches seen, ascending; targets: K >= 1 blocks, each (m_b,) int64. None is empty, no patch is in both."""

    context: Tensor
    targets: tuple[Tensor, ...]

    def to(self, device: torch.device | str) -> Mask:
        return Mask(self.context.to(device), tuple(t.to(device) for t in self.targets))


# Draws one block of about `fraction` of the grid: per axis, which of its places belong to it.
Block = Callable[[Grid, float, torch.Generator], tuple[Tensor, ...]]


def draw_mask(block: Block, grid: Grid, fraction: float, generator: torch.Generator, count: int = 2) -> Mask:
    """`count` blocks which together hold about `fraction` of the patches (less where they overlap), the rest as context.

    Blocks that would leave no context are dropped, from the last on; one alone never fills the grid. Raises UsageError for a grid of one
    patch, or a fraction outside (0, 1).
    """
    total = math.prod(grid)
    if total < 2:
        raise UsageError(f"mask: the grid is {grid}; needed: two patches or more, one to see and one to predict")
    if not 0 < fraction < 1:
        raise UsageError(f"mask: fraction is {fraction}; needed: more than 0 and less than 1")
    if count < 1:
        raise UsageError(f"mask: {count} blocks; needed: one or more")
    numbers = torch.arange(total).reshape(grid)
    hidden = torch.zeros(total, dtype=torch.bool)
    targets: list[Tensor] = []
    for _ in range(count):
        axes = not_all(grid, block(grid, fraction / count, generator))
        found = numbers[torch.meshgrid(*axes, indexing="ij")].reshape(-1)
        after = hidden.clone()
        after[found] = True
        if bool(after.all()):
            break
        hidden, targets = after, [*targets, found]
    return Mask((~hidden).nonzero().squeeze(1), tuple(targets))


def not_all(grid: Grid, axes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The places of a block, less the last one of the longest axis if it would fill the grid."""
    if any(len(a) < size for a, size in zip(axes, grid, strict=True)):
        return axes
    longest = max(range(len(grid)), key=lambda i: grid[i])
    return tuple(a[:-1] if i == longest else a for i, a in enumerate(axes))


def run(size: int, length: float, generator: torch.Generator) -> Tensor:
    """`length` (rounded, 1 to size) places in a row of `size`, from a start drawn evenly."""
    length = min(size, max(1, round(length)))
    start = int(torch.randint(size - length + 1, (), generator=generator))
    return torch.arange(start, start + length)


def blocks(grid: Grid, fraction: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A box with the same share of every axis: 2-D blocks of an image, 3-D blocks of a volume."""
    share = fraction ** (1 / len(grid))
    return tuple(run(size, share * size, generator) for size in grid)


def tubes(grid: Grid, fraction: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A box in space, through all of time, the first axis (V-JEPA: Bardes et al., 2024)."""
    return torch.arange(grid[0]), *blocks(grid[1:], fraction, generator)


def bands(grid: Grid, fraction: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A range of one axis drawn at random and all of the others: a band of frequencies at all times, or a stretch of time at all."""
    able = [i for i, size in enumerate(grid) if size > 1]
    axis = able[int(torch.randint(len(able), (), generator=generator))]
    return tuple(run(s, fraction * s, generator) if i == axis else torch.arange(s) for i, s in enumerate(grid))


def channels(grid: Grid, fraction: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """(channels, pieces of time): whole channels, which need not be neighbors, or a window of time in all of them, as likely."""
    size, length = grid
    window = bool(torch.rand((), generator=generator) < 0.5)
    if (window and length > 1) or size == 1:
        return torch.arange(size), run(length, fraction * length, generator)
    chosen = torch.randperm(size, generator=generator)[: min(size, max(1, round(fraction * size)))]
    return chosen.sort().values, torch.arange(length)


def intervals(grid: Grid, fraction: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A range of the last axis at one place of the others: an interval of one channel, or of a sequence of groups.

    As long as `fraction` of all patches asks for, but no longer than the axis.
    """
    *others, last = grid
    return *(run(size, 1, generator) for size in others), run(last, fraction * math.prod(grid), generator)
