"""The first half of a level of the codebook kernel: what is left of each row in int8, how far its scores can be off, and these scores."""

from __future__ import annotations

import numpy as np
from tvm.tirx.script import builder as T

from khtst_compile.quant.codebook_int8 import GROUP, STEPS
from khtst_compile.scores import LARGEST, score_error

from .codebook_spec import BLOCK, FACTS, Codebook, Parts
from .dot import Codes
from .quantize import largest as largest_of
from .quantize import new_peak, rounded_codes, track
from .rows import each_vector, load, round_up
from .tiles import multiply_add, opaque, walk_rows
from .vec import LANES, Expr, f32, fma, i32, lane, mul, rounded, shuffle, small, span, splat, sqrt, store, sum_across, to_float

UNIT = 2.0**-24
_LARGEST_BITS = int(np.float32(LARGEST).view(np.int32))
_SLACK = 1.01  # for norms summed in float32
_CODE_SLACK = 3e-5  # left / a is at most 127, and the product that stands for it three roundings off
_SMALLEST = 1e-35  # products this small lose bits


def copy_row(spec: Codebook, parts: Parts, first: Expr, row: Expr) -> None:
    """A row of z into `left`, zeros behind it."""
    start, at = T.Bind((first + row) * spec.features), T.Bind(row * spec.padded)
    each_vector(spec.features, lambda off, valid: store(parts.left, load(parts.flat["z"], start + off, valid), at + off))
    for off in range(round_up(spec.features), spec.padded, LANES):
        store(parts.left, f32(0.0), at + off)


def measure(spec: Codebook, parts: Parts, level: Expr, row: Expr) -> None:
    """The scale of what is left of a row; a row that is lost becomes zeros."""
    at, coarse = T.Bind(row * spec.padded), spec.coarse
    peak = new_peak(LANES, spec.isa.max_keeps_nan)
    each_vector(spec.padded, lambda off, valid: track(peak, T.Bind(parts.left[span(at + off)])))
    found = largest_of(peak)
    cell = small(1)
    T.buffer_store(cell, found, [0])
    # As bits, where a NaN is larger than any number: TVM takes `not a <= b` for `a > b`.
    with T.If(T.reinterpret("int32", found) > T.int32(_LARGEST_BITS)), T.Then():
        T.buffer_store(parts.lost, T.int32(1), [row])
        each_vector(spec.padded, lambda off, valid: store(parts.left, f32(0.0), at + off))
        T.buffer_store(cell, T.float32(1.0), [0])
    amax = T.Bind(cell[0])
    scale = T.Bind(amax / T.float32(coarse.most if spec.int8 else 1))
    if spec.int8 and coarse.bytes:
        part = T.Bind(parts.flat["facts"][level * FACTS])
        scale = T.Bind(T.max(scale, _longest_part(spec, parts, at, amax) * part))
    T.buffer_store(parts.scales, scale, [row])
    T.buffer_store(parts.single, T.float32(1.0) / scale, [row])  # until `prepare` puts the bound there


def prepare(spec: Codebook, parts: Parts, level: Expr, row: Expr) -> None:
    """What the coarse scores need of what is left of a row: its codes; and how far they can be off."""
    at, coarse = T.Bind(row * spec.padded), spec.coarse
    facts = T.Bind(level * FACTS)
    inverse = T.Bind(splat(parts.single[row]))
    length, rest = small(), small()
    for total in (length, rest):
        store(total, f32(0.0), 0)

    def one(off: Expr, valid: int) -> None:
        x = T.Bind(parts.left[span(at + off)])
        if not spec.int8:
            t = T.Bind(mul(x, inverse))
            store(length, fma(t, t, length[span(0)]), 0)
            return
        whole = T.Bind(rounded_codes(x, inverse, False, spec.isa.rounds))
        q = T.Bind(to_float(whole))
        r = T.Bind(rounded(mul(x, inverse) - q))
        store(length, fma(q, q, length[span(0)]), 0)
        store(rest, fma(r, r, rest[span(0)]), 0)
        stored = whole + i32(coarse.codes_offset) if coarse.codes_offset else whole
        store(parts.codes, T.cast(stored, f"{coarse.codes_dtype}x16"), row * coarse.width + off)

    each_vector(spec.padded, one, unroll=2)
    if spec.int8:
        for off in range(spec.padded, coarse.width, LANES):
            filler = T.cast(i32(coarse.codes_offset), f"{coarse.codes_dtype}x16")
            store(parts.codes, filler, row * coarse.width + off)
    scale = T.Bind(parts.scales[row])
    norms = [T.Bind(sqrt(lane(sum_across(T.Bind(total[span(0)]))))) for total in (length, rest)]
    pair, single = bounds(spec, parts.flat["facts"], facts, scale, norms)
    T.buffer_store(parts.pair, pair, [row])
    T.buffer_store(parts.single, single, [row])


def _longest_part(spec: Codebook, parts: Parts, at: Expr, amax: Expr) -> Expr:
    """Length of the longest part of a row that is summed in int16: of 32 features (STEPS of 4) those at 0, 1 or at 2, 3 modulo 4."""
    longest = small()
    store(longest, f32(0.0), 0)
    step = GROUP * STEPS
    with T.serial(T.int64(0), T.int64(-(-spec.padded // step))) as number:
        squares = small()
        x = T.Bind(parts.left[span(at + number * step)])
        store(squares, x * x, 0)
        for off in range(LANES, step, LANES):
            y = T.Bind(parts.left[span(at + number * step + off)])
            store(squares, fma(y, y, squares[span(0)]), 0)
        total = T.Bind(squares[span(0)])
        for distance in (8, 4, 1):
            total = T.Bind(total + shuffle(total, [i ^ distance for i in range(LANES)]))
        store(longest, T.max(longest[span(0)], total), 0)
    both = T.Bind(longest[span(0)])
    length = T.Bind(sqrt(T.max(lane(both, 0), lane(both, 2))))
    # Squares of very small or large features are no numbers; a part of 16 is at most 4 times the largest of them.
    plain = T.And(amax > T.float32(1e-15), amax < T.float32(1e15))
    return T.Bind(T.Select(plain, length, amax * T.float32((GROUP * STEPS / 2) ** 0.5)))


def bounds(spec: Codebook, flat: Expr, facts: Expr, scale: Expr, norms: list[Expr]) -> list[Expr]:
    """By how much the errors of two codes' coarse scores can differ, and how far one coarse score and its exact one can be apart: float32,
    of a row whose codes and rest have these norms."""
    apart, diameter, off, radius, longest, bias = (T.Bind(flat[facts + i]) for i in range(1, 7))
    number = T.float32
    units = ((8 if spec.int8 else 1.25 * (spec.features + 2)) + 4) * UNIT + 2 * score_error(spec.features)
    length, rest = norms
    if spec.int8:
        rest = T.Bind(rest + number(_CODE_SLACK * spec.features**0.5))
    size = T.Bind((length + rest) * longest if spec.int8 else length * longest)
    rounding = T.Bind(scale * size * number(units) + bias * number(16 * UNIT) + number(_SMALLEST))
    if not spec.int8:
        return [T.Bind(rounding * number(2 * _SLACK)), T.Bind(rounding * number(_SLACK))]
    pair = T.Bind(scale * (length * apart + rest * diameter) + rounding * number(2.0))
    single = T.Bind(scale * (length * off + rest * radius) + rounding)
    return [T.Bind(bound * number(_SLACK)) for bound in (pair, single)]


def score(spec: Codebook, parts: Parts, level: Expr, count: Expr) -> None:
    """Coarse scores of a block of rows."""
    panels, flat, coarse = spec.panels, parts.flat, spec.coarse
    lanes = panels.lanes
    codes: Codes | None = None
    turns = T.Bind(T.cast(flat["facts"][7], "int64"))
    if spec.int8:
        codes = coarse.prepare(parts.codes, count, BLOCK)
    with T.serial(T.int64(0), T.int64(panels.count)) as number:
        panel = opaque(number)
        column = opaque(level * panels.padded + panel * panels.width)

        def tile(row: Expr, many: int, panel: Expr = panel, column: Expr = column) -> None:
            place = T.Bind(panel * panels.width)
            if codes is None:
                acc = multiply_add(
                    panels,
                    many,
                    T.int64(spec.features),
                    lambda _, j: flat["bias"][span(column + j * lanes, lanes)],
                    lambda i, k: parts.left[(row + i) * spec.padded + k],
                    flat["weights"],
                    [T.Bind(column * spec.features)],
                )
                for i in range(many):
                    for j in range(panels.vectors):
                        store(parts.scores, acc[0][i][j][span(0, lanes)], (row + i) * spec.scores + place + j * lanes)
                return
            sums = coarse.sums(codes, flat["weights"], flat.get("starts"), level, panel, row, many, turns)
            for j in range(panels.vectors):
                scale = T.Bind(flat["scale"][span(column + j * lanes, lanes)])
                bias = T.Bind(flat["bias"][span(column + j * lanes, lanes)])
                for i in range(many):
                    both = T.Bind(splat(parts.scales[row + i], lanes) * scale)
                    value = fma(to_float(sums[i][j]), both, bias)
                    store(parts.scores, value, (row + i) * spec.scores + place + j * lanes)

        walk_rows(T.int64(0), count, panels.rows, tile, lambda row, many: None)
