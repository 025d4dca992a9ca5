"""The vector vocabulary of the kernels: TIR expressions on vectors, each with one rounding that is written down.

Floats are handled 16 lanes at a time (LLVM splits a vector into the registers a machine has), horizontal reductions
run a fixed tree over the 16 lanes, and fused multiply-add is always explicit. LLVM is free to contract `a * b + c` by
itself, so a product that must be rounded before it is added goes through `mul`; then AVX2, AVX512 and NEON give
the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import Isa

LANES = 16
"""Lanes of a float vector in row kernels; part of the meaning of a reduction, so the same on every target."""

Expr = Any
"""A TIR expression (tvm is untyped)."""
Floats = npt.NDArray[np.float32]


def dtype_of(value: Expr) -> str:
    """The dtype of a TIR expression as text, e.g. "float32x16"."""
    return str(value.expr_ty())


def lanes_of(value: Expr) -> int:
    """Number of lanes of a TIR expression."""
    _, _, lanes = dtype_of(value).partition("x")
    return int(lanes) if lanes else 1


def splat(value: Expr, lanes: int = LANES) -> Expr:
    """Scalar expression to a vector whose lanes all hold it; the scalar itself for one lane."""
    return T.broadcast(value, lanes) if lanes > 1 else value


def f32(value: float, lanes: int = LANES) -> Expr:
    """Vector of one float32 constant."""
    return splat(T.float32(float(np.float32(value))), lanes)


def i32(value: int, lanes: int = LANES) -> Expr:
    """Vector of one int32 constant."""
    return splat(T.int32(value), lanes)


def span(start: Expr, lanes: int = LANES) -> Expr:
    """Index of `lanes` consecutive elements from `start`: buffer[i, span(j)] is one vector load; `start` itself for one lane."""
    return T.ramp(start, 1, lanes) if lanes > 1 else start


def store(buffer: Expr, value: Expr, *index: Expr) -> None:
    """Store a vector at consecutive elements; the last index is where it starts."""
    T.buffer_store(buffer, value, [*index[:-1], span(index[-1], lanes_of(value))])


def small(lanes: int = LANES, dtype: str = "float32") -> Expr:
    """A stack buffer that LLVM turns into registers; at most 1,023 bytes, else TVM makes it a heap call."""
    return T.alloc_buffer((lanes,), dtype, scope="global")


def prefetch(buffer: Expr, index: Expr) -> None:
    """Ask for the cache line of an element, to be read soon."""
    read, keep_in_l1, data = T.int32(0), T.int32(3), T.int32(1)
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", T.address_of(buffer[index]), read, keep_in_l1, data))


def fence(isa: Isa) -> None:
    """What comes after is not begun before: LLVM otherwise loads for all parts of a block first, and has to spill."""
    if isa.fence:
        T.evaluate(T.call_llvm_intrin("void", isa.fence, T.int32(0)))


def keep(value: Expr) -> Expr:
    """Pass a vector through a small buffer: TVM's simplifiers stop here, LLVM removes it.

    Without it a chain of bound expressions is expanded by every simplifier pass and compiling takes minutes.
    """
    lanes, scalar = lanes_of(value), dtype_of(value).partition("x")[0]
    buffer = small(lanes, scalar)
    store(buffer, value, 0)
    return T.Bind(buffer[span(0, lanes)])


def _intrinsic(name: str, like: Expr, *args: Expr) -> Expr:
    dtype, lanes = dtype_of(like), lanes_of(like)
    kind = {"float32": "f32", "int32": "i32", "int8": "i8"}[dtype.partition("x")[0]]
    suffix = f"v{lanes}{kind}" if lanes > 1 else kind
    return T.call_llvm_pure_intrin(dtype, f"llvm.{name}.{suffix}", *args)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c with one rounding."""
    return _intrinsic("fma", c, a, b, c)


def rounded(value: Expr) -> Expr:
    """The value, rounded to float32 here: LLVM may not fuse the operation that made it into a later one."""
    return _intrinsic("arithmetic.fence", value, value)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b rounded to float32, never contracted with a later addition."""
    return rounded(a * b)


def rint(value: Expr) -> Expr:
    """Round to the nearest integer, ties to even, as float32."""
    return _intrinsic("rint", value, value)


def ceil(value: Expr) -> Expr:
    """Round up to an integer, as float32; NaN stays NaN."""
    return _intrinsic("ceil", value, value)


def absolute(value: Expr) -> Expr:
    """|value|; the sign bit is cleared, NaN stays NaN."""
    return _intrinsic("fabs", value, value)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger of two, NaN where either is: an instruction on ARM, five on x86."""
    return _intrinsic("maximum", a, a, b)


def sqrt(value: Expr) -> Expr:
    """Square root, correctly rounded."""
    return _intrinsic("sqrt", value, value)


def at_most(value: Expr, limit: Expr) -> Expr:
    """min(value, limit); NaN in `value` stays NaN (the comparison selects `limit` only where it is smaller)."""
    return T.min(limit, value)


def at_least(value: Expr, limit: Expr) -> Expr:
    """max(value, limit); NaN in `value` stays NaN."""
    return T.max(limit, value)


def bits(value: Expr) -> Expr:
    """The bits of float32 lanes as int32."""
    return T.reinterpret(f"int32x{lanes_of(value)}", value)


def from_bits(value: Expr) -> Expr:
    """int32 lanes read as float32."""
    return T.reinterpret(f"float32x{lanes_of(value)}", value)


def to_float(value: Expr) -> Expr:
    """int32 lanes converted to float32, round to nearest."""
    return T.cast(value, f"float32x{lanes_of(value)}")


def shuffle(value: Expr, index: Sequence[int]) -> Expr:
    """Lanes of `value` in the order of `index` (constants)."""
    return tirx.Shuffle([value], [tirx.IntImm("int32", i) for i in index])


def shuffle2(a: Expr, b: Expr, index: Sequence[int]) -> Expr:
    """Lanes of the concatenation of `a` and `b` in the order of `index` (constants)."""
    return tirx.Shuffle([a, b], [tirx.IntImm("int32", i) for i in index])


def lane(value: Expr, index: int = 0) -> Expr:
    """One lane as a scalar."""
    return shuffle(value, [index])


def tree(values: Sequence[Expr], op: Callable[[Expr, Expr], Expr]) -> Expr:
    """Reduce vectors pairwise, neighbors first: a fixed order of few dependent steps."""
    level = list(values)
    while len(level) > 1:
        pairs = [T.Bind(op(level[i], level[i + 1])) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) // 2 * 2 :]
    return level[0]


def across(value: Expr, op: Callable[[Expr, Expr], Expr]) -> Expr:
    """Reduce the lanes of a vector by butterflies at distance 8, 4, 2, 1; every lane of the result holds the total."""
    lanes = lanes_of(value)
    distance = lanes // 2
    while distance:
        moved = shuffle(value, [i ^ distance for i in range(lanes)])
        value = T.Bind(op(value, moved))
        distance //= 2
    return keep(value)


def sum_across(value: Expr) -> Expr:
    """Sum of the lanes, in every lane. The order is that of `across_reference`."""
    return across(value, operator.add)


def max_across(value: Expr) -> Expr:
    """Largest lane, in every lane."""
    return across(value, T.max)


def horner(coefficients: Sequence[float], x: Expr) -> Expr:
    """Polynomial by fused multiply-adds, highest power first."""
    lanes = lanes_of(x)
    first, *rest = coefficients
    return reduce(lambda p, c: T.Bind(fma(p, x, f32(c, lanes))), rest, f32(first, lanes))
