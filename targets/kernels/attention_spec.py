"""What the attention kernel computes: its options, and the same arithmetic in numpy.

Keys are taken in blocks of `key_block` from the first on, with a running maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). For a row i and each block, with c = scale * log2(e):

    scores      s[j] = dot(q * c, k_j) + mask[j] * log2(e),  dot by fma in the order of d, starting at 0
    top         t' = max(t, ceil(max_j s[j])),  t = -inf before the first block; an integer, so that 2^(t - t') is exact
    powers      p[j] = 2^(s[j] - t'), as in `softmax.py`
    sum         l = l * 2^(t - t') + sum_j p[j],  16 lanes, each in the order of the keys
    values      o[d] = o[d] * 2^(t - t') + sum_j p[j] * v[j, d],  by fma in the order of j
    result      o[d] * (1 / (sum of the lanes of l))

A key that a row does not see has p = 0 and changes nothing, and where a block begins does not depend on the row: a row has the
same bits alone, in a batch, with padding, and computed with a cache of earlier keys as within the whole sequence.

A row whose scores are all -inf (every key masked out) gives zeros, as torch's scaled_dot_product_attention does; a mask of
finfo(float32).min gives the mean of the values, as there. The causal mask is aligned top left, as torch's `is_causal`; with
a cache, the first query stands right after the cached keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import LoweringError
from khtst_compile.exact import LOG2_E, across_reference, exp2_nonpositive_reference, fma_reference, padded
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.vec import LANES, Floats

_BLOCK_ELEMENTS = 16384
"""Keys of a block times their features: K and V packed take 128 KiB, a quarter of a usual L2 cache."""


@dataclass(frozen=True)
class Mask:
    """An additive or boolean mask (b | 1, h | 1, q | 1, k).

    dtype:  "float32" (added to the scores) or "bool" (False: the key is not seen).
    batch, head, query:  whether that dimension is a real one; else it has length 1.
    """

    dtype: str = "bool"
    batch: bool = True
    head: bool = False
    query: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bool"):
            raise LoweringError(f"attention mask: dtype {self.dtype}; needed bool or float32; cast the mask")


@dataclass(frozen=True)
class Operand:
    """Where Q, K or V lies in its tensor (b, length, row) float32: from column `offset` on, heads side by side."""

    row: int
    offset: int = 0


@dataclass(frozen=True)
class Attention:
    """The kernel attention(q, k, v, [past_k, past_v], [mask]) -> out (b, q length, heads * head_dim) float32.

    q:  (b, q length, q.row), k and v: (b, k length, row) float32. The same tensor may be given three times.
    cached:  keys and values of earlier positions are given too, past_k and past_v (past length, b, kv_heads * head_dim) float32.
        They come before those of k and v; the mask is for all of them; query i of a causal kernel sees the keys up to past length + i.
    codes:  with `cached`, all keys and values are int8 codes with a scale for each position and head. The kernel is then
        attention(q, k, v, scales, past_k, past_v, past_scales, [mask]), k and v laid out as past_k and past_v are: (k length, b, kv_heads *
        head_dim) int8, scales (k length, b, 2 * kv_heads) float32, of the keys' heads, then of the values'. The result has the bits of the
        kernel without codes on code * scale, rounded to float32.
    heads, kv_heads:  query heads and key/value heads; kv_heads divides heads, query head h reads h // (heads / kv_heads).
    """

    isa: Isa
    heads: int
    head_dim: int
    scale: float
    q: Operand
    k: Operand
    v: Operand
    kv_heads: int = 0
    mask: Mask | None = None
    causal: bool = False
    cached: bool = False
    codes: bool = False
    name: str = "attention"
    parallel: bool = True

    def __post_init__(self) -> None:
        if min(self.heads, self.head_dim) < 1:
            raise LoweringError(f"{self.name}: {self.heads} heads of {self.head_dim} features; needed at least 1 of 1")
        if self.codes and not self.cached:
            raise LoweringError(f"{self.name}: codes without a cache; needed: a cache, of any length")
        if self.heads % self.groups:
            raise LoweringError(f"{self.name}: {self.kv_heads} key/value heads do not divide {self.heads} query heads")
        for what, operand, heads in (("q", self.q, self.heads), ("k", self.k, self.groups), ("v", self.v, self.groups)):
            if operand.offset < 0 or operand.offset + heads * self.head_dim > operand.row:
                raise LoweringError(
                    f"{self.name}: {what} needs {heads} x {self.head_dim} columns from {operand.offset} on, "
                    f"its rows have {operand.row}"
                )

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    @property
    def sharing(self) -> int:
        """Query heads that read one key/value head."""
        return self.heads // self.groups

    @property
    def key_block(self) -> int:
        """Keys between two updates of the running maximum, a power of two from 32 to 512: part of the meaning, so of no target."""
        return 1 << min(9, max(5, (_BLOCK_ELEMENTS // self.head_dim).bit_length() - 1))

    @property
    def tiles(self) -> tuple[int, ...]:
        """Query rows of a tile, largest first.

        6 rows x 16 floats fill 12 of the 16 AVX2 registers and 24 of the 32 of NEON; 4 are what lengths like 16 and 64 leave over. On
        AVX512 8 rows are enough to cover the latency of its two units. A step of a decoder has as many rows as query heads share a
        key/value head.
        """
        usual = (8, 2, 1) if self.isa.vector_bits == 512 else (6, 4, 2, 1)
        return tuple(sorted({*usual, self.sharing}, reverse=True)) if self.cached and self.sharing < usual[0] else usual

    def side(self, rows: int) -> int:
        """Vectors of 16 columns that a tile of few rows takes at once in a decoder: 8 sums have to be under way to cover the latency of
        a multiply-add. With 32 registers LLVM hoists what it can of a tile and then keeps sums in memory, so there it stays one."""
        return min(4, -(-8 // (rows * (LANES // self.isa.lanes)))) if self.cached and self.isa.registers < 32 else 1

    @property
    def unroll(self) -> int:
        """Features a turn of the loop of scores: a loop of few turns is left without a mispredicted branch. On NEON more than one
        feature's queries leave no register for the keys."""
        return 1 if self.isa.vector_bits == 128 else 8

    @property
    def rows_differ(self) -> bool:
        """Whether the mask differs between the rows of a task: query heads that share keys, each at every query."""
        return self.mask is not None and (self.mask.query or (self.mask.head and self.sharing > 1))


def reference(
    spec: Attention,
    q: Floats,
    k: Floats,
    v: Floats,
    mask: npt.NDArray[np.generic] | None = None,
    past_k: Floats | None = None,
    past_v: Floats | None = None,
) -> Floats:
    """What the kernel computes, to the bit; arguments and result as the kernel's."""
    factor = np.float32(spec.scale * LOG2_E)
    queries = _heads_of(spec, q, spec.q, spec.heads) * factor
    keys, values = (_heads_of(spec, x, o, spec.groups) for x, o in ((k, spec.k), (v, spec.v)))
    past = 0
    if past_k is not None and past_v is not None:
        whole, past = Operand(spec.groups * spec.head_dim), past_k.shape[0]
        keys = np.concatenate([_heads_of(spec, past_k.swapaxes(0, 1), whole, spec.groups), keys], axis=2)
        values = np.concatenate([_heads_of(spec, past_v.swapaxes(0, 1), whole, spec.groups), values], axis=2)
    bias = _bias(spec, mask, q.shape[1], keys.shape[2], past)
    top = np.full((*queries.shape[:3], 1), -np.inf, np.float32)
    lanes = np.zeros((*queries.shape[:3], LANES), np.float32)
    out = np.zeros(queries.shape, np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, keys.shape[2], spec.key_block):
            part = slice(first, first + spec.key_block)
            dots = np.zeros((*queries.shape[:3], keys[:, :, part].shape[2]), np.float32)
            for d in range(spec.head_dim):
                dots = fma_reference(queries[..., d, None], keys[..., None, part, d], dots)
            s = padded(dots + bias[..., part], -np.inf)
            old, top = top, np.maximum(top, np.ceil(s.max(axis=-1, keepdims=True)))
            finite = np.where(np.isneginf(top), np.float32(0), top)
            p, shrink = exp2_nonpositive_reference(s - finite), exp2_nonpositive_reference(old - finite)
            lanes, out = lanes * shrink, out * shrink
            for j in range(0, p.shape[-1], LANES):
                lanes = lanes + p[..., j : j + LANES]
            for j in range(dots.shape[-1]):
                out = fma_reference(p[..., j, None], values[..., None, first + j, :], out)
        sums = across_reference(lanes, np.add)[..., :1]
        out = out * np.where(sums == 0, np.float32(0), np.float32(1) / sums)
    return out.transpose(0, 2, 1, 3).reshape(*q.shape[:2], spec.heads * spec.head_dim)


def _heads_of(spec: Attention, array: Floats, operand: Operand, heads: int) -> Floats:
    """(b, length, row) -> (b, query heads, length, head_dim)."""
    used = array[..., operand.offset : operand.offset + heads * spec.head_dim]
    part = used.reshape(*array.shape[:2], heads, spec.head_dim).transpose(0, 2, 1, 3)
    return np.repeat(part, spec.heads // heads, axis=1)


def _bias(spec: Attention, mask: npt.NDArray[np.generic] | None, queries: int, keys: int, past: int) -> Floats:
    """What is added to the scores, (b | 1, h | 1, q, keys)."""
    bias = np.zeros((1, 1, 1, keys), np.float32)
    if mask is not None and mask.dtype == np.bool_:
        bias = np.where(mask, np.float32(0), np.float32(-np.inf))
    elif mask is not None:
        added = mask.astype(np.float32)
        with np.errstate(over="ignore"):
            scaled = np.maximum(added * np.float32(LOG2_E), np.finfo(np.float32).min)
        bias = np.where(np.isneginf(added), np.float32(-np.inf), scaled)
    if spec.causal:
        earlier = np.arange(keys) <= past + np.arange(queries)[:, None]
        bias = np.where(earlier, bias, np.float32(-np.inf))
    return np.broadcast_to(bias, (*bias.shape[:2], queries, keys))
