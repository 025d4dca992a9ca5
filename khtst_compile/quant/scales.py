"""Symmetric int8 scales, and values rounded to the grid those scales span ("fake quantized").

Weights have one scale per output channel, activations one per token (row). 127 levels each side; halves round to even.
"""

from __future__ import annotations

import torch

from khtst_compile.ops.quantize_rows import LEVELS, TINY


def weight_scales(weight: torch.Tensor) -> torch.Tensor:
    """weight: (out_features, in_features) -> (out_features,) float, largest |w| per row over 127; a row of zeros gets 1."""
    absmax = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    scales = absmax / LEVELS
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def quantize_weight(weight: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: (out_features, in_features) -> codes of that shape, int8 in [-127, 127], and scales (out_features,) float32."""
    scales = weight_scales(weight) if scales is None else scales
    codes = torch.round(weight / scales.unsqueeze(1)).clamp(-LEVELS, LEVELS)
    return codes.to(torch.int8), scales.to(torch.float32)


def dequantize_weight(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes: (out_features, in_features) int8, scales: (out_features,) -> float32 values of the shape of codes."""
    return codes.to(torch.float32) * scales.unsqueeze(1)


def round_straight_through(x: torch.Tensor) -> torch.Tensor:
    """Round half to even; the gradient is that of the identity (straight-through estimator, Bengio et al. 2013)."""
    return x + (torch.round(x) - x).detach()


def fake_quantize_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight: (out_features, in_features) -> the values its int8 codes stand for. Differentiable, straight through rounding."""
    scales = weight_scales(weight).unsqueeze(1)
    return round_straight_through(weight / scales) * scales


def fake_quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """x: (..., features) -> the values `khtst::quantize_rows` codes stand for, one scale per row. Differentiable likewise."""
    absmax = x.abs().amax(-1, keepdim=True).clamp_min(TINY)
    return round_straight_through(x * (LEVELS / absmax)) * (absmax / LEVELS)


def static_scale(rows: torch.Tensor, percentile: float) -> torch.Tensor:
    """rows: (tokens, features) -> (1,) float32, one scale for the tensor: the percentile (0..100] of |x| over 127.

    100 means the largest value. A tensor of zeros gets 1 / 127.
    """
    flat = rows.abs().flatten()
    kept = flat.numel() if percentile >= 100 else max(1, round(flat.numel() * percentile / 100))
    top = flat.kthvalue(kept).values if flat.numel() else flat.new_zeros(())
    return (torch.where(top > 0, top, torch.ones_like(top)) / LEVELS).reshape(1).to(torch.float32)
