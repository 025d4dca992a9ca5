"""Vectors into the ids of a codebook, and their values: product, argmax, gather and what is left, level by level, in one kernel.

Rows go through in blocks that stay in the cache for all levels. At each level

    coarse[m, k] = about <left[m], c[k] - mean> + bias[k]       int8, or float32 by fused multiply-adds (mean 0)
    open         = the k whose coarse score is so near the largest that the bound of two codes' errors allows them to be it
    id           = the only one that is open, or the first largest of those by the score that `ops.codebook.exact_scores` writes down

so that ids are the same whatever the coarse scores are made of. With q a row's codes, a their scale, r = left / a - q, and the codebook
c[k] = mean + s[k] w[k] + e[k]: the errors of two codes i, j differ by at most

    a (|q| max |e[i] - e[j]| + |r| max |c[i] - c[j]|)           by Cauchy-Schwarz, twice

and some roundings of float32 (`_bounds`). Two codes are nearer to each other than twice the longest one, which leaves a third of the open
codes. Of these the best is scored first, and then only what the bound of a single code's error, with |e| and |c - mean|, cannot rule out.
The maxima are measured in float64 when the codebook is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.layout import Layout, Packed
from khtst_compile.quant.codebook_int8 import GROUP, STEPS, quantize_codebook
from khtst_compile.scores import LARGEST, LARGEST_CODE, score_error
from khtst_compile.targets.isa import Isa

from .coarse import UNROLL, Coarse, pack_starts
from .dot import Codes
from .quantize import largest as largest_of
from .quantize import new_peak, rounded_codes, track
from .rows import LEAD2, Arguments, Lead, each_vector, load, only, round_up, save
from .tiles import LINE, Panels, multiply_add, opaque, panels_of, walk_rows
from .vec import (
    LANES,
    Expr,
    Floats,
    across,
    f32,
    fma,
    i32,
    lane,
    mul,
    prefetch,
    rounded,
    shuffle,
    small,
    span,
    splat,
    sqrt,
    store,
    sum_across,
    to_float,
)

BLOCK = 32
"""Rows that go through all levels together: their scores for 1,024 codes take 128 KiB of a 512 KiB L2, the codebook in int8 another 256."""
LOOKED_AT = 64
"""Scores in a turn of the loops that look for the largest and for open ones: bits of a register."""
ASKED_CODES, ASKED_BYTES = 8, 1024
"""Open codes of a row, and bytes of each, that are asked for ahead: what is left of a row is decided after its whole block was narrowed."""
FACTS = 9
"""Numbers of a level: `Int8Codebook.part`; largest |e[i] - e[j]|, |c[i] - c[j]|, |e|, |c - mean|, |c|, |bias|; turns of a block; |mean|."""
UNIT = 2.0**-24
_LARGEST_BITS = int(np.float32(LARGEST).view(np.int32))
_SLACK = 1.01  # for norms summed in float32
_CODE_SLACK = 3e-5  # left / a is at most 127, and the product that stands for it three roundings off
_SMALLEST = 1e-35  # products this small lose bits


@dataclass(frozen=True)
class Codebook:
    """One codebook kernel.

    isa:        instruction set.
    levels:     how many codebooks a row goes through.
    codes:      K, rows of each; features: d of a vector; value_features: of a value.
    lead:       leading dimensions.
    running:    what is left for the next level is (what was left) - value, else z - the sum of values.
    int8:       coarse scores in int8, else in float32.
    values_out, ids_out: what is written.
    name:       of the function.
    """

    isa: Isa
    levels: int
    codes: int
    features: int
    value_features: int
    lead: Lead = LEAD2
    running: bool = True
    int8: bool = True
    values_out: bool = True
    ids_out: bool = True
    name: str = "codebook_lookup"

    def __post_init__(self) -> None:
        if min(self.levels, self.codes, self.features, self.value_features) < 1:
            raise LoweringError(
                f"{self.name}: {self.levels} levels of {self.codes} codes of {self.features} features, values of {self.value_features}; "
                "needed at least 1 of each"
            )
        if self.levels > 1 and self.value_features != self.features:
            raise LoweringError(
                f"{self.name}: values have {self.value_features} features; needed {self.features}, as another level follows"
            )
        if not (self.values_out or self.ids_out):
            raise LoweringError(f"{self.name}: neither values nor ids are written; needed: one of them")

    @property
    def coarse(self) -> Coarse:
        """The int8 scores."""
        return Coarse(self.isa, self.codes, self.features)

    @property
    def panels(self) -> Panels:
        """The cut of the codebook."""
        return self.coarse.panels if self.int8 else panels_of(self.codes, self.isa)

    @property
    def padded(self) -> int:
        """float32 of a row in scratch memory and in the exact codebook; whole parts (`_longest_part`)."""
        return round_up(self.features, GROUP * STEPS if self.int8 and self.coarse.bytes else LANES)

    @property
    def value_padded(self) -> int:
        """float32 of a row of values."""
        return round_up(self.value_features)

    @property
    def scores(self) -> int:
        """Elements of a row of coarse scores."""
        return round_up(self.panels.padded, LOOKED_AT)


@dataclass(frozen=True)
class _Parts:
    """What the phases share. flat: arguments by name. Of a block of rows: left, total, scores: float32 matrices; pair, single: bounds;
    scales: of the codes; codes: in int8; lost: int32; found, counts: int32, the open codes of each row and how many they are."""

    flat: dict[str, Expr]
    left: Expr
    total: Expr
    scores: Expr
    pair: Expr
    single: Expr
    scales: Expr
    codes: Expr
    lost: Expr
    found: Expr
    counts: Expr


@lru_cache(maxsize=32)
def prim_func(spec: Codebook) -> tirx.PrimFunc:
    """The TIR of `spec`.

    Arguments: z (lead.., d) float32; the arrays of `pack`; [values (lead.., v) float32]; [ids (lead.., levels) int32].
    """
    coarse, panels = spec.coarse, spec.panels
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("z", spec.features)
        if spec.int8:
            args.vector("weights", spec.levels * panels.padded * coarse.width, "int8")
            if coarse.starts:
                args.vector("starts", spec.levels * coarse.starts, "int16" if coarse.bytes else "int32")
            args.vector("scale", spec.levels * panels.padded)
            args.vector("mean", spec.levels * spec.padded)
        else:
            args.vector("weights", spec.levels * panels.padded * spec.features)
        args.vector("bias", spec.levels * panels.padded)
        args.vector("facts", spec.levels * FACTS)
        args.vector("exact", spec.levels * spec.codes * spec.padded)
        args.vector("table", spec.levels * spec.codes * spec.value_padded)
        if spec.values_out:
            args.rows("values", spec.value_features)
        if spec.ids_out:
            args.rows("ids", spec.levels, "int32")
        rows, flat = args.flatten()
        with T.parallel(T.int64(0), T.ceildiv(rows, T.int64(BLOCK))) as block:
            first = opaque(block * BLOCK)
            count = opaque(T.min(rows - first, T.int64(BLOCK)))
            _block(spec, flat, first, count)
    return builder.get()


def _block(spec: Codebook, flat: dict[str, Expr], first: Expr, count: Expr) -> None:
    coarse = spec.coarse

    def room(elements: int, dtype: str = "float32") -> Expr:
        return T.alloc_buffer((elements,), dtype, scope="global")

    parts = _Parts(
        flat,
        room(BLOCK * spec.padded),
        room(BLOCK * spec.value_padded),
        room(BLOCK * spec.scores),
        room(BLOCK),
        room(BLOCK),
        room(BLOCK),
        room(BLOCK * coarse.width if spec.int8 else 1, coarse.codes_dtype),
        room(BLOCK, "int32"),
        room(BLOCK * spec.scores, "int32"),
        room(BLOCK, "int32"),
    )
    with T.serial(T.int64(0), count) as row:
        T.buffer_store(parts.lost, T.int32(0), [row])
        _copy(spec, parts, first, row)
    with T.serial(T.int64(0), T.int64(spec.levels)) as number:
        level = opaque(number)
        # Two passes, as rows wait for what decides each of them: the next row can begin meanwhile.
        with T.serial(T.int64(0), count) as row:
            _measure(spec, parts, level, row)
        with T.serial(T.int64(0), count) as row:
            _prepare(spec, parts, level, row)
        _score(spec, parts, level, count)
        with T.serial(T.int64(0), count) as row:
            _narrow(spec, parts, level, row)
        with T.serial(T.int64(0), count) as row:
            _choose(spec, parts, level, first, row)
    if spec.values_out:
        with T.serial(T.int64(0), count) as row:
            is_lost = T.Bind(parts.lost[row] != 0)
            start, at = T.Bind((first + row) * spec.value_features), T.Bind(row * spec.value_padded)

            def write(off: Expr, valid: int, is_lost: Expr = is_lost, start: Expr = start, at: Expr = at) -> None:
                value = T.Bind(T.Select(is_lost, f32(float("nan")), parts.total[span(at + off)]))
                save(flat["values"], value, start + off, valid)

            each_vector(spec.value_features, write)


def _copy(spec: Codebook, parts: _Parts, first: Expr, row: Expr) -> None:
    """A row of z into `left`, zeros behind it."""
    start, at = T.Bind((first + row) * spec.features), T.Bind(row * spec.padded)
    each_vector(spec.features, lambda off, valid: store(parts.left, load(parts.flat["z"], start + off, valid), at + off))
    for off in range(round_up(spec.features), spec.padded, LANES):
        store(parts.left, f32(0.0), at + off)


def _measure(spec: Codebook, parts: _Parts, level: Expr, row: Expr) -> None:
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
    T.buffer_store(parts.single, T.float32(1.0) / scale, [row])  # until `_prepare` puts the bound there


def _prepare(spec: Codebook, parts: _Parts, level: Expr, row: Expr) -> None:
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
    pair, single = _bounds(spec, parts.flat["facts"], facts, scale, norms)
    T.buffer_store(parts.pair, pair, [row])
    T.buffer_store(parts.single, single, [row])


def _longest_part(spec: Codebook, parts: _Parts, at: Expr, amax: Expr) -> Expr:
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


def _bounds(spec: Codebook, flat: Expr, facts: Expr, scale: Expr, norms: list[Expr]) -> list[Expr]:
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


def _score(spec: Codebook, parts: _Parts, level: Expr, count: Expr) -> None:
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


def _narrow(spec: Codebook, parts: _Parts, level: Expr, row: Expr) -> None:
    """The open codes of a row, in order; asks for what they are scored with, which a large codebook has far away."""
    at = T.Bind(row * spec.scores)
    few = 4  # lanes of the narrowest registers, of which panels are made
    for filler in range(spec.panels.padded, spec.scores, few):
        store(parts.scores, f32(float("-inf"), few), at + filler)
    best = small()
    store(best, f32(float("-inf")), 0)
    with T.serial(T.int64(0), T.int64(spec.scores // LOOKED_AT)) as c:
        for off in range(0, LOOKED_AT, LANES):
            store(best, T.max(best[span(0)], parts.scores[span(at + c * LOOKED_AT + off)]), 0)
    peak = lane(across(T.Bind(best[span(0)]), T.max))
    least = T.Bind(rounded(peak - parts.pair[row]))
    number = T.alloc_buffer((1,), "int32", scope="global")
    T.buffer_store(number, T.int32(0), [0])
    with T.serial(T.int64(0), T.int64(spec.scores // LOOKED_AT)) as c:
        _list_open(spec, parts, T.Bind(at + c * LOOKED_AT), least, T.Bind(T.cast(c * LOOKED_AT, "int32")), at, number)
    T.buffer_store(parts.counts, number[0], [row])
    with T.serial(T.int64(0), T.min(T.cast(number[0], "int64"), T.int64(ASKED_CODES))) as i:
        start = T.Bind((level * spec.codes + T.cast(parts.found[at + i], "int64")) * spec.padded)
        for off in range(0, min(4 * spec.padded, ASKED_BYTES), LINE):
            prefetch(parts.flat["exact"], start + off // 4)


def _choose(spec: Codebook, parts: _Parts, level: Expr, first: Expr, row: Expr) -> None:
    """The id of a row, its value, and what is left."""
    at = T.Bind(row * spec.scores)
    chosen = T.alloc_buffer((1,), "int32", scope="global")
    T.buffer_store(chosen, parts.found[at], [0])
    with T.If(parts.counts[row] > T.int32(1)), T.Then():
        _decide(spec, parts, level, row, chosen)
    chosen_id = T.Bind(T.Select(parts.lost[row] != 0, T.int32(0), chosen[0]))
    if spec.ids_out:
        T.buffer_store(parts.flat["ids"], chosen_id, [(first + row) * spec.levels + level])
    _advance(spec, parts, level, first, row, T.Bind(T.cast(chosen_id, "int64")))


def _list_open(spec: Codebook, parts: _Parts, at: Expr, least: Expr, first: Expr, to: Expr, number: Expr) -> None:
    """Add to `found` from `to`, which has `number` entries, which of LOOKED_AT coarse scores from `at`, those of codes from `first`, are at
    least `least`."""

    def add(code: Expr) -> None:
        T.buffer_store(parts.found, code, [to + T.cast(number[0], "int64")])

    if spec.isa.sign_bits:
        # The sign of a difference of floats is that of their order. All bits of one loop: its end is what is hard to foresee.
        left = T.alloc_buffer((1,), "int64", scope="global")
        T.buffer_store(left, T.int64(-1), [0])
        for i in range(0, LOOKED_AT, 8):
            below = T.Bind(parts.scores[span(at + i, 8)] - splat(least, 8))
            mask = T.cast(T.call_llvm_pure_intrin("int32", spec.isa.sign_bits, below), "int64")
            T.buffer_store(left, T.bitwise_xor(left[0], T.shift_left(mask, T.int64(i))), [0])
        with T.While(left[0] != T.int64(0)):
            place = T.call_llvm_pure_intrin("int64", "llvm.cttz.i64", left[0], T.bool(True))
            add(first + T.cast(place, "int32"))
            T.buffer_store(number, number[0] + T.int32(1), [0])
            T.buffer_store(left, T.bitwise_and(left[0], left[0] - T.int64(1)), [0])
        return
    for i in range(0, LOOKED_AT, LANES):
        with (
            T.If(lane(across(T.Bind(parts.scores[span(at + i)]), T.max)) >= least),
            T.Then(),
            T.serial(T.int32(0), T.int32(LANES)) as j,
        ):
            add(first + i + j)
            T.buffer_store(number, number[0] + T.cast(parts.scores[at + i + T.cast(j, "int64")] >= least, "int32"), [0])


def _decide(spec: Codebook, parts: _Parts, level: Expr, row: Expr, chosen: Expr) -> None:
    """Which of a row's open codes it is: the one of the highest coarse score first, which rules out most of the others."""
    at = T.Bind(row * spec.scores)
    top = small(1)
    T.buffer_store(top, parts.scores[at + T.cast(chosen[0], "int64")], [0])
    number = T.Bind(T.cast(parts.counts[row], "int64"))
    with T.serial(T.int64(1), number) as i:
        code = T.Bind(parts.found[at + i])
        score = T.Bind(parts.scores[at + T.cast(code, "int64")])
        higher = T.Bind(score > top[0])
        T.buffer_store(chosen, T.Select(higher, code, chosen[0]), [0])
        T.buffer_store(top, T.Select(higher, score, top[0]), [0])
    first = T.Bind(chosen[0])
    T.buffer_store(top, _exact(spec, parts, level, row, T.Bind(T.cast(first, "int64"))), [0])
    common = small(1)
    T.buffer_store(common, T.float32(0.0), [0])
    if spec.int8:
        with T.If(parts.flat["facts"][level * FACTS + 8] > T.float32(0.0)), T.Then():
            T.buffer_store(common, _product(spec, parts, row, parts.flat["mean"], T.Bind(level * spec.padded)), [0])
    least = T.Bind(rounded(top[0] - common[0]) - parts.single[row])
    with T.serial(T.int64(0), number) as i:
        code = T.Bind(parts.found[at + i])
        with T.If(T.And(parts.scores[at + T.cast(code, "int64")] >= least, code != first)), T.Then():
            score = _exact(spec, parts, level, row, T.Bind(T.cast(code, "int64")))
            better = T.Bind(T.Or(score > top[0], T.And(score == top[0], code < chosen[0])))
            T.buffer_store(chosen, T.Select(better, code, chosen[0]), [0])
            T.buffer_store(top, T.Select(better, score, top[0]), [0])


def _exact(spec: Codebook, parts: _Parts, level: Expr, row: Expr, code: Expr) -> Expr:
    """The score that ids are decided by: see ops.codebook.exact_scores."""
    start = T.Bind((level * spec.codes + code) * spec.padded)
    return T.Bind(_product(spec, parts, row, parts.flat["exact"], start) + parts.flat["bias"][level * spec.panels.padded + code])


def _product(spec: Codebook, parts: _Parts, row: Expr, other: Expr, start: Expr) -> Expr:
    """Of what is left of a row and `other` from `start`, in the order of exact scores."""
    at = T.Bind(row * spec.padded)
    total = small()

    def product(off: Expr) -> Expr:
        return mul(parts.left[span(at + off)], other[span(start + off)])

    store(total, product(T.int64(0)), 0)
    if spec.padded > LANES:
        with T.serial(T.int64(1), T.int64(spec.padded // LANES)) as j:
            store(total, total[span(0)] + product(j * LANES), 0)
    return lane(sum_across(T.Bind(total[span(0)])))


def _advance(spec: Codebook, parts: _Parts, level: Expr, first: Expr, row: Expr, code: Expr) -> None:
    """Add the value of a code to the total, and take it from what is left."""
    if spec.levels == 1 and not spec.values_out:
        return
    start = T.Bind((level * spec.codes + code) * spec.value_padded)
    at, here = T.Bind(row * spec.value_padded), T.Bind(row * spec.padded)
    source = T.Bind((first + row) * spec.features)
    first_level = T.Bind(level == 0)

    def one(off: Expr, valid: int) -> None:
        value = T.Bind(parts.flat["table"][span(start + off)])
        total = T.Bind(T.Select(first_level, value, parts.total[span(at + off)] + value))
        store(parts.total, total, at + off)
        if spec.levels > 1:
            before = parts.left[span(here + off)] if spec.running else load(parts.flat["z"], source + off, valid)
            store(parts.left, only(T.Bind(before - (value if spec.running else total)), valid), here + off)

    each_vector(spec.value_features, one)


def pack(spec: Codebook, codes: Floats, bias: Floats | None, table: Floats) -> list[npt.NDArray[np.generic] | Packed]:
    """The constant arguments of `spec`, in order.

    codes: (levels, K, d) float32; bias: (levels, K) float32, -inf for a row that is never chosen, or None; table: (levels, K, v) float32.
    Raises LoweringError for shapes that do not fit, entries that are not finite or above LARGEST_CODE, and a level without a row to choose.
    """
    wanted = (spec.levels, spec.codes, spec.features), (spec.levels, spec.codes, spec.value_features)
    if (codes.shape, table.shape) != wanted or (bias is not None and bias.shape != wanted[0][:2]):
        raise LoweringError(
            f"{spec.name}: codes {codes.shape}, values {table.shape}, bias {None if bias is None else bias.shape}; needed {wanted[0]}, "
            f"{wanted[1]}, {wanted[0][:2]}"
        )
    start = np.zeros(wanted[0][:2], np.float32) if bias is None else bias
    if not (np.abs(codes) <= LARGEST_CODE).all() or not ((np.abs(start) <= LARGEST_CODE**2) | np.isneginf(start)).all():
        raise LoweringError(
            f"{spec.name}: the codebook holds NaN, an infinity or an entry above {LARGEST_CODE:g}; needed: smaller numbers"
        )
    if np.isneginf(start).all(axis=1).any():
        raise LoweringError(f"{spec.name}: a level has no code to choose, every bias is -inf; needed: one code or more")
    panels = spec.panels
    columns = np.full((spec.levels, panels.padded), -np.inf, np.float32)
    columns[:, : spec.codes] = start
    facts = np.zeros((spec.levels, FACTS), np.float32)
    used = ~np.isneginf(start)
    facts[:, 6] = np.where(used, np.abs(start), 0).max(1)
    facts[:, 5] = _up(np.sqrt(np.square(np.where(used[..., None], codes, 0).astype(np.float64)).sum(-1)).max(1))
    exact = np.zeros((spec.levels, spec.codes, spec.padded), np.float32)
    exact[:, : spec.codes, : spec.features] = codes
    packed: list[npt.NDArray[np.generic] | Packed]
    if spec.int8:
        coarse = spec.coarse
        made = [quantize_codebook(level, some, coarse.bytes) for level, some in zip(codes, used, strict=True)]
        mean = np.zeros((spec.levels, spec.padded), np.float32)
        mean[:, : spec.features] = [m.mean for m in made]
        matrix = np.concatenate([np.pad(m.weights, ((0, panels.padded - spec.codes), (0, 0))) for m in made])
        scale = np.zeros((spec.levels, panels.padded), np.float32)
        scale[:, : spec.codes] = [m.scale for m in made]
        facts[:, 0] = [m.part for m in made]
        facts[:, 7] = STEPS // UNROLL
        facts[:, 8] = [np.abs(m.mean).max() for m in made]
        facts[:, 1:5] = _up(np.array([[m.apart, m.diameter, m.off, m.radius] for m in made]))
        packed = [_several(matrix, coarse.layout, spec.levels)]
        starts = [pack_starts(coarse, m.weights) for m in made]
        if coarse.starts:
            packed.append(np.concatenate([s for s in starts if s is not None]))
        packed += [scale.reshape(-1), mean.reshape(-1)]
    else:
        matrix = np.pad(codes, ((0, 0), (0, panels.padded - spec.codes), (0, 0))).reshape(-1, spec.features)
        layout = Layout((panels.padded, spec.features), (panels.count, panels.width, spec.features), (0, 2, 1))
        packed = [_several(matrix, layout, spec.levels)]
    values = np.zeros((spec.levels, spec.codes, spec.value_padded), np.float32)
    values[..., : spec.value_features] = table
    return [*packed, columns.reshape(-1), facts.reshape(-1), exact.reshape(-1), values.reshape(-1)]


def _up(values: npt.NDArray[np.float64]) -> Floats:
    """The next float32 above."""
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))


def _several(matrix: npt.NDArray[np.generic], one: Layout, levels: int) -> Packed:
    """Matrices one below the other, each in the layout `one`."""
    rows, columns = one.padded
    axes = (0, *(a + 1 for a in one.axes))
    layout = Layout((levels * rows, columns), (levels, *one.blocks), axes)
    return Packed(layout.apply(matrix), matrix, layout)
