"""Attention in float32: softmax(scale * Q K^T + mask) V, read in place from whatever projections produced.

A task is one head of one batch entry and up to 256 queries. It packs K transposed in panels of 16 keys, [key / 16][d][16], and
V in panels of 16 features, [d / 16][key][16]; then a few query rows at a time:

    scores      s[i, j] = fma(dot(q_i, k_j), scale, mask[i, j]),  dot by fma in the order of d, starting at 0
    softmax     p = exp(s - max s), as in `softmax.py`; the sum in the order of the keys, 16 lanes each
    values      o[i, d] = (sum_j p[i, j] * v[j, d]) * (1 / sum p),  by fma in the order of j, starting at 0

No order depends on the tile, on other rows or on the number of threads: the bits are the same on every machine. A row whose
scores are all -inf (every key masked out) gives zeros, as torch's scaled_dot_product_attention does; a mask of
finfo(float32).min gives the mean of the values, as there. The causal mask is aligned top left, as torch's `is_causal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.rows import each_vector, fixed, round_up, save
from khtst_compile.targets.kernels.softmax import exp_nonpositive, exp_nonpositive_reference, padded, sum_reference
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    Floats,
    across,
    f32,
    fma,
    fma_reference,
    keep,
    lanes_of,
    shuffle2,
    small,
    span,
    splat,
    store,
    sum_across,
)

_QUERIES = 256
"""Queries of one task: packing K and V again for the next ones costs little then."""
_BLOCK = 8
"""Side of the blocks in which K is transposed: 8 registers of 8 lanes."""


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


@dataclass
class _Task:
    """Expressions of the task being emitted: flat buffers, lengths (int64), offsets, scratch."""

    flat: dict[str, Expr]
    keys: Expr
    panels: Expr
    q_base: Expr
    k_base: Expr
    v_base: Expr
    out_base: Expr
    mask_base: Expr
    keys_packed: Expr
    values_packed: Expr
    scores: Expr
    bias: Expr


def prim_func(spec: Attention) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        batch, queries, keys = (tirx.Var(n, "int64") for n in ("b", "q_length", "k_length"))
        flat = _arguments(spec, batch, queries, keys)
        chunks = T.Bind(T.ceildiv(queries, T.int64(_QUERIES)))
        tasks = T.Bind(batch * spec.heads * chunks)

        def task(index: Expr) -> None:
            chunk = fixed(index % chunks)
            pair = fixed(index // chunks)
            _task(spec, flat, fixed(pair // spec.heads), fixed(pair % spec.heads), chunk * _QUERIES, queries, keys)

        loop = T.parallel if spec.parallel else T.serial
        with loop(T.int64(0), tasks) as index:
            task(index)
    return builder.get()


def _arguments(spec: Attention, batch: Expr, queries: Expr, keys: Expr) -> dict[str, Expr]:
    shapes: dict[str, tuple[list[Expr], str]] = {
        "q": ([batch, queries, T.int64(spec.q.row)], "float32"),
        "k": ([batch, keys, T.int64(spec.k.row)], "float32"),
        "v": ([batch, keys, T.int64(spec.v.row)], "float32"),
    }
    if spec.mask is not None:
        one = T.int64(1)
        dims = [
            batch if spec.mask.batch else one,
            T.int64(spec.heads) if spec.mask.head else one,
            queries if spec.mask.query else one,
            keys,
        ]
        shapes["mask"] = (dims, spec.mask.dtype)
    shapes["out"] = ([batch, queries, T.int64(spec.heads * spec.head_dim)], "float32")
    declared = {name: T.arg(name, T.buffer(dims, dtype)) for name, (dims, dtype) in shapes.items()}
    flat = {}
    for name, (dims, dtype) in shapes.items():
        size = dims[0]
        for dim in dims[1:]:
            size = size * dim
        flat[name] = T.decl_buffer((size,), dtype, data=declared[name].data)
    return flat


def _task(spec: Attention, flat: dict[str, Expr], b: Expr, h: Expr, first: Expr, queries: Expr, keys: Expr) -> None:
    """One head of one batch entry, queries from `first` on."""
    d = spec.head_dim
    kv_head = fixed(h // (spec.heads // spec.groups))
    panels = fixed(T.ceildiv(keys, T.int64(LANES)))
    rows = fixed(T.min(T.int64(_QUERIES), queries - first))
    mask_base: Expr = T.int64(0)
    if spec.mask is not None:
        mask_base = (b if spec.mask.batch else 0) * (spec.heads if spec.mask.head else 1) + (h if spec.mask.head else 0)
        mask_base = mask_base * (queries if spec.mask.query else 1) * keys

    # TVM hoists allocations, so their sizes may only use the kernel's own dimensions.
    length = T.ceildiv(keys, T.int64(LANES)) * LANES

    def scratch(size: Expr) -> Expr:
        memory = T.alloc_buffer((size,), "float32", scope="global")
        return T.decl_buffer((size,), "float32", data=memory.data)

    task = _Task(
        flat=flat,
        keys=keys,
        panels=panels,
        q_base=fixed(b * queries * spec.q.row + h * d + spec.q.offset),
        k_base=fixed(b * keys * spec.k.row + kv_head * d + spec.k.offset),
        v_base=fixed(b * keys * spec.v.row + kv_head * d + spec.v.offset),
        out_base=fixed(b * queries * (spec.heads * d) + h * d),
        mask_base=fixed(mask_base),
        keys_packed=scratch(length * d),
        values_packed=scratch(keys * round_up(d)),
        scores=scratch(length * spec.tiles[0]),
        bias=scratch(length),
    )
    _pack_keys(spec, task)
    _pack_values(spec, task)
    _key_bias(spec, task)
    done: Expr = first
    left: Expr = rows
    for size in spec.tiles:
        count = fixed(left // size)
        start = fixed(done)
        with T.serial(T.int64(0), count) as i:
            _tile(spec, task, fixed(start + i * size), size)
        done, left = fixed(start + count * size), fixed(left - count * size)


def _pack_keys(spec: Attention, task: _Task) -> None:
    """K (keys, d) to [key / 16][d][16]; keys past the end are zeros."""
    d, k, packed = spec.head_dim, task.flat["k"], task.keys_packed
    wide = d - d % _BLOCK

    def at(key: Expr, column: Expr) -> Expr:
        return T.Bind((key // LANES * d + column) * LANES + key % LANES)

    whole = T.Bind(task.keys // _BLOCK)
    with T.serial(T.int64(0), whole) as block:
        key = T.Bind(block * _BLOCK)
        if wide:
            with T.serial(T.int64(0), T.int64(wide // _BLOCK)) as c:
                start = T.Bind(task.k_base + key * spec.k.row + c * _BLOCK)
                rows = [T.Bind(k[span(start + i * spec.k.row, _BLOCK)]) for i in range(_BLOCK)]
                target = at(key, c * _BLOCK)
                for i, column in enumerate(_transpose(rows)):
                    store(packed, column, target + i * LANES)
        if wide < d:
            with T.serial(T.int64(0), T.int64(_BLOCK)) as i, T.serial(T.int64(wide), T.int64(d)) as column:
                value = k[task.k_base + (key + i) * spec.k.row + column]
                T.buffer_store(packed, value, [at(key + i, column)])
    with T.serial(whole * _BLOCK, task.panels * LANES) as key, T.serial(T.int64(0), T.int64(d)) as column, T.If(key < task.keys):
        with T.Then():
            T.buffer_store(packed, k[task.k_base + key * spec.k.row + column], [at(key, column)])
        with T.Else():
            T.buffer_store(packed, T.float32(0.0), [at(key, column)])


def _transpose(rows: list[Expr]) -> list[Expr]:
    """Transpose an 8 x 8 block held in 8 vectors: three stages of exchanges at distance 4, 2, 1."""
    for distance in (4, 2, 1):
        out = list(rows)
        for i in range(_BLOCK):
            if not i & distance:
                a, b = rows[i], rows[i | distance]
                low = [n if not n & distance else _BLOCK + (n ^ distance) for n in range(_BLOCK)]
                high = [n ^ distance if not n & distance else _BLOCK + n for n in range(_BLOCK)]
                out[i], out[i | distance] = T.Bind(shuffle2(a, b, low)), T.Bind(shuffle2(a, b, high))
        rows = out
    return rows


def _pack_values(spec: Attention, task: _Task) -> None:
    """V (keys, d) to [d / 16][key][16]; features past the end are zeros."""
    v, packed = task.flat["v"], task.values_packed

    with T.serial(T.int64(0), task.keys) as key:
        start = T.Bind(task.v_base + key * spec.v.row)

        def body(off: Expr, valid: int) -> None:
            to = T.Bind(off * task.keys + key * LANES)
            if valid == LANES:
                store(packed, v[span(start + off)], to)
                return
            store(packed, f32(0.0), to)
            with T.serial(T.int64(0), T.int64(valid)) as i:
                T.buffer_store(packed, v[start + off + i], [to + i])

        each_vector(spec.head_dim, body)


def _mask_value(mask: Mask, value: Expr) -> Expr:
    """What a mask entry adds to a score."""
    if mask.dtype == "float32":
        return value
    if lanes_of(value) == 1:
        return T.Select(value, T.float32(0.0), T.float32(-np.inf))
    return T.Select(value, f32(0.0), f32(-np.inf))


def _copy_mask(mask: Mask, task: _Task, source: Expr, to: Expr, target: Expr) -> None:
    """One row of the mask to `target`, -inf beyond the last key."""
    buffer = task.flat["mask"]
    full = T.Bind(task.keys // LANES)
    with T.serial(T.int64(0), full) as j:
        store(target, _mask_value(mask, buffer[span(source + j * LANES)]), to + j * LANES)
    with T.If(full < task.panels), T.Then():
        store(target, f32(-np.inf), to + full * LANES)
        with T.serial(full * LANES, task.keys) as j:
            T.buffer_store(target, _mask_value(mask, buffer[source + j]), [to + j])


def _key_bias(spec: Attention, task: _Task) -> None:
    """What is added to the scores of every row alike: the mask if it has no query dimension, -inf beyond the last key."""
    if spec.mask is not None and not spec.mask.query:
        _copy_mask(spec.mask, task, task.mask_base, T.int64(0), task.bias)
        return
    with T.serial(T.int64(0), task.panels) as j:
        lane_index = T.ramp(j * LANES, 1, LANES)
        store(task.bias, T.Select(lane_index < splat(task.keys), f32(0.0), f32(-np.inf)), j * LANES)


def _tile(spec: Attention, task: _Task, row: Expr, size: int) -> None:
    """`size` query rows from `row` on."""
    stride = fixed(task.panels * LANES)
    seen, panels = task.keys, task.panels
    if spec.causal:
        seen = T.Bind(T.min(task.keys, row + size))
        panels = T.Bind(T.ceildiv(seen, T.int64(LANES)))
    if spec.rows_differ:
        with T.serial(T.int64(0), T.int64(size)) as i:
            _row_bias(spec, task, row + i, T.Bind(i * stride), panels)
    peaks = T.alloc_buffer((size * LANES,), "float32", scope="global")
    inverse = T.alloc_buffer((size,), "float32", scope="global")
    _scores(spec, task, row, size, stride, panels, peaks)
    with T.serial(T.int64(0), T.int64(size)) as i:
        _softmax(task, T.Bind(i * stride), panels, T.Bind(peaks[span(i * LANES)]), lambda v: T.buffer_store(inverse, v, [i]))
    each_vector(spec.head_dim, lambda off, valid: _values(spec, task, row, size, stride, seen, inverse, off, valid))


def _row_bias(spec: Attention, task: _Task, row: Expr, to: Expr, panels: Expr) -> None:
    """The mask of one row into its scores."""
    if spec.mask is not None and spec.mask.query:
        _copy_mask(spec.mask, task, fixed(task.mask_base + row * task.keys), to, task.scores)
        source, base = task.scores, to
    else:
        source, base = task.bias, T.int64(0)
    if spec.causal:
        with T.serial(T.int64(0), panels) as j:
            seen = T.ramp(j * LANES, 1, LANES) <= splat(row)
            store(task.scores, T.Select(seen, source[span(base + j * LANES)], f32(-np.inf)), to + j * LANES)


def _scores(spec: Attention, task: _Task, row: Expr, size: int, stride: Expr, panels: Expr, peaks: Expr) -> None:
    """s of `size` rows and all their keys, and the lanewise maxima of each row."""
    d, q = spec.head_dim, task.flat["q"]
    start = fixed(task.q_base + row * spec.q.row)
    for i in range(size):
        store(peaks, f32(-np.inf), i * LANES)
    with T.serial(T.int64(0), panels) as j:
        acc = [small() for _ in range(size)]
        for a in acc:
            store(a, f32(0.0), 0)
        with T.serial(T.int64(0), T.int64(d)) as c:
            key = T.Bind(task.keys_packed[span((j * d + c) * LANES)])
            for i, a in enumerate(acc):
                store(a, fma(splat(q[start + i * spec.q.row + c]), key, a[span(0)]), 0)
        for i, a in enumerate(acc):
            at = i * stride + j * LANES
            bias = task.scores[span(at)] if spec.rows_differ else task.bias[span(j * LANES)]
            s = T.Bind(fma(a[span(0)], f32(spec.scale), bias))
            store(task.scores, s, at)
            store(peaks, T.max(peaks[span(i * LANES)], s), i * LANES)


def _softmax(task: _Task, at: Expr, panels: Expr, peak: Expr, done: Callable[[Expr], None]) -> None:
    """Scores of one row to powers, in place; done(1 / sum), 0 for a row that sees no key."""
    top = T.Bind(across(peak, T.max))
    # Where nothing is seen, the powers must be e^-inf = 0 and not e^(-inf + inf).
    top = T.Bind(T.Select(T.EQ(top, f32(-np.inf)), f32(0.0), top))
    total = small()
    store(total, f32(0.0), 0)
    with T.serial(T.int64(0), panels) as j:
        p = exp_nonpositive(T.Bind(task.scores[span(at + j * LANES)] - top))
        store(task.scores, p, at + j * LANES)
        store(total, total[span(0)] + p, 0)
    sums = T.Bind(sum_across(keep(total[span(0)])))
    inverse = T.Select(T.EQ(sums, f32(0.0)), f32(0.0), f32(1.0) / sums)
    first = small()
    store(first, inverse, 0)
    done(first[0])


def _values(
    spec: Attention,
    task: _Task,
    row: Expr,
    size: int,
    stride: Expr,
    seen: Expr,
    inverse: Expr,
    off: Expr,
    valid: int,
) -> None:
    """16 columns of the result of `size` rows."""
    acc = [small() for _ in range(size)]
    for a in acc:
        store(a, f32(0.0), 0)
    panel = T.Bind(off * task.keys)
    with T.serial(T.int64(0), seen) as key:
        value = T.Bind(task.values_packed[span(panel + key * LANES)])
        for i, a in enumerate(acc):
            store(a, fma(splat(task.scores[i * stride + key]), value, a[span(0)]), 0)
    width = spec.heads * spec.head_dim
    for i, a in enumerate(acc):
        save(task.flat["out"], a[span(0)] * splat(inverse[i]), task.out_base + (row + i) * width + off, valid)


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
