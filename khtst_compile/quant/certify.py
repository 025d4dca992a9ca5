"""How far int8 scores narrow a search among codes down, with a bound that holds for every row."""

from __future__ import annotations

import torch

Z_LEVELS, CODE_LEVELS = 127, 63
_CHUNK = 1 << 22  # scores at a time


def left_open(z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """z: (n, d), codes: (K, d), bias: (K,) or None, float32 -> (n, K) bool, the codes that int8 scores leave open for each row.

    A row is rounded to zq = s round(z / s), s = max|z| / 127, and a code to cq with 63 levels and a scale of its own. Then
    |<z, c> - <zq, cq>| = |<zq, c - cq> + <z - zq, c>| <= |zq| max|c - cq| + |z - zq| max|c| (Cauchy-Schwarz), and a code can win only where
    its int8 score lies within twice that of the largest.
    """
    wide, rows = codes.double(), z.double()
    near, rounded = _rounded(rows, Z_LEVELS), _rounded(wide, CODE_LEVELS)
    score = near @ rounded.T + (0.0 if bias is None else bias.double())
    bound = near.norm(dim=-1) * (wide - rounded).norm(dim=-1).max() + (rows - near).norm(dim=-1) * wide.norm(dim=-1).max()
    found: torch.Tensor = score >= (score.amax(-1) - 2 * bound)[:, None]
    return found


def candidates(z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `left_open` -> (n,) int64, how many codes are left open for each row."""
    parts = torch.split(z, max(1, _CHUNK // max(1, len(codes))))
    return torch.cat([left_open(part, codes, bias).sum(-1) for part in parts])


def _rounded(rows: torch.Tensor, levels: int) -> torch.Tensor:
    """rows: (n, d) float64 -> each to whole multiples of its largest magnitude / levels."""
    step = rows.abs().amax(-1, keepdim=True).clamp(min=1e-300) / levels
    return (rows / step).round() * step
