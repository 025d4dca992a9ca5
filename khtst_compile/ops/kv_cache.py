"""Keys and values as int8: `khtst::quantize_cache` makes the codes, `khtst::attention_int8` attends to them.

A scale for each position and head, found as in `khtst::quantize_rows`; a value is its code times its scale, rounded to float32. New
positions are attended to as the cache will hold them, so a row's result does not depend on how a text is cut into calls.
"""

from __future__ import annotations

import torch

from khtst_compile.ops.cached import attention_cached
from khtst_compile.ops.quantize_rows import quantize_rows_reference


@torch.library.custom_op("khtst::quantize_cache", mutates_args=())
def quantize_cache(
    k: torch.Tensor, v: torch.Tensor, kv_heads: int, head_dim: int, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v: (batch, seq, row) float32, heads side by side from column `offsets[i]` of each.

    Returns codes of k and of v, (seq, batch, kv_heads * head_dim) int8 in [-127, 127], and scales (seq, batch, 2 * kv_heads) float32, those
    of the heads of k before those of v.
    """
    batch, seq = k.shape[:2]
    codes, scales = [], []
    for t, offset in zip((k, v), offsets, strict=True):
        part = t[..., offset : offset + kv_heads * head_dim].reshape(batch, seq, kv_heads, head_dim)
        found, scale = quantize_rows_reference(part.transpose(0, 1), None, None, 0, 0)
        codes.append(found.reshape(seq, batch, kv_heads * head_dim).contiguous())
        scales.append(scale)
    return codes[0], codes[1], torch.cat(scales, -1)


@quantize_cache.register_fake
def _(
    k: torch.Tensor, v: torch.Tensor, kv_heads: int, head_dim: int, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, seq = k.shape[:2]
    codes = [k.new_empty((seq, batch, kv_heads * head_dim), dtype=torch.int8) for _ in range(2)]
    return codes[0], codes[1], k.new_empty((seq, batch, 2 * kv_heads))


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes: (positions, batch, kv_heads * head_dim) int8, scales: (positions, batch, kv_heads) float32 -> float32, as codes."""
    heads = scales.shape[2]
    wide = codes.float().reshape(*codes.shape[:2], heads, codes.shape[2] // heads) * scales.unsqueeze(-1)
    return wide.reshape(codes.shape)


@torch.library.custom_op("khtst::attention_int8", mutates_args=())
def attention_int8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    past_scales: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    offsets: list[int],
) -> torch.Tensor:
    """`attention_cached` of what the codes stand for.

    q: (batch, s, row) float32, its heads from column `offsets[0]` on. k, v, scales: of the s new positions, as `quantize_cache` returns
    them; past_k, past_v, past_scales: the same of T earlier ones, T may be 0. Returns (batch, s, heads * head_dim) float32.
    """
    new = [dequantize(c, s).transpose(0, 1) for c, s in zip((k, v), scales.chunk(2, -1), strict=True)]
    past = [dequantize(c, s) for c, s in zip((past_k, past_v), past_scales.chunk(2, -1), strict=True)]
    found: torch.Tensor = attention_cached(q, *new, *past, None, heads, kv_heads, head_dim, scale, [offsets[0], 0, 0])
    return found


@attention_int8.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    past_scales: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    offsets: list[int],
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], heads * head_dim))
