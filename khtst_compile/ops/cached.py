"""`khtst::attention_cached`: attention of new positions to themselves and to keys and values kept from earlier ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.library.custom_op("khtst::attention_cached", mutates_args=())
def attention_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    offsets: list[int],
) -> torch.Tensor:
    """softmax(scale * Q K^T + mask) V, causal: new position i sees all T cached positions and the new ones up to itself.

    q: (batch, s, row_q), k and v: (batch, s, row) float32: the heads lie side by side from column `offsets[i]` of each, so a fused
    projection is read in place. past_k, past_v: (T, batch, kv_heads * head_dim) float32, T may be 0.
    mask: bool (True = attend) or float32 (added), (batch|1, heads|1, s|1, T + s), on top of the causal one.
    Returns (batch, s, heads * head_dim) float32.
    """
    batch, new, past = q.shape[0], q.shape[1], past_k.shape[0]

    def split(t: torch.Tensor, offset: int, n: int) -> torch.Tensor:
        part = t[..., offset : offset + n * head_dim]
        return part.reshape(batch, new, n, head_dim).transpose(1, 2)

    def whole(cache: torch.Tensor, t: torch.Tensor, offset: int) -> torch.Tensor:
        earlier = cache.reshape(past, batch, kv_heads, head_dim).permute(1, 2, 0, 3)
        return torch.cat([earlier, split(t, offset, kv_heads)], dim=2)

    seen = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)
    if mask is not None:
        seen = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
    y = F.scaled_dot_product_attention(
        split(q, offsets[0], heads),
        whole(past_k, k, offsets[1]),
        whole(past_v, v, offsets[2]),
        seen,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return y.transpose(1, 2).reshape(batch, new, heads * head_dim).contiguous()


@attention_cached.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    offsets: list[int],
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], heads * head_dim))
