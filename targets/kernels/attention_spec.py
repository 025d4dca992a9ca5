"""What the attention kernel computes: its options, and the same arithmetic in numpy.

    scores      s[i, j] = fma(dot(q_i, k_j), scale, mask[i, j]),  dot by fma in the order of d, starting at 0
    softmax     p = exp(s - max s), as in `softmax.py`; the sum in the order of the keys, 16 lanes each
    values      o[i, d] = (sum_j p[i, j] * v[j, d]) * (1 / sum p),  by fma in the order of j, starting at 0

A row whose scores are all -inf (every key masked out) gives zeros, as torch's scaled_dot_product_attention does; a mask of
finfo(float32).min gives the mean of the values, as there. The causal mask is aligned top left, as torch's `is_causal`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.softmax import exp_nonpositive_reference, padded, sum_reference
from khtst_compile.targets.kernels.vec import Floats, fma_reference


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
    """The kernel attention(q, k, v, [mask]) -> out (b, q length, heads * head_dim) float32.

    q:  (b, q length, q.row), k and v: (b, k length, row) float32. The same tensor may be given three times.
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
    name: str = "attention"
    parallel: bool = True

    def __post_init__(self) -> None:
        if min(self.heads, self.head_dim) < 1:
            raise LoweringError(f"{self.name}: {self.heads} heads of {self.head_dim} features; needed at least 1 of 1")
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
    def tiles(self) -> tuple[int, ...]:
        """Query rows of a tile, largest first.

        6 rows x 16 floats fill 12 of the 16 AVX2 registers. On AVX512 8 rows are enough to cover the latency of its two
        units; with 12 the pointers to their rows of scores no longer fit the general registers.
        """
        return (8, 2, 1) if self.isa.registers >= 32 else (6, 2, 1)

    @property
    def rows_differ(self) -> bool:
        """Whether the mask of a row depends on the row."""
        return self.causal or (self.mask is not None and self.mask.query)


def reference(spec: Attention, q: Floats, k: Floats, v: Floats, mask: npt.NDArray[np.generic] | None = None) -> Floats:
    """What the kernel computes, to the bit; arguments and result as the kernel's."""
    parts = []
    for array, operand, heads in ((q, spec.q, spec.heads), (k, spec.k, spec.groups), (v, spec.v, spec.groups)):
        used = array[..., operand.offset : operand.offset + heads * spec.head_dim]
        part = used.reshape(*array.shape[:2], heads, spec.head_dim).transpose(0, 2, 1, 3)
        parts.append(np.repeat(part, spec.heads // heads, axis=1))
    queries, keys, values = parts
    bias = np.zeros((1, 1, 1, k.shape[1]), np.float32)
    if mask is not None:
        bias = mask.astype(np.float32) if spec.mask is None or spec.mask.dtype == "float32" else _bias_of(mask)
    if spec.causal:
        earlier = np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None]
        bias = np.where(earlier, bias, np.float32(-np.inf))
    with np.errstate(all="ignore"):
        dots = np.zeros((*queries.shape[:3], keys.shape[2]), np.float32)
        for d in range(spec.head_dim):
            dots = fma_reference(queries[..., d, None], keys[..., None, :, d], dots)
        s = padded(fma_reference(dots, np.float32(spec.scale), np.broadcast_to(bias, dots.shape)), -np.inf)
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = exp_nonpositive_reference(s - np.where(np.isneginf(top), np.float32(0), top))
        sums = sum_reference(p)
        out = np.zeros(queries.shape, np.float32)
        for j in range(keys.shape[2]):
            out = fma_reference(p[..., j, None], values[..., None, j, :], out)
        out = out * np.where(sums == 0, np.float32(0), np.float32(1) / sums)
    return out.transpose(0, 2, 1, 3).reshape(*q.shape[:2], spec.heads * spec.head_dim)


def _bias_of(mask: npt.NDArray[np.generic]) -> Floats:
    return np.where(mask, np.float32(0), np.float32(-np.inf))
