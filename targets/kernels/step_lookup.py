"""Each feature through its own step function, and the number of a row's steps in a mixed radix: FSQ and LFQ.

    digit_j = how many thresholds[j, :] are <= x_j          0 for NaN
    value_j = steps[j, digit_j]                             NaN for NaN
    id = sum over j of digit_j * basis_j                    int32

Comparisons, choices and integer sums alone, so the bits are the same in any order. Thresholds rise, so the last one passed has the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels.rows import LEAD2, Arguments, Lead, Place, each_vector, for_rows, load, round_up, save
from khtst_compile.targets.kernels.vec import LANES, Expr, Floats, f32, i32, lane, small, span, store, sum_across

MOST = 64
"""Steps of a feature."""


@dataclass(frozen=True)
class StepLookup:
    """The kernel step_lookup(x, thresholds, steps, basis) -> values, ids.

    x, values:   (lead.., width) float32
    thresholds:  ((count - 1) * padded width,) float32, one after the other, each for all features; NaN behind the last feature
    steps:       (count * padded width,) float32, likewise; 0 behind the last feature
    basis:       (padded width,) int32, 0 behind the last feature
    ids:         (lead..) int32

    width: features; count: steps of the feature with most. The padded width is a multiple of 16; `pack` makes these arrays.
    """

    width: int
    count: int
    lead: Lead = LEAD2
    name: str = "step_lookup"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.width < 1 or not 2 <= self.count <= MOST:
            raise LoweringError(
                f"{self.name}: {self.width} features of {self.count} steps; needed: at least 1 feature, of 2 to {MOST} steps"
            )

    @cached_property
    def padded(self) -> int:
        """Features, with those that fill the last vector."""
        return round_up(self.width)


def pack(thresholds: Floats, steps: Floats, basis: npt.NDArray[np.int32]) -> tuple[Floats, Floats, npt.NDArray[np.int32]]:
    """thresholds: (d, n - 1), steps: (d, n), basis: (d,) -> the kernel's arrays."""
    extra = (0, -len(basis) % LANES)
    rising = np.pad(thresholds.T, ((0, 0), extra), constant_values=np.nan)
    values = np.pad(steps.T, ((0, 0), extra))
    flat = (np.ascontiguousarray(a, np.float32).reshape(-1) for a in (rising, values))
    return (*flat, np.pad(basis.astype(np.int32), extra))  # type: ignore[return-value]


def prim_func(spec: StepLookup) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("x", spec.width)
        args.vector("thresholds", (spec.count - 1) * spec.padded)
        args.vector("steps", spec.count * spec.padded)
        args.vector("basis", spec.padded, "int32")
        args.rows("values", spec.width)
        args.rows("ids", None, "int32")
        rows, flat = args.flatten()

        def one(place: Place) -> None:
            _row(spec, flat, place.row)

        for_rows(rows, spec.width * spec.count, {}, spec.parallel, [one])
    return builder.get()


def _row(spec: StepLookup, flat: dict[str, Expr], row: Expr) -> None:
    start = T.Bind(row * spec.width)
    total = small(dtype="int32")
    store(total, i32(0, LANES), 0)

    def piece(off: Expr, valid: int) -> None:
        x = load(flat["x"], start + off, valid)
        value, digit = small(), small(dtype="int32")
        store(value, flat["steps"][span(off)], 0)
        store(digit, i32(0, LANES), 0)
        with T.serial(T.int64(0), T.int64(spec.count - 1)) as k:
            at = T.Bind(k * spec.padded + off)
            threshold = T.Bind(flat["thresholds"][span(at)])
            store(value, T.Select(x >= threshold, flat["steps"][span(at + spec.padded)], value[span(0)]), 0)
            store(digit, digit[span(0)] + T.Select(x >= threshold, i32(1, LANES), i32(0, LANES)), 0)
        store(total, total[span(0)] + digit[span(0)] * flat["basis"][span(off)], 0)
        # TVM knows no NaN and takes x == x for true.
        save(flat["values"], T.Select(x >= f32(-np.inf), value[span(0)], f32(np.nan)), start + off, valid)

    each_vector(spec.width, piece)
    T.buffer_store(flat["ids"], lane(sum_across(total[span(0)])), [row])


def reference(x: Floats, thresholds: Floats, steps: Floats, basis: npt.NDArray[np.int32]) -> tuple[Floats, npt.NDArray[np.int32]]:
    """What the kernel computes: x (..., d), thresholds (d, n - 1), steps (d, n), basis (d,) -> values (..., d), ids (...)."""
    digits = (x[..., None] >= thresholds).sum(-1)
    values = np.where(np.isnan(x), np.float32(np.nan), steps[np.arange(x.shape[-1]), digits])
    return values.astype(np.float32), (digits * basis.astype(np.int64)).sum(-1).astype(np.int32)
