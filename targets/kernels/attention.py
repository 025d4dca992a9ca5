"""Attention in float32: softmax(scale * Q K^T + mask) V, read in place from whatever projections produced.

A task is one head of one batch entry and up to 256 queries. It packs K transposed in panels of 16 keys, [key / 16][d][16], and
V in panels of 16 features, [d / 16][key][16]; then a few query rows at a time: scores, softmax in place, values, in the order
that `attention_spec.py` writes down. No order depends on the tile, on other rows or on the number of threads: the bits are
the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.targets.kernels.attention_pack import Task, key_bias, pack_keys, pack_values, row_bias
from khtst_compile.targets.kernels.attention_spec import Attention, Mask, Operand, reference
from khtst_compile.targets.kernels.rows import each_vector, fixed, round_up, save
from khtst_compile.targets.kernels.softmax import exp_nonpositive
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    across,
    f32,
    fma,
    keep,
    small,
    span,
    splat,
    store,
    sum_across,
)

__all__ = ["Attention", "Mask", "Operand", "prim_func", "reference"]

_QUERIES = 256
"""Queries of one task: packing K and V again for the next ones costs little then."""


@lru_cache(maxsize=32)  # layers of one shape share it
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

    task = Task(
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
    pack_keys(spec, task)
    pack_values(spec, task)
    key_bias(spec, task)
    done: Expr = first
    left: Expr = rows
    for size in spec.tiles:
        count = fixed(left // size)
        start = fixed(done)
        with T.serial(T.int64(0), count) as i:
            _tile(spec, task, fixed(start + i * size), size)
        done, left = fixed(start + count * size), fixed(left - count * size)


def _tile(spec: Attention, task: Task, row: Expr, size: int) -> None:
    """`size` query rows from `row` on."""
    stride = fixed(task.panels * LANES)
    seen, panels = task.keys, task.panels
    if spec.causal:
        seen = T.Bind(T.min(task.keys, row + size))
        panels = T.Bind(T.ceildiv(seen, T.int64(LANES)))
    if spec.rows_differ:
        with T.serial(T.int64(0), T.int64(size)) as i:
            row_bias(spec, task, row + i, T.Bind(i * stride), panels)
    peaks = T.alloc_buffer((size * LANES,), "float32", scope="global")
    inverse = T.alloc_buffer((size,), "float32", scope="global")
    _scores(spec, task, row, size, stride, panels, peaks)
    with T.serial(T.int64(0), T.int64(size)) as i:
        _softmax(task, T.Bind(i * stride), panels, T.Bind(peaks[span(i * LANES)]), lambda v: T.buffer_store(inverse, v, [i]))
    each_vector(spec.head_dim, lambda off, valid: _values(spec, task, row, size, stride, seen, inverse, off, valid))


def _scores(spec: Attention, task: Task, row: Expr, size: int, stride: Expr, panels: Expr, peaks: Expr) -> None:
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


def _softmax(task: Task, at: Expr, panels: Expr, peak: Expr, done: Callable[[Expr], None]) -> None:
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
    task: Task,
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
