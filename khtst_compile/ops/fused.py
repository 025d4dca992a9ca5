"""The operators a lowered program is made of: what one kernel does, with its meaning in torch.

`lower/fuse.py` rewrites a quantized program into these; nothing before lowering uses them. Integer parts are exact; by how much
a float part may differ between torch and a kernel is said in `parity.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from khtst_compile.errors import UsageError
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.ops.w8a8_linear import w8a8_linear_reference

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """Apply the activation of that name elementwise. Raises UsageError for a name not in ACTIVATIONS."""
    if act not in ACTIVATIONS:
        raise UsageError(f"activation {act!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act](x)


def norm_reference(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float, rms: bool) -> torch.Tensor:
    """LayerNorm over the last axis, or RMSNorm `gamma * (x * rsqrt(mean(x^2) + eps))`; x: (..., features) float32."""
    if not rms:
        return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if gamma is None else gamma * y


@torch.library.custom_op("khtst::norm", mutates_args=())
def norm(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float, rms: bool) -> torch.Tensor:
    """x: (..., features) float32; gamma, beta: (features,) float32 or None -> (..., features) float32."""
    return norm_reference(x, gamma, beta, eps, rms)


@norm.register_fake
def _(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float, rms: bool) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("khtst::norm_quantize", mutates_args=())
def norm_quantize(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    rms: bool,
    inv_smooth: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    block: int,
    points: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norm`, then `quantize_rows` of its result -> (y float32, codes int8, scale float32)."""
    y = norm_reference(x, gamma, beta, eps, rms)
    codes, scale = quantize_rows_reference(y, inv_smooth, static_scale, block, points)
    return y, codes, scale


@norm_quantize.register_fake
def _(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    rms: bool,
    inv_smooth: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    block: int,
    points: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1])


@torch.library.custom_op("khtst::act_quantize", mutates_args=())
def act_quantize(
    x: torch.Tensor, act: str, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation, then `quantize_rows` -> (codes int8, scale float32)."""
    return quantize_rows_reference(activate(x, act), inv_smooth, static_scale, block, points)


@act_quantize.register_fake
def _(
    x: torch.Tensor, act: str, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1])


@torch.library.custom_op("khtst::gate_quantize", mutates_args=())
def gate_quantize(
    x: torch.Tensor, act: str, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (..., 2 * features) -> `quantize_rows` of act(first half) * second half: codes (..., features) int8, scale (...) float32."""
    gate, up = x.chunk(2, -1)
    return quantize_rows_reference(activate(gate, act) * up, inv_smooth, static_scale, block, points)


@gate_quantize.register_fake
def _(
    x: torch.Tensor, act: str, inv_smooth: torch.Tensor | None, static_scale: torch.Tensor | None, block: int, points: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8), x.new_empty(x.shape[:-1])


@torch.library.custom_op("khtst::w8a8_gemm", mutates_args=())
def w8a8_gemm(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    act: str,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """`w8a8_linear`, then an activation, then `+ residual` (..., N)."""
    y = activate(w8a8_linear_reference(codes, scale, weight, weight_scale, bias), act)
    return y if residual is None else y + residual


@w8a8_gemm.register_fake
def _(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    act: str,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    return scale.new_empty((*codes.shape[:-1], weight.shape[0]))


@torch.library.custom_op("khtst::linear", mutates_args=())
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str, residual: torch.Tensor | None
) -> torch.Tensor:
    """A float32 linear (weight (N, K)), then an activation, then `+ residual`."""
    y = activate(F.linear(x, weight, bias), act)
    return y if residual is None else y + residual


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str, residual: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("khtst::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    offsets: list[int],
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """softmax(scale * Q K^T + mask) V for all heads.

    q: (batch, q_len, row_q), k and v: (batch, k_len, row): the heads lie side by side from column `offsets[i]` of each, so a
    fused projection is read in place. mask: bool (True = attend) or float32 (added), (batch|1, heads|1, q_len|1, k_len).
    Returns (batch, q_len, heads * head_dim) float32.
    """

    def split(t: torch.Tensor, offset: int, n: int) -> torch.Tensor:
        part = t[..., offset : offset + n * head_dim]
        return part.reshape(t.shape[0], t.shape[1], n, head_dim).transpose(1, 2)

    y = F.scaled_dot_product_attention(
        split(q, offsets[0], heads),
        split(k, offsets[1], kv_heads),
        split(v, offsets[2], kv_heads),
        mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return y.transpose(1, 2).reshape(q.shape[0], q.shape[1], heads * head_dim).contiguous()


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    offsets: list[int],
    scale: float,
    causal: bool,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], heads * head_dim))
