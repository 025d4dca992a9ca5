"""The second half of a level of the codebook kernel: which codes are open, which of them it is, its value, and what that leaves."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from .codebook_spec import ASKED_BYTES, ASKED_CODES, FACTS, LOOKED_AT, Codebook, Parts
from .rows import each_vector, load, only
from .tiles import LINE
from .vec import LANES, Expr, across, f32, lane, mul, prefetch, rounded, small, span, splat, store, sum_across


def narrow(spec: Codebook, parts: Parts, level: Expr, row: Expr) -> None:
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


def choose(spec: Codebook, parts: Parts, level: Expr, first: Expr, row: Expr) -> None:
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


def _list_open(spec: Codebook, parts: Parts, at: Expr, least: Expr, first: Expr, to: Expr, number: Expr) -> None:
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


def _decide(spec: Codebook, parts: Parts, level: Expr, row: Expr, chosen: Expr) -> None:
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


def _exact(spec: Codebook, parts: Parts, level: Expr, row: Expr, code: Expr) -> Expr:
    """The score that ids are decided by: see ops.codebook.exact_scores."""
    start = T.Bind((level * spec.codes + code) * spec.padded)
    return T.Bind(_product(spec, parts, row, parts.flat["exact"], start) + parts.flat["bias"][level * spec.panels.padded + code])


def _product(spec: Codebook, parts: Parts, row: Expr, other: Expr, start: Expr) -> Expr:
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


def _advance(spec: Codebook, parts: Parts, level: Expr, first: Expr, row: Expr, code: Expr) -> None:
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
