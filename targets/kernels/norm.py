"""LayerNorm and RMSNorm over the last dimension, with the residual sum before and the quantizers after in the same kernel.

    h = x (+ residual)
    layer:  mean = sum(h) / D,  var = sum((h - mean)^2) / D,  y = fma((h - mean) * rstd, gamma, beta)
    rms:    var = sum(h^2) / D,                               y = gamma * (h * rstd)        as in Hugging Face's Llama
    rstd = 1 / sqrt(var + eps)

Two passes over a row that stays in the L1 cache. Sums run over 4 accumulators of 16 lanes, vector i going to accumulator
i % 4, then ((0 + 1) + (2 + 3)), then the tree of `vec.across`: one fixed order, so the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.quantize import Quantizer, RowQuantizer
from khtst_compile.targets.kernels.rows import LEAD2, Arguments, Lead, each_vector, for_rows, load, only, round_up, save
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    Floats,
    across_reference,
    f32,
    fma,
    fma_reference,
    keep,
    mul,
    rounded,
    small,
    span,
    sqrt,
    store,
    sum_across,
)

_ACCUMULATORS = 4


@dataclass(frozen=True)
class NormQuantize:
    """The kernel norm_quantize(x, [residual], [gamma], [beta], inputs of each quantizer) -> [sum], [y], codes, scale, ..

    x, residual, sum, y:  (lead.., width) float32
    gamma, beta:          (width,) float32
    per quantizer:        inputs and outputs as in `QuantizeRows`, suffixed 0, 1, ..

    kind:        "layer" or "rms".
    residual:    add a second input first.
    gamma, beta: whether these are given.
    sum_out:     h is an output.
    y_out:       y is an output.
    quantizers:  any number, each quantises y.
    """

    isa: Isa
    width: int
    eps: float
    kind: str = "layer"
    lead: Lead = LEAD2
    residual: bool = False
    gamma: bool = True
    beta: bool = True
    sum_out: bool = False
    y_out: bool = True
    quantizers: tuple[Quantizer, ...] = ()
    name: str = "norm_quantize"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise LoweringError(f"{self.name}: normalises over {self.width} features; needed at least 1")
        if self.kind not in ("layer", "rms"):
            raise LoweringError(f"{self.name}: kind '{self.kind}'; needed 'layer' or 'rms'")
        if not (self.sum_out or self.y_out or self.quantizers):
            raise LoweringError(f"{self.name}: no output is asked for; needed sum_out, y_out or a quantizer")
        for quantizer in self.quantizers:
            quantizer.check(self.width, self.name)


@lru_cache(maxsize=32)  # layers of one shape share it
def prim_func(spec: NormQuantize) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        rows, flat = _arguments(spec).flatten()
        quantizers = [RowQuantizer(spec.isa, q, spec.width, flat, str(i)) for i, q in enumerate(spec.quantizers)]
        # Scratch: h where it can be read nowhere else, y, and the quantizers' t.
        own_h, own_y = spec.residual and not spec.sum_out, bool(quantizers) and not spec.y_out
        own_t = any(q.needs_scratch for q in quantizers)

        def one(row: Expr, scratch: list[Expr]) -> None:
            left = list(scratch)
            start = T.Bind(row * spec.width)
            h = (left.pop(0), T.int64(0)) if own_h else (flat["sum" if spec.sum_out else "x"], start)
            y = (left.pop(0), T.int64(0)) if own_y else (flat.get("y"), start)
            t = left.pop(0) if own_t else None
            _normalize(spec, flat, start, h, y if spec.y_out or quantizers else None)
            for quantizer in quantizers:
                quantizer.emit(row, lambda off, valid: load(y[0], y[1] + off, valid), t)

        count = int(own_h) + int(own_y) + int(own_t)
        for_rows(rows, spec.width, (round_up(spec.width),) * count, spec.parallel, one)
    return builder.get()


def _arguments(spec: NormQuantize) -> Arguments:
    args = Arguments(spec.lead.dims())
    args.rows("x", spec.width)
    if spec.residual:
        args.rows("residual", spec.width)
    if spec.gamma:
        args.vector("gamma", spec.width)
    if spec.beta:
        args.vector("beta", spec.width)
    for i, quantizer in enumerate(spec.quantizers):
        quantizer.declare_inputs(args, spec.width, str(i))
    if spec.sum_out:
        args.rows("sum", spec.width)
    if spec.y_out:
        args.rows("y", spec.width)
    for i, quantizer in enumerate(spec.quantizers):
        quantizer.declare_outputs(args, spec.isa, spec.width, str(i))
    return args


def _sum(width: int, value: Callable[[Expr, int], Expr], add: Callable[[Expr, Expr], Expr]) -> Expr:
    """Sum over a row in the order of the module docstring; add(total, value) accumulates 16 lanes."""
    totals = [small() for _ in range(_ACCUMULATORS)]
    for total in totals:
        store(total, f32(0.0), 0)
    turn = 0

    def body(off: Expr, valid: int) -> None:
        nonlocal turn
        total = totals[turn % _ACCUMULATORS]
        store(total, add(total[span(0)], value(off, valid)), 0)
        turn += 1

    each_vector(width, body, unroll=_ACCUMULATORS)
    a, b, c, d = (T.Bind(total[span(0)]) for total in totals)
    return sum_across(keep((a + b) + (c + d)))


def _normalize(spec: NormQuantize, flat: dict[str, Expr], start: Expr, h: tuple[Expr, Expr], y: tuple[Expr, Expr] | None) -> None:
    """One row: h (buffer, offset) is written where it is a sum, y is written unless None."""
    width = spec.width
    mean: Expr = None

    def summed(off: Expr, valid: int) -> Expr:
        value = load(flat["x"], start + off, valid)
        if spec.residual:
            value = T.Bind(rounded(value + load(flat["residual"], start + off, valid)))
        if spec.residual or spec.sum_out:
            save(h[0], value, h[1] + off, valid)
        return value

    def centered(off: Expr, valid: int) -> Expr:
        value = load(h[0], h[1] + off, valid)
        return value if mean is None else T.Bind(only(value - mean, valid))

    def only_sum(off: Expr, valid: int) -> None:
        summed(off, valid)

    if y is None:
        each_vector(width, only_sum)
        return
    if spec.kind == "layer":
        mean = T.Bind(_sum(width, summed, lambda total, v: total + v) / f32(width))
        square = _sum(width, centered, lambda total, v: fma(v, v, total))
    else:
        square = _sum(width, summed, lambda total, v: fma(v, v, total))
    rstd = T.Bind(f32(1.0) / sqrt(rounded(square / f32(width)) + f32(spec.eps)))

    def scaled(off: Expr, valid: int) -> None:
        value = T.Bind(mul(centered(off, valid), rstd))
        if spec.gamma:
            gamma = load(flat["gamma"], off, valid)
            value = fma(value, gamma, load(flat["beta"], off, valid)) if spec.beta else mul(value, gamma)
        elif spec.beta:
            value = value + load(flat["beta"], off, valid)
        save(y[0], T.Bind(value), y[1] + off, valid)

    each_vector(width, scaled)


def reference(
    spec: NormQuantize,
    x: Floats,
    residual: Floats | None = None,
    gamma: Floats | None = None,
    beta: Floats | None = None,
) -> tuple[Floats, Floats]:
    """What the kernel computes, to the bit: x (..., D) float32 -> h, y (..., D) float32. Codes: `quantize.reference` of y."""
    with np.errstate(all="ignore"):
        h = x if residual is None else x + residual
        width = np.float32(spec.width)
        mean = _sum_reference(h, lambda total, v: total + v) / width if spec.kind == "layer" else None
        centered = h if mean is None else h - mean
        square = _sum_reference(centered, lambda total, v: fma_reference(v, v, total))
        rstd = np.float32(1) / np.sqrt(square / width + np.float32(spec.eps))
        y = centered * rstd
        if gamma is not None:
            y = y * gamma if beta is None else fma_reference(y, gamma, beta)
        elif beta is not None:
            y = y + beta
    return h, y.astype(np.float32)


def _sum_reference(values: Floats, add: Callable[[Floats, Floats], Floats]) -> Floats:
    """values (..., D) -> (..., 1), in the kernel's order."""
    padded = np.zeros((*values.shape[:-1], round_up(values.shape[-1])), np.float32)
    padded[..., : values.shape[-1]] = values
    totals = [np.zeros((*values.shape[:-1], LANES), np.float32) for _ in range(_ACCUMULATORS)]
    for i in range(padded.shape[-1] // LANES):
        slot = i % _ACCUMULATORS
        totals[slot] = add(totals[slot], padded[..., LANES * i : LANES * (i + 1)])
    a, b, c, d = totals
    return across_reference((a + b) + (c + d), np.add)[..., :1]
