"""Softmax over the last dimension, and the exponential it shares with attention.

    p = exp(x - max x),  softmax = p * (1 / sum p)

The maximum is exact in any order. The sum adds 16-lane vectors in their order and then runs the tree of `vec.across`, so the
bits are the same on every machine. A row of -inf comes out as NaN, as in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.exact import (
    EXP2,
    EXP2_LOWEST,
    EXP2_ROUND,
    LOG2_E,
    exp_nonpositive_reference,
    padded,
    sum_reference,
)
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.rows import LEAD2, Arguments, Lead, Place, for_rows
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    Floats,
    across,
    at_least,
    bits,
    f32,
    from_bits,
    horner,
    i32,
    keep,
    mul,
    rounded,
    small,
    span,
    store,
    sum_across,
)


def exp_nonpositive(x: Expr) -> Expr:
    """e^x for x <= 0 (16 float32 lanes), as 2^(x * log2(e)); 0 from x <= -88.03 on, -inf included. NaN stays NaN.

    Relative error <= 1.7e-7 + |x| * 7.4e-8: the product and log2(e) are rounded.
    """
    return exp2_nonpositive(mul(x, f32(LOG2_E)))


def exp2_nonpositive(x: Expr) -> Expr:
    """2^x for x <= 0 (16 float32 lanes): 2^r * 2^n with n + r = x. Relative error <= 1.7e-7; exact where x is an integer.

    Exactly 0 from x <= -127 on, -inf included: there n = -127 and r = 0, the polynomial is exactly 1, and adding n to its
    exponent field leaves no bit. NaN stays NaN.
    """
    y = T.Bind(at_least(x, f32(EXP2_LOWEST)))
    # Fenced: TVM's simplifier would cancel (y + c) - c.
    shifted = T.Bind(rounded(y + f32(EXP2_ROUND)))
    r = T.Bind(y - T.Bind(shifted - f32(EXP2_ROUND)))
    return T.Bind(from_bits(bits(horner(EXP2, r)) + T.shift_left(bits(shifted), i32(23))))


@dataclass(frozen=True)
class Softmax:
    """The kernel softmax(x) -> y, both (lead.., width) float32.

    width:  length of the last dimension; None for a symbolic one.
    """

    isa: Isa
    width: int | None
    lead: Lead = LEAD2
    name: str = "softmax"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise LoweringError(f"{self.name}: softmax over {self.width} elements; needed at least 1")


_ASSUMED_WIDTH = 256
"""From which chunks are sized when the width is symbolic."""


def prim_func(spec: Softmax) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        width = tirx.Var("width", "int64") if spec.width is None else T.int64(spec.width)
        args = Arguments(spec.lead.dims())
        args.rows("x", width)
        args.rows("y", width)
        rows, flat = args.flatten()

        def one(place: Place) -> None:
            _softmax_row(flat["x"], flat["y"], T.Bind(place.row * width), width)

        for_rows(rows, spec.width or _ASSUMED_WIDTH, {}, spec.parallel, [one])
    return builder.get()


def _softmax_row(x: Expr, y: Expr, start: Expr, width: Expr) -> None:
    full, tail = T.Bind(width // LANES), T.Bind(width % LANES)
    end = T.Bind(start + full * LANES)
    last = small()  # the tail of the row, -inf beyond it
    store(last, f32(-np.inf), 0)
    with T.serial(T.int64(0), tail) as i:
        T.buffer_store(last, x[end + i], [i])
    peak = small()
    store(peak, last[span(0)], 0)
    with T.serial(T.int64(0), full) as j:
        store(peak, T.max(peak[span(0)], x[span(start + j * LANES)]), 0)
    top = T.Bind(across(peak[span(0)], T.max))
    total = small()
    store(total, f32(0.0), 0)

    def power(value: Expr) -> Expr:
        p = exp_nonpositive(T.Bind(value - top))
        store(total, total[span(0)] + p, 0)
        return p

    with T.serial(T.int64(0), full) as j:
        store(y, power(T.Bind(x[span(start + j * LANES)])), start + j * LANES)
    store(last, power(T.Bind(last[span(0)])), 0)
    inverse = T.Bind(f32(1.0) / sum_across(keep(total[span(0)])))
    with T.serial(T.int64(0), full) as j:
        at = T.Bind(start + j * LANES)
        store(y, y[span(at)] * inverse, at)
    store(last, last[span(0)] * inverse, 0)
    with T.serial(T.int64(0), tail) as i:
        T.buffer_store(y, last[i], [end + i])


def reference(x: Floats) -> Floats:
    """What the kernel computes, to the bit, for rows without NaN: x (..., width) float32."""
    with np.errstate(all="ignore"):
        p = exp_nonpositive_reference(padded(x, -np.inf) - x.max(axis=-1, keepdims=True))
        inverse = np.float32(1) / sum_reference(p)
        result: Floats = (p * inverse)[..., : x.shape[-1]]
    return result
