"""`khtst::rotary`: rotary position embedding of heads that lie side by side, after an RMSNorm of each head where there is one.

    h = x[:, :, offset + head * D ..]         D = head_dim
    h = gamma * (h * rsqrt(mean(h^2) + eps))  with gamma
    y = h * cos + (-h[D/2:], h[:D/2]) * sin

The two halves turn against each other, as Hugging Face stores them ("rotate_half").
"""

from __future__ import annotations

import torch


def rotary_reference(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float,
    heads: int,
    head_dim: int,
    offsets: list[int],
) -> torch.Tensor:
    """x: (batch, length, columns) float32; cos, sin: (batch or 1, length, head_dim); gamma: (head_dim,) or None.

    offsets: [first column]. Returns (batch, length, heads * head_dim) float32.
    """
    part = x[..., offsets[0] : offsets[0] + heads * head_dim]
    h = part.reshape(*x.shape[:2], heads, head_dim)
    if gamma is not None:
        h = gamma * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))
    first, second = h.chunk(2, -1)
    y = h * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
    return y.reshape(*x.shape[:2], heads * head_dim)


@torch.library.custom_op("khtst::rotary", mutates_args=())
def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float,
    heads: int,
    head_dim: int,
    offsets: list[int],
) -> torch.Tensor:
    """See `rotary_reference`."""
    return rotary_reference(x, cos, sin, gamma, eps, heads, head_dim, offsets)


@rotary.register_fake
def _(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float,
    heads: int,
    head_dim: int,
    offsets: list[int],
) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1], heads * head_dim))
