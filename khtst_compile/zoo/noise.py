"""Noise whose state is one counter in the module: it compiles, goes into a checkpoint, and is the same on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014): the step of its counter and the two multipliers of its mixer, as signed 64-bit numbers.
_STEP, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(seed: int, count: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers in (0, 1), never 0 or 1: `shape`, dtype and device of `like`.

    count: () int64, which draw this is; two draws of one seed are independent. 23 bits each, centered: (k + 1/2) / 2**23 is exact in
    float32, so that no logarithm meets 0.
    """
    size = 1
    for n in shape:
        size *= n
    place = torch.arange(size, device=like.device, dtype=torch.int64)
    mixed = _mix(_mix(count.to(like.device) * _STEP + seed) + place * _STEP)
    return ((_shift(mixed, 41).to(like.dtype) + 0.5) * 2.0**-23).reshape(tuple(shape))


def gumbel(u: Tensor) -> Tensor:
    """u in (0, 1) -> standard Gumbel noise of the same shape, -ln(-ln u)."""
    return -torch.log(-torch.log(u))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """int64 shifted right, zeros coming in (torch's own shift brings in the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
