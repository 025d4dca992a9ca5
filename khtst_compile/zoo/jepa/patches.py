"""A signal on a grid -> patches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.errors import UsageError


class Patches(nn.Module):
    """(B, C, S_1, ..., S_r) -> (B, N, C p_1 ... p_r), N = product of ceil(S_i / p_i), the last axis fastest, channels first in a patch.

    One class for all: (C, H, W) in 2-D patches; (T, H, W) in tubes and (X, Y, Z) in voxels with C = 1; (F, T) likewise; channel-wise pieces
    of (C, T) are patches of (1, p) of one plane. What overhangs the edge is padded where it is, at the end of its axis: the pad of an
    image's last column is zeros in the last columns of its patches.
    """

    def __init__(self, shape: Sequence[int], patch: Sequence[int], channels: int = 1) -> None:
        """shape: (S_1, ..., S_r); patch: (p_1, ..., p_r). Raises UsageError unless there are as many, each at least 1."""
        super().__init__()
        if len(shape) != len(patch) or min(*shape, *patch, channels) < 1:
            raise UsageError(
                f"patches: {tuple(patch)} of {tuple(shape)} in {channels} channels; needed: a size >= 1 for each axis"
            )
        self.shape, self.patch, self.channels = tuple(shape), tuple(patch), channels
        self.grid = tuple(-(-s // p) for s, p in zip(shape, patch, strict=True))
        self.count, self.width = math.prod(self.grid), channels * math.prod(patch)
        over = [g * p - s for g, p, s in zip(self.grid, self.patch, self.shape, strict=True)]
        self.pad = [n for o in reversed(over) for n in (0, o)]  # functional.pad begins at the last axis

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, S_1, ..., S_r), or (B, S_1, ..., S_r) where C = 1."""
        rank = len(self.shape)
        if tuple(x.shape[1:]) not in {(self.channels, *self.shape), *([self.shape] if self.channels == 1 else [])}:
            raise UsageError(
                f"patches: found {tuple(x.shape)}; needed: (batch, {self.channels}, {', '.join(map(str, self.shape))})"
            )
        if any(self.pad):
            x = functional.pad(x, self.pad)
        cut = [n for pair in zip(self.grid, self.patch, strict=True) for n in pair]
        x = x.reshape(-1, self.channels, *cut)
        places, insides = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
        return x.permute(0, *places, 1, *insides).reshape(-1, self.count, self.width)


def pieces(channels: int, length: int, piece: int) -> Patches:
    """(B, channels, length) -> (B, channels * ceil(length / piece), piece): pieces of time, channel after channel."""
    return Patches((channels, length), (1, piece))
