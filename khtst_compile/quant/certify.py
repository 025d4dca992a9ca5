"""How far int8 scores narrow a search among codes down, with a bound that holds for every row."""

from __future__ import annotations

import torch

Z_LEVELS, CODE_LEVELS = 127, 63
_CHUNK = 1 << 22  # scores at a time


def candidates(z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """z: (n, d), codes: (K, d), bias: (K,) or None, float32 -> (n,) int64, how many codes int8 scores leave open for each row.

    A row is rounded to zq = s round(z / s), s = max|z| / 127, and a code to cq with 63 levels and a scale of its own. Then
    |<z, c> - <zq, cq>| = |<zq, c - cq> + <z - zq, c>| <= |zq| max|c - cq| + |z - zq| max|c| (Cauchy-Schwarz), and a code can win only where
    its int8 score lies within twice that of the largest.
    """
    wide = codes.double()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-300) / CODE_LEVELS
    rounded = (wide / scale).round() * scale
    off, length = (wide - rounded).norm(dim=-1).max(), wide.norm(dim=-1).max()
    found = []
    for part in torch.split(z.double(), max(1, _CHUNK // max(1, len(codes)))):
        step = part.abs().amax(-1, keepdim=True).clamp(min=1e-300) / Z_LEVELS
        near = (part / step).round() * step
        score = near @ rounded.T + (0.0 if bias is None else bias.double())
        bound = near.norm(dim=-1) * off + (part - near).norm(dim=-1) * length
        found.append((score >= (score.amax(-1) - 2 * bound)[:, None]).sum(-1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
