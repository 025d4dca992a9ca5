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
from khtst_compile.exact import across_reference, fma_reference
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.quantize import Quantizer, RowQuantizer
from khtst_compile.targets.kernels.rows import (
    LEAD2,
    Arguments,
    Lead,
    Phase,
    Place,
    Source,
    each_vector,
    fixed,
    for_rows,
    load,
    only,
    round_up,
    save,
)
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    Floats,
    f32,
    fma,
    keep,
    lane,
    mul,
    rounded,
    small,
    span,
    splat,
    sqrt,
    store,
    sum_across,
)

_ACCUMULATORS = 4


@dataclass(frozen=True)
class Lookup:
    """One table whose rows are added up. rows: of the table; shared: ids are of 1 in all leading dimensions but the last.

    dtype: of the ids, "int64" or "int32". An id outside the table reads its first or last row.
    """

    rows: int
    shared: bool = False
    dtype: str = "int64"


@dataclass(frozen=True)
class NormQuantize:
    """The kernel norm_quantize(x, [residual], [gamma], [beta], inputs of each quantizer) -> [sum], [y], codes, scale, ..

    x, residual, sum, y:  (lead.., width) float32
    gamma, beta:          (width,) float32
    per quantizer:        inputs and outputs as in `QuantizeRows`, suffixed 0, 1, ..
    with lookups, in the place of x: ids0, ids1, .. (lead..) and then table0, .. (rows, width); x is ((t0 + t1) + t2), rounded each time

    kind:        "layer" or "rms".
    residual:    add a second input first.
    gamma, beta: whether these are given.
    sum_out:     h is an output.
    y_out:       y is an output.
    quantizers:  any number, each quantises y.
    lookups:     tables x is the sum of, or () for x itself.
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
    lookups: tuple[Lookup, ...] = ()
    name: str = "norm_quantize"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise LoweringError(f"{self.name}: normalises over {self.width} features; needed at least 1")
        if self.kind not in ("layer", "rms"):
            raise LoweringError(f"{self.name}: kind '{self.kind}'; needed 'layer' or 'rms'")
        if not (self.sum_out or self.y_out or self.quantizers):
            raise LoweringError(f"{self.name}: no output is asked for; needed sum_out, y_out or a quantizer")
        if self.residual and self.lookups:
            raise LoweringError(f"{self.name}: both a residual and lookups; add the residual outside")
        for quantizer in self.quantizers:
            quantizer.check(self.width, self.name)


@lru_cache(maxsize=32)  # layers of one shape share it
def prim_func(spec: NormQuantize) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = _arguments(spec)
        rows, flat = args.flatten()
        norm = _RowNorm(spec, flat, args.dims[-1])
        quantizers = [
            RowQuantizer(spec.isa, q, spec.width, flat, norm.again if i else norm.values, "read" if i else "light", str(i))
            for i, q in enumerate(spec.quantizers)
        ]
        scratch, phases = dict(norm.scratch), norm.phases()
        for quantizer in quantizers:
            scratch |= quantizer.scratch
            phases += quantizer.phases()
        for_rows(rows, spec.width, scratch, spec.parallel, phases)
    return builder.get()


def _arguments(spec: NormQuantize) -> Arguments:
    args = Arguments(spec.lead.dims())
    for i, lookup in enumerate(spec.lookups):
        args.rows(f"ids{i}", None, lookup.dtype, lookup.shared)
    for i, lookup in enumerate(spec.lookups):
        args.matrix(f"table{i}", lookup.rows, spec.width)
    if not spec.lookups:
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


def row_sum(width: int, value: Source, add: Callable[[Expr, Expr], Expr]) -> Expr:
    """Sum over a row (a scalar) in the order of the module docstring; add(total, value) accumulates 16 lanes."""
    totals = [small() for _ in range(_ACCUMULATORS)]
    for total in totals:
        store(total, f32(0.0), 0)
    turn = 0

    def body(off: Expr, valid: int) -> None:
        nonlocal turn
        total = totals[turn % _ACCUMULATORS]
        store(total, add(total[span(0)], value(off, valid, LANES)), 0)
        turn += 1

    each_vector(width, body, unroll=_ACCUMULATORS)
    a, b, c, d = (T.Bind(total[span(0)]) for total in totals)
    return T.Bind(lane(sum_across(keep((a + b) + (c + d)))))


@dataclass(frozen=True)
class _RowNorm:
    """The phases of a row's norm: what it sums to, then its values, which the first quantizer reads as they are made."""

    spec: NormQuantize
    flat: dict[str, Expr]
    length: Expr

    @property
    def scratch(self) -> dict[str, int]:
        """Mean and 1 / standard deviation of a row; h and y where they are read again and are no outputs."""
        spec, wide = self.spec, round_up(self.spec.width)
        own_h, own_y = self._makes_h and not spec.sum_out, len(spec.quantizers) > 1 and not spec.y_out
        return {"mean": 1, "rstd": 1} | ({"h": wide} if own_h else {}) | ({"y": wide} if own_y else {})

    @property
    def _makes_h(self) -> bool:
        """Whether h is computed rather than read."""
        return self.spec.residual or bool(self.spec.lookups)

    def phases(self) -> list[Phase]:
        """Everything before the quantizers."""
        spec = self.spec
        if not (spec.y_out or spec.quantizers):
            return [self._sum_only]
        return [
            *([self._mean] if spec.kind == "layer" else []),
            self._deviation,
            *([] if spec.quantizers else [self._values_only]),
        ]

    def values(self, place: Place) -> Source:
        """y, written where anything else reads it."""
        spec, flat = self.spec, self.flat
        centered, rstd = self._centered(place), T.Bind(place.scratch["rstd"][place.slot])

        def value(off: Expr, valid: int, lanes: int) -> Expr:
            y = mul(centered(off, valid, lanes), T.Bind(splat(rstd, lanes)))
            if spec.gamma:
                gamma = load(flat["gamma"], off, valid, lanes)
                y = fma(y, gamma, load(flat["beta"], off, valid, lanes)) if spec.beta else mul(y, gamma)
            elif spec.beta:
                y = y + load(flat["beta"], off, valid, lanes)
            y = T.Bind(y)
            buffer, start = self._kept("y", place)
            if buffer is not None:
                save(buffer, y, start + off, valid)
            return y

        return value

    def again(self, place: Place) -> Source:
        """y, once `values` has been read."""
        buffer, start = self._kept("y", place)
        return lambda off, valid, lanes: load(buffer, start + off, valid, lanes)

    def _kept(self, name: str, place: Place) -> tuple[Expr, Expr]:
        """(buffer, where the row starts) of h or y; (None, ..) for y where nothing reads it again."""
        scratch = place.scratch.get(name)
        if scratch is not None:
            return scratch, T.Bind(place.slot * round_up(self.spec.width))
        output = {"h": "sum" if self.spec.sum_out else "x", "y": "y"}[name]
        return self.flat.get(output), T.Bind(place.row * self.spec.width)

    def _summed(self, place: Place) -> Source:
        """h, written where it is a sum or an output."""
        spec, flat, start = self.spec, self.flat, T.Bind(place.row * self.spec.width)
        buffer, at = self._kept("h", place)
        terms = [("x", start), *([("residual", start)] if spec.residual else [])]
        if spec.lookups:
            terms = [(f"table{i}", self._table_row(i, place)) for i in range(len(spec.lookups))]

        def value(off: Expr, valid: int, lanes: int) -> Expr:
            h, *rest = (load(flat[name], first + off, valid, lanes) for name, first in terms)
            for more in rest:
                h = T.Bind(rounded(h + more))
            if self._makes_h or spec.sum_out:
                save(buffer, h, at + off, valid)
            return h

        return value

    def _table_row(self, number: int, place: Place) -> Expr:
        """Where the row of table `number` that this place looks up begins."""
        lookup = self.spec.lookups[number]
        at = place.row % self.length if lookup.shared else place.row
        found = T.cast(self.flat[f"ids{number}"][at], "int64")
        return T.Bind(fixed(T.max(T.min(found, T.int64(lookup.rows - 1)), T.int64(0))) * self.spec.width)

    def _centered(self, place: Place) -> Source:
        """h less its mean, once h is written."""
        buffer, start = self._kept("h", place)
        mean = T.Bind(place.scratch["mean"][place.slot]) if self.spec.kind == "layer" else None

        def value(off: Expr, valid: int, lanes: int) -> Expr:
            h = load(buffer, start + off, valid, lanes)
            return h if mean is None else T.Bind(only(h - T.Bind(splat(mean, lanes)), valid))

        return value

    def _sum_only(self, place: Place) -> None:
        value = self._summed(place)

        def one(off: Expr, valid: int) -> None:
            value(off, valid, LANES)

        each_vector(self.spec.width, one)

    def _values_only(self, place: Place) -> None:
        value = self.values(place)

        def one(off: Expr, valid: int) -> None:
            value(off, valid, LANES)

        each_vector(self.spec.width, one)

    def _mean(self, place: Place) -> None:
        total = row_sum(self.spec.width, self._summed(place), lambda total, v: total + v)
        T.buffer_store(place.scratch["mean"], total / T.float32(self.spec.width), [place.slot])

    def _deviation(self, place: Place) -> None:
        values = self._centered(place) if self.spec.kind == "layer" else self._summed(place)
        square = row_sum(self.spec.width, values, lambda total, v: fma(v, v, total))
        variance = T.Bind(rounded(square / T.float32(self.spec.width)))
        deviation = sqrt(T.Bind(rounded(variance + T.float32(float(np.float32(self.spec.eps))))))
        T.buffer_store(place.scratch["rstd"], T.float32(1.0) / deviation, [place.slot])


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
        mean = row_sum_reference(h, lambda total, v: total + v) / width if spec.kind == "layer" else None
        centered = h if mean is None else h - mean
        square = row_sum_reference(centered, lambda total, v: fma_reference(v, v, total))
        rstd = np.float32(1) / np.sqrt(square / width + np.float32(spec.eps))
        y = centered * rstd
        if gamma is not None:
            y = y * gamma if beta is None else fma_reference(y, gamma, beta)
        elif beta is not None:
            y = y + beta
    return h, y.astype(np.float32)


def row_sum_reference(values: Floats, add: Callable[[Floats, Floats], Floats]) -> Floats:
    """values (..., D) -> (..., 1), in the kernel's order."""
    padded = np.zeros((*values.shape[:-1], round_up(values.shape[-1])), np.float32)
    padded[..., : values.shape[-1]] = values
    totals = [np.zeros((*values.shape[:-1], LANES), np.float32) for _ in range(_ACCUMULATORS)]
    for i in range(padded.shape[-1] // LANES):
        slot = i % _ACCUMULATORS
        totals[slot] = add(totals[slot], padded[..., LANES * i : LANES * (i + 1)])
    a, b, c, d = totals
    return across_reference((a + b) + (c + d), np.add)[..., :1]
