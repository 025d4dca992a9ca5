"""What an attention task prepares before it multiplies: K and V in panels, and the masks as what is added to scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm.tirx.script import builder as T

from khtst_compile.targets.kernels.attention_spec import Attention, Mask
from khtst_compile.targets.kernels.rows import each_vector, fixed
from khtst_compile.targets.kernels.vec import LANES, Expr, f32, lanes_of, shuffle2, span, splat, store

_BLOCK = 8
"""Side of the blocks in which K is transposed: 8 registers of 8 lanes."""


@dataclass
class Task:
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


def pack_keys(spec: Attention, task: Task) -> None:
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


def pack_values(spec: Attention, task: Task) -> None:
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


def _copy_mask(mask: Mask, task: Task, source: Expr, to: Expr, target: Expr) -> None:
    """One row of the mask to `target`, -inf beyond the last key."""
    buffer = task.flat["mask"]
    full = T.Bind(task.keys // LANES)
    with T.serial(T.int64(0), full) as j:
        store(target, _mask_value(mask, buffer[span(source + j * LANES)]), to + j * LANES)
    with T.If(full < task.panels), T.Then():
        store(target, f32(-np.inf), to + full * LANES)
        with T.serial(full * LANES, task.keys) as j:
            T.buffer_store(target, _mask_value(mask, buffer[source + j]), [to + j])


def key_bias(spec: Attention, task: Task) -> None:
    """What is added to the scores of every row alike: the mask if it has no query dimension, -inf beyond the last key."""
    if spec.mask is not None and not spec.mask.query:
        _copy_mask(spec.mask, task, task.mask_base, T.int64(0), task.bias)
        return
    with T.serial(T.int64(0), task.panels) as j:
        lane_index = T.ramp(j * LANES, 1, LANES)
        store(task.bias, T.Select(lane_index < splat(task.keys), f32(0.0), f32(-np.inf)), j * LANES)


def row_bias(spec: Attention, task: Task, row: Expr, to: Expr, panels: Expr) -> None:
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
