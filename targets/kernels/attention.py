"""Attention in float32: softmax(scale * Q K^T + mask) V, read in place from whatever projections produced.

A task is one key/value head of one batch entry and up to 256 rows: queries of all heads that read it. Block by block of keys it packs
K transposed in panels of 16 keys, [key / 16][d][16], and V in panels of 16 features, [d / 16][key][16]; then a few rows at a time:
scores, powers in place, values, in the order that `attention_spec.py` writes down. No order depends on the tile, on other rows or on
the number of threads: the bits are the same on every machine. Scratch has one size for all lengths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.exact import LOG2_E
from khtst_compile.targets.kernels import fmla_lane
from khtst_compile.targets.kernels.attention_pack import Block, Task, key_bias, pack_keys, pack_values, row_bias
from khtst_compile.targets.kernels.attention_spec import Attention, Mask, Operand, reference
from khtst_compile.targets.kernels.rows import each_vector, fixed, load, round_up, save
from khtst_compile.targets.kernels.softmax import exp2_nonpositive
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    across,
    ceil,
    f32,
    fma,
    i32,
    keep,
    mul,
    shuffle2,
    small,
    span,
    splat,
    store,
    sum_across,
)

__all__ = ["Attention", "Mask", "Operand", "prim_func", "reference"]

_VECTORS = 4
"""Registers of 16 columns where a register has four lanes."""
_ROWS = 256
"""Rows of one task: packing K and V again for the next ones costs little then."""


@lru_cache(maxsize=32)  # layers of one shape share it
def prim_func(spec: Attention) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        batch, queries = (tirx.Var(n, "int64") for n in ("b", "q_length"))
        new = queries if spec.cached else tirx.Var("k_length", "int64")
        past = tirx.Var("past", "int64") if spec.cached else T.int64(0)
        flat = _arguments(spec, batch, queries, new, past)
        chunks = T.Bind(T.ceildiv(queries * spec.sharing, T.int64(_ROWS)))
        tasks = T.Bind(batch * spec.groups * chunks)

        def scratch(size: int) -> Expr:
            return T.alloc_buffer((size,), "float32", scope="global")

        loop = T.parallel if spec.parallel else T.serial
        with loop(T.int64(0), tasks) as index:
            pair = fixed(index // chunks)
            task = Task(
                flat=flat,
                batch=batch,
                queries=queries,
                keys=fixed(past + new),
                past=past,
                b=fixed(pair // spec.groups),
                kv_head=fixed(pair % spec.groups),
                first=fixed(index % chunks * _ROWS),
                keys_packed=scratch(spec.key_block * spec.head_dim),
                values_packed=scratch(spec.key_block * round_up(spec.head_dim)),
                scores=scratch(spec.key_block * spec.tiles[0]),
                bias=scratch(spec.key_block),
                scaled=scratch(spec.tiles[0] * round_up(spec.head_dim)),
                tops=scratch(_ROWS + LANES),
                sums=scratch(_ROWS * LANES),
            )
            _task(spec, task)
    return builder.get()


def _arguments(spec: Attention, batch: Expr, queries: Expr, new: Expr, past: Expr) -> dict[str, Expr]:
    width, q = T.int64(spec.groups * spec.head_dim), ([batch, queries, T.int64(spec.q.row)], "float32")
    shapes: dict[str, tuple[list[Expr], str]] = {"q": q}
    if spec.codes:
        for prefix, length in (("", new), ("past_", past)):
            shapes |= {f"{prefix}{name}": ([length, batch, width], "int8") for name in ("k", "v")}
            shapes[f"{prefix}scales"] = ([length, batch, T.int64(2 * spec.groups)], "float32")
    else:
        shapes["k"] = ([batch, new, T.int64(spec.k.row)], "float32")
        shapes["v"] = ([batch, new, T.int64(spec.v.row)], "float32")
        if spec.cached:
            shapes |= {name: ([past, batch, width], "float32") for name in ("past_k", "past_v")}
    if spec.mask is not None:
        one = T.int64(1)
        dims = [
            batch if spec.mask.batch else one,
            T.int64(spec.heads) if spec.mask.head else one,
            queries if spec.mask.query else one,
            past + new if spec.cached else new,
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


def _task(spec: Attention, task: Task) -> None:
    """All rows of the task, block by block of keys."""
    rows = fixed(T.min(T.int64(_ROWS), task.queries * spec.sharing - task.first))
    seen = fixed(_seen(spec, task, rows - 1))
    with T.serial(T.int64(0), rows) as r:
        T.buffer_store(task.tops, T.float32(-np.inf), [r])
        store(task.sums, f32(0.0), r * LANES)
    # Without any key one empty block writes the zeros.
    with T.serial(T.int64(0), T.max(T.int64(1), T.ceildiv(seen, T.int64(spec.key_block)))) as step:
        start = fixed(step * spec.key_block)
        count = fixed(T.min(T.int64(spec.key_block), seen - start))
        block = Block(start, count, fixed(T.ceildiv(count, T.int64(LANES))), spec.key_block)
        pack_keys(spec, task, block)
        pack_values(spec, task, block)
        key_bias(spec, task, block)
        done: Expr = T.int64(0)
        left: Expr = rows
        for size in spec.tiles:
            tiles = fixed(left // size)
            begin = fixed(done)
            with T.serial(T.int64(0), tiles) as i:
                _tile(spec, task, block, fixed(begin + i * size), size)
            done, left = fixed(begin + tiles * size), fixed(left - tiles * size)


def _seen(spec: Attention, task: Task, r: Expr) -> Expr:
    """How many keys row `first + r` sees, masks aside: they are the first ones."""
    if not spec.causal:
        return task.keys
    return T.min(task.keys, task.past + (task.first + r) // spec.sharing + 1)


def _tile(spec: Attention, task: Task, block: Block, row: Expr, size: int) -> None:
    """`size` rows from the task's `row` on against one block of keys."""
    seen = fixed(_seen(spec, task, row + (size - 1)))
    count = fixed(T.min(block.count, seen - block.start))
    part = Block(block.start, count, fixed(T.ceildiv(count, T.int64(LANES))), block.pitch)
    last = T.Bind(seen <= block.start + spec.key_block)

    def body() -> None:
        shrink, inverse = small(), small()
        with T.serial(T.int64(0), T.int64(size)) as i:
            _scaled_query(spec, task, fixed(task.first + row + i), i)
            if spec.rows_differ:
                row_bias(spec, task, part, fixed(task.first + row + i), fixed(i * part.pitch))
        _scores(spec, task, part, row, size)
        _powers(task, part, row, size, shrink)
        with T.If(last), T.Then():
            _inverses(task, row, size, inverse)
        _all_values(spec, task, part, row, size, shrink, inverse, last)

    if not spec.causal:
        body()
        return
    with T.If(T.Or(T.EQ(block.start, T.int64(0)), block.start < seen)), T.Then():
        body()


def _scaled_query(spec: Attention, task: Task, row: Expr, i: Expr) -> None:
    """q * scale * log2(e) of one row into the tile: scores come out in units of log2."""
    start = fixed((task.b * task.queries + row // spec.sharing) * spec.q.row + spec.q.offset + _column(spec, task, row))
    factor = f32(spec.scale * LOG2_E)

    def body(off: Expr, valid: int) -> None:
        store(task.scaled, mul(load(task.flat["q"], start + off, valid), factor), i * round_up(spec.head_dim) + off)

    each_vector(spec.head_dim, body)


def _column(spec: Attention, task: Task, row: Expr) -> Expr:
    """Where the head of a row begins in a row of Q or of the result."""
    return (task.kv_head * spec.sharing + row % spec.sharing) * spec.head_dim


def _scores(spec: Attention, task: Task, block: Block, row: Expr, size: int) -> None:
    """Scores of `size` rows and the keys of the block, -inf where a key is not seen."""
    pitch = round_up(spec.head_dim)
    additive = spec.mask is not None and spec.mask.dtype == "float32"

    def panels(first: Expr, side: int, diagonal: bool) -> None:
        js = [T.Bind(first + p) for p in range(side)] if side > 1 else [first]
        acc = [[small() for _ in range(size)] for _ in js]

        def bias(i: int, j: Expr) -> Expr:
            return task.scores[span(i * block.pitch + j * LANES)] if spec.rows_differ else task.bias[span(j * LANES)]

        for j, sums in zip(js, acc, strict=True):
            for i, a in enumerate(sums):
                # 0 and -inf may as well be what the sum starts from; another bias is added to its result, rounded once.
                store(a, f32(0.0) if additive else bias(i, j), 0)

        def products(c: Expr) -> None:
            keys = [T.Bind(task.keys_packed[span((j * spec.head_dim + c) * LANES)]) for j in js]
            for i in range(size):
                query = splat(task.scaled[i * pitch + c])
                for key, sums in zip(keys, acc, strict=True):
                    store(sums[i], fma(query, key, sums[i][span(0)]), 0)

        if side == 1 and fmla_lane.serves(spec.isa, size, _VECTORS, pitch):
            base = T.Bind(js[0] * (spec.head_dim * LANES))
            _by_lane(acc[0], task.scaled, pitch, task.keys_packed, base, T.int64(spec.head_dim))
            done = spec.head_dim // fmla_lane.STEPS * fmla_lane.STEPS
        else:
            turns = spec.head_dim // spec.unroll
            done = turns * spec.unroll
            with T.serial(T.int64(0), T.int64(turns)) as turn:
                for u in range(spec.unroll):
                    products(turn * spec.unroll + u)
        for c in range(done, spec.head_dim):
            products(T.int64(c))
        for j, sums in zip(js, acc, strict=True):
            for i, a in enumerate(sums):
                s = T.Bind(a[span(0)] + bias(i, j)) if additive else a[span(0)]
                if diagonal:
                    position = T.cast(_seen(spec, task, row + i) - block.start - j * LANES, "int32")
                    s = T.Select(T.ramp(T.int32(0), 1, LANES) < splat(position), s, f32(-np.inf))
                store(task.scores, s, i * block.pitch + j * LANES)

    whole = block.panels
    if spec.causal:  # panels that all rows see in full
        whole = fixed(T.max(T.int64(0), T.min(block.panels, (_seen(spec, task, row) - block.start) // LANES)))
    done: Expr = T.int64(0)
    if (side := spec.side(size)) > 1:
        turns = fixed(whole // side)
        with T.serial(T.int64(0), turns) as turn:
            panels(turn * side, side, False)
        done = fixed(turns * side)
    with T.serial(done, whole) as j:
        panels(j, 1, False)
    if spec.causal:
        with T.serial(whole, block.panels) as j:
            panels(j, 1, True)


def _by_lane(sums: list[Expr], a: Expr, pitch: int, b: Expr, base: Expr, depth: Expr) -> Expr:
    """Add all whole fmla_lane.STEPS of `depth` products to the sums of a tile; returns how many steps these are.

    a: flat buffer, rows `pitch` apart from 0 on; b: flat buffer, from `base` on 16 columns a step.
    """
    turns = T.Bind(T.truncdiv(depth, T.int64(fmla_lane.STEPS)))
    with T.serial(T.int64(0), turns) as turn:
        k = T.Bind(turn * fmla_lane.STEPS)
        cells = [[T.address_of(row[j * (LANES // _VECTORS)]) for j in range(_VECTORS)] for row in sums]
        fmla_lane.multiply_steps(cells, T.address_of(a[k]), pitch, T.address_of(b[base + k * LANES]))
    return T.Bind(turns * fmla_lane.STEPS)


def _powers(task: Task, block: Block, row: Expr, size: int, shrink: Expr) -> None:
    """Scores of `size` rows to powers, in place; their tops and sums move on; shrink[i]: what earlier sums of row i are multiplied by.

    What is one number a row is kept in the lanes of one vector: for all rows at once, and no row waits for another.
    """
    pitch = block.pitch
    peaks = [small() for _ in range(size)]
    for peak in peaks:
        store(peak, f32(-np.inf), 0)
    with T.serial(T.int64(0), block.panels) as j:
        for i, peak in enumerate(peaks):
            store(peak, T.max(peak[span(0)], task.scores[span(i * pitch + j * LANES)]), 0)
    highest = _gathered([across(peak[span(0)], T.max) for peak in peaks])
    old = T.Bind(task.tops[span(row)])
    top = keep(T.max(old, ceil(highest)))
    # Where nothing is seen, the powers must be 2^-inf = 0 and not 2^(-inf + inf).
    finite = small()
    store(finite, T.Select(T.EQ(top, f32(-np.inf)), f32(0.0), top), 0)
    store(shrink, exp2_nonpositive(T.Bind(old - finite[span(0)])), 0)
    store(task.tops, T.Select(T.ramp(T.int32(0), 1, LANES) < i32(size), top, old), row)
    with T.serial(T.int64(0), T.int64(size)) as i:
        at = fixed(i * pitch)
        subtract = T.Bind(splat(finite[i]))
        total = small()
        sums = T.Bind((row + i) * LANES)
        store(total, mul(task.sums[span(sums)], splat(shrink[i])), 0)
        with T.serial(T.int64(0), block.panels) as j:
            p = exp2_nonpositive(T.Bind(task.scores[span(at + j * LANES)] - subtract))
            store(task.scores, p, at + j * LANES)
            store(total, total[span(0)] + p, 0)
        store(task.sums, total[span(0)], sums)


def _gathered(vectors: list[Expr]) -> Expr:
    """Lane i from vectors[i], without a detour through memory, where small stores would hold up the large load."""
    result = vectors[0]
    for i, vector in enumerate(vectors[1:], 1):
        result = keep(shuffle2(result, vector, [LANES + n if n == i else n for n in range(LANES)]))
    return result


def _inverses(task: Task, row: Expr, size: int, inverse: Expr) -> None:
    """1 / the sum of `size` rows, 0 for rows that saw no key."""
    total = _gathered([sum_across(keep(task.sums[span((row + i) * LANES)])) for i in range(size)])
    store(inverse, T.Select(T.EQ(total, f32(0.0)), f32(0.0), f32(1.0) / total), 0)


def _all_values(spec: Attention, task: Task, block: Block, row: Expr, size: int, shrink: Expr, inverse: Expr, last: Expr) -> None:
    """The result of `size` rows, as many vectors of columns at once as `side` says and the head has."""
    full = spec.head_dim // LANES
    side = next(n for n in range(spec.side(size), 0, -1) if full % n == 0)

    def columns(offsets: list[Expr], valid: int) -> None:
        _values(spec, task, block, row, size, shrink, inverse, last, offsets, valid)

    if side == 1:
        each_vector(spec.head_dim, lambda off, valid: columns([off], valid))
        return
    with T.serial(T.int64(0), T.int64(full // side)) as turn:
        columns([T.Bind((turn * side + p) * LANES) for p in range(side)], LANES)
    if spec.head_dim % LANES:
        columns([T.int64(full * LANES)], spec.head_dim % LANES)


def _values(
    spec: Attention,
    task: Task,
    block: Block,
    row: Expr,
    size: int,
    shrink: Expr,
    inverse: Expr,
    last: Expr,
    offsets: list[Expr],
    valid: int,
) -> None:
    """16 columns from each offset of the result of `size` rows: what is there shrinks, the block's values are added; after the last
    block, divided."""
    out = task.flat["out"]
    acc = [[small() for _ in range(size)] for _ in offsets]
    places = []
    for i in range(size):
        r = T.Bind(task.first + row + i)
        line = (task.b * task.queries + r // spec.sharing) * (spec.heads * spec.head_dim)
        places.append(fixed(line + _column(spec, task, r)))
    each = [(places[i] + off, i, a) for off, sums in zip(offsets, acc, strict=True) for i, a in enumerate(sums)]
    with T.If(T.EQ(block.start, T.int64(0))):
        with T.Then():
            for _, _, a in each:
                store(a, f32(0.0), 0)
        with T.Else():
            for place, i, a in each:
                store(a, mul(load(out, place, valid), splat(shrink[i])), 0)
    bases = [T.Bind(off * spec.key_block) for off in offsets]
    done: Expr = T.int64(0)
    if len(offsets) == 1 and fmla_lane.serves(spec.isa, size, _VECTORS, block.pitch):
        done = _by_lane(acc[0], task.scores, block.pitch, task.values_packed, bases[0], block.count)
    with T.serial(done, block.count) as key:
        values = [T.Bind(task.values_packed[span(base + key * LANES)]) for base in bases]
        for i in range(size):
            power = splat(task.scores[i * block.pitch + key])
            for value, sums in zip(values, acc, strict=True):
                store(sums[i], fma(power, value, sums[i][span(0)]), 0)
    with T.If(last), T.Then():
        for _, i, a in each:
            store(a, a[span(0)] * splat(inverse[i]), 0)
    for place, _, a in each:
        save(out, a[span(0)], place, valid)
