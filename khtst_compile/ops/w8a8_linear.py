"""`khtst::w8a8_linear`: int8 codes times int8 weights, summed exactly in int32, scaled once.

acc = sum_k codes[m, k] * weight[n, k]                          int32, exact
y   = fma(float32(acc), float32(scale[m] * weight_scale[n]), bias[n])
"""

from __future__ import annotations

import torch

from khtst_compile.errors import UsageError

# |code| and |weight| are at most 127, so 127 * 127 * K stays inside int32 up to this many input features.
MAX_FEATURES = (2**31 - 1) // (127 * 127)


def int8_matmul(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """codes: (..., K) int8, weight: (N, K) int8 -> (..., N) int32, exact.

    Done in float64, where every partial sum of K < 2**37 products is an exact integer: torch's int32 matmul is a naive loop.
    """
    return (codes.to(torch.float64) @ weight.to(torch.float64).T).to(torch.int32)


def w8a8_linear_reference(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """codes (..., K) int8, scale (...) float32, weight (N, K) int8, weight_scale (N,) float32, bias (N,) -> (..., N) float32.

    The fma is done in float64 and rounded once: the product of two float32 is exact there, the sum is rounded to 53 bits
    first, which differs from a true fma only where that lands on a float32 tie (odds about 2**-29).
    """
    acc = int8_matmul(codes, weight).to(torch.float32)
    factor = scale.unsqueeze(-1) * weight_scale
    y = acc.to(torch.float64) * factor.to(torch.float64)
    if bias is not None:
        y = y + bias.to(torch.float64)
    return y.to(torch.float32)


@torch.library.custom_op("khtst::w8a8_linear", mutates_args=())
def w8a8_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See the module docstring; shapes as in `w8a8_linear_reference`.

    Raises UsageError where the input features exceed what an int32 sum can hold.
    """
    if codes.shape[-1] > MAX_FEATURES:
        raise UsageError(
            f"w8a8_linear: {codes.shape[-1]} input features could overflow int32; at most {MAX_FEATURES} are possible"
        )
    return w8a8_linear_reference(codes, scale, weight, weight_scale, bias)


@w8a8_linear.register_fake
def _(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return scale.new_empty((*codes.shape[:-1], weight.shape[0]))
