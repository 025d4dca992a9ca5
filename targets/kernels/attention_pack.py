"""What an attention task prepares before it multiplies: K and V of a block in panels, and the masks as what is added to scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm.tirx.script import builder as T

from khtst_compile.exact import LOG2_E
from khtst_compile.targets.kernels.attention_spec import Attention, Mask
from khtst_compile.targets.kernels.rows import each_vector, fixed
from khtst_compile.targets.kernels.vec import LANES, Expr, at_least, f32, lanes_of, mul, shuffle2, span, splat, store

_SIDE = 8
"""Side of the squares in which K is transposed: 8 registers of 8 lanes."""


@dataclass
class Task:
    """Expressions of the task being emitted: flat buffers, lengths and offsets (int64), scratch.

    first:  first of the task's rows; row r is query r // sharing of query head kv_head * sharing + r % sharing.
    past:   keys that come from the cache; 0 without one.
    """

    flat: dict[str, Expr]
    batch: Expr
    queries: Expr
    keys: Expr
    past: Expr
    b: Expr
    kv_head: Expr
    first: Expr
    keys_packed: Expr
    values_packed: Expr
    scores: Expr
    bias: Expr
    scaled: Expr
    tops: Expr
    sums: Expr


@dataclass
class Block:
    """The keys of one step of the running softmax: `count` of them from `start` on, in `panels` of 16 (int64).

    pitch:  floats from one row of scores to the next.
    """

    start: Expr
    count: Expr
    panels: Expr
    pitch: int


@dataclass
class _Scales:
    """Of a segment's keys: that of key 0 would lie at `base`, `row` floats before that of the next."""

    buffer: Expr
    base: Expr
    row: Expr

    def of(self, key: Expr, lanes: int) -> Expr:
        """The scale of one key in all lanes."""
        return T.Bind(splat(self.buffer[self.base + key * self.row], lanes))


@dataclass
class _Segment:
    """Consecutive keys of a block that lie in one tensor: keys low..high of the block; key 0 would lie at `base`.

    scales:  of int8 codes; None where the tensor is float32.
    """

    buffer: Expr
    base: Expr
    row: Expr
    low: Expr
    high: Expr
    scales: _Scales | None = None

    def read(self, at: Expr, scale: Expr | None, lanes: int = LANES) -> Expr:
        """`lanes` features from index `at` as float32; scale: of their key, in as many lanes."""
        value = T.Bind(self.buffer[span(at, lanes) if lanes > 1 else at])
        if scale is None:
            return value
        return T.Bind(mul(T.cast(value, f"float32x{lanes}" if lanes > 1 else "float32"), scale))

    def scale(self, key: Expr, lanes: int = LANES) -> Expr | None:
        """The scale of one key in all lanes, where there are scales."""
        return None if self.scales is None else self.scales.of(key, lanes)


def _segments(spec: Attention, task: Task, block: Block, what: str) -> list[_Segment]:
    """The parts of a block's K or V ("k", "v"): those of the cache, those of this call."""
    operand = spec.k if what == "k" else spec.v
    column = task.kv_head * spec.head_dim
    split: Expr = T.int64(0)
    parts = []
    if spec.cached:
        split = fixed(T.max(T.int64(0), T.min(block.count, task.past - block.start)))
        parts.append(_kept(spec, task, what, "past_", block.start, T.int64(0), split))
    if spec.codes:
        parts.append(_kept(spec, task, what, "", block.start - task.past, split, block.count))
        return parts
    length = task.keys - task.past
    base = fixed((task.b * length + block.start - task.past) * operand.row + column + operand.offset)
    parts.append(_Segment(task.flat[what], base, T.int64(operand.row), split, block.count))
    return parts


def _kept(spec: Attention, task: Task, what: str, prefix: str, start: Expr, low: Expr, high: Expr) -> _Segment:
    """Keys low..high of a block that begins at position `start` of a tensor (positions, batch, kv_heads * head_dim)."""
    row = fixed(task.batch * (spec.groups * spec.head_dim))
    base = fixed((task.b * spec.groups + task.kv_head) * spec.head_dim + start * row)
    scales = None
    if spec.codes:
        step = fixed(task.batch * (2 * spec.groups))
        head = task.b * (2 * spec.groups) + task.kv_head + (spec.groups if what == "v" else 0)
        scales = _Scales(task.flat[f"{prefix}scales"], fixed(head + start * step), step)
    return _Segment(task.flat[f"{prefix}{what}"], base, row, low, high, scales)


def pack_keys(spec: Attention, task: Task, block: Block) -> None:
    """K of a block to [key / 16][d][16]; what fills the last panel is some key of the block, and masked."""
    for part in _segments(spec, task, block, "k"):
        with T.If(part.low < part.high), T.Then():
            _pack_keys(spec, task.keys_packed, part)


def _pack_keys(spec: Attention, packed: Expr, part: _Segment) -> None:
    d = spec.head_dim
    wide = d - d % _SIDE

    def at(key: Expr, column: Expr) -> Expr:
        return (key // LANES * d + column) * LANES + key % LANES

    begin = fixed(T.min(part.high, T.ceildiv(part.low, T.int64(_SIDE)) * _SIDE))
    with T.serial(part.low, begin) as key:
        scale = part.scale(key, 1)
        with T.serial(T.int64(0), T.int64(d)) as column:
            T.buffer_store(packed, part.read(part.base + key * part.row + column, scale, 1), [at(key, column)])
    end = T.Bind(T.ceildiv(part.high, T.int64(LANES)) * (LANES // _SIDE))
    with T.serial(T.ceildiv(begin, T.int64(_SIDE)), end) as square:
        key = T.Bind(square * _SIDE)
        last = T.Bind(part.high - 1)
        keys = [fixed(T.min(key + i, last)) for i in range(_SIDE)]
        rows = [fixed(part.base + k * part.row) for k in keys]
        scales = [part.scale(k, _SIDE) for k in keys]
        if wide:
            to = fixed(at(key, T.int64(0)))
            with T.serial(T.int64(0), T.int64(wide // _SIDE)) as c:
                vectors = [part.read(row + c * _SIDE, scale, _SIDE) for row, scale in zip(rows, scales, strict=True)]
                for i, column in enumerate(_transpose(vectors)):
                    store(packed, column, to + (c * _SIDE + i) * LANES)
        if wide < d:
            for i, (k, row) in enumerate(zip(keys, rows, strict=True)):
                scale = part.scale(k, 1)
                with T.serial(T.int64(wide), T.int64(d)) as column:
                    T.buffer_store(packed, part.read(row + column, scale, 1), [at(key + i, column)])


def _transpose(rows: list[Expr]) -> list[Expr]:
    """Transpose an 8 x 8 square held in 8 vectors: three stages of exchanges at distance 4, 2, 1."""
    for distance in (4, 2, 1):
        out = list(rows)
        for i in range(_SIDE):
            if not i & distance:
                a, b = rows[i], rows[i | distance]
                low = [n if not n & distance else _SIDE + (n ^ distance) for n in range(_SIDE)]
                high = [n ^ distance if not n & distance else _SIDE + n for n in range(_SIDE)]
                out[i], out[i | distance] = T.Bind(shuffle2(a, b, low)), T.Bind(shuffle2(a, b, high))
        rows = out
    return rows


def pack_values(spec: Attention, task: Task, block: Block) -> None:
    """V of a block to [d / 16][key][16]; features past the end are zeros."""
    packed = task.values_packed
    for part in _segments(spec, task, block, "v"):
        with T.serial(part.low, part.high) as key:
            _pack_values(spec, packed, part, key)


def _pack_values(spec: Attention, packed: Expr, part: _Segment, key: Expr) -> None:
    start, scale = T.Bind(part.base + key * part.row), part.scale(key)

    def body(off: Expr, valid: int) -> None:
        to = T.Bind(off * spec.key_block + key * LANES)
        if valid == LANES:
            store(packed, part.read(start + off, scale), to)
            return
        store(packed, f32(0.0), to)
        alone = part.scale(key, 1)
        with T.serial(T.int64(0), T.int64(valid)) as i:
            T.buffer_store(packed, part.read(start + off + i, alone, 1), [to + i])

    each_vector(spec.head_dim, body)


def _mask_value(mask: Mask, value: Expr) -> Expr:
    """What a mask entry, or 16, adds to a score in units of log2: a finite entry never becomes -inf."""
    lanes = lanes_of(value)
    none, hidden = f32(0.0, lanes), f32(-np.inf, lanes)
    if mask.dtype == "bool":
        return T.Select(value, none, hidden)
    scaled = at_least(mul(value, f32(LOG2_E, lanes)), f32(float(np.finfo(np.float32).min), lanes))
    return T.Select(T.EQ(value, hidden), hidden, scaled)


def _copy_mask(mask: Mask, task: Task, block: Block, source: Expr, to: Expr, target: Expr) -> None:
    """One row of the mask to `target`, -inf beyond the last key."""
    buffer = task.flat["mask"]
    full = T.Bind(block.count // LANES)
    with T.serial(T.int64(0), full) as j:
        store(target, _mask_value(mask, T.Bind(buffer[span(source + j * LANES)])), to + j * LANES)
    with T.If(full < block.panels), T.Then():
        store(target, f32(-np.inf), to + full * LANES)
        with T.serial(full * LANES, block.count) as j:
            entry = T.Bind(buffer[source + j])
            T.buffer_store(target, _mask_value(mask, entry), [to + j])


def _mask_row(spec: Attention, task: Task, block: Block, head: Expr, query: Expr) -> Expr:
    """Where a block's part of a mask row begins."""
    mask = spec.mask
    assert mask is not None
    row: Expr = task.b if mask.batch else T.int64(0)
    if mask.head:
        row = row * spec.heads + head
    if mask.query:
        row = row * task.queries + query
    return fixed(row * task.keys + block.start)


def key_bias(spec: Attention, task: Task, block: Block) -> None:
    """What is added to the scores of every row alike: the mask if it is the same for all, -inf beyond the last key."""
    if spec.mask is not None and not spec.rows_differ:
        source = _mask_row(spec, task, block, task.kv_head * spec.sharing, T.int64(0))
        _copy_mask(spec.mask, task, block, source, T.int64(0), task.bias)
        return
    with T.serial(T.int64(0), block.panels) as j:
        lane_index = T.ramp(j * LANES, 1, LANES)
        store(task.bias, T.Select(lane_index < splat(block.count), f32(0.0), f32(-np.inf)), j * LANES)


def row_bias(spec: Attention, task: Task, block: Block, row: Expr, to: Expr) -> None:
    """The mask of one row of the task into its scores."""
    assert spec.mask is not None
    head, query = task.kv_head * spec.sharing + row % spec.sharing, row // spec.sharing
    _copy_mask(spec.mask, task, block, _mask_row(spec, task, block, head, query), to, task.scores)
