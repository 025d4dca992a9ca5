"""`khtst::quantize_rows`: float rows to int8 codes, with smoothing and rotation inside.

    t     = rotate(x * inv_smooth)            float32, each multiply rounded
    a     = max(max_k |t|, 1e-30)
    inv   = 127 / a,  scale = a / 127         per row (dynamic), or both given (static, one value for the tensor)
    code  = round_half_even(t * inv)          the product is rounded to float32 first; clamped to [-127, 127]

A NaN makes the scale of its row NaN, an infinity makes it infinite (dynamic), and the codes of either 0: what a linear layer makes of such
a row is NaN, never a plausible number. A static scale is NaN too for a row that holds one; an infinity is clamped there.
"""

from __future__ import annotations

import torch

from khtst_compile.ops.rotate import check_rotation, rotate_reference

LEVELS = 127.0
TINY = 1e-30  # keeps 127 / absmax finite on rows of zeros; their codes are 0 either way


def quantize_rows_reference(
    x: torch.Tensor, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (..., features) float32; inv_smooth: (features,) float32 or None; static_scale: (1,) float32 or None.

    Returns codes (..., features) int8 in [-127, 127] and scale (...) float32 with `t ~= codes * scale`.
    """
    t = x if inv_smooth is None else x * inv_smooth
    t = rotate_reference(t, block, points)
    if static_scale is None:
        absmax = t.abs().amax(-1) if t.shape[-1] else t.new_zeros(t.shape[:-1])
        a = absmax.clamp_min(TINY)
        # Tensor by tensor: torch computes number / tensor as number * reciprocal(tensor), which rounds twice.
        inv, scale = torch.full_like(a, LEVELS) / a, a / LEVELS
    else:
        scale = torch.where(t.isnan().any(-1), torch.nan, static_scale.expand(t.shape[:-1]))
        inv = (1.0 / static_scale).expand(t.shape[:-1])
    codes = torch.nan_to_num(torch.round(t * inv.unsqueeze(-1)), nan=0.0).clamp(-LEVELS, LEVELS).to(torch.int8)
    return codes, scale


@torch.library.custom_op("khtst::quantize_rows", mutates_args=())
def quantize_rows(
    x: torch.Tensor, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring; shapes as in `quantize_rows_reference`."""
    check_rotation(block, points, x.shape[-1])
    return quantize_rows_reference(x, inv_smooth, static_scale, block, points)


@quantize_rows.register_fake
def _(
    x: torch.Tensor, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)
