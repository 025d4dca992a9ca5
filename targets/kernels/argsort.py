"""The order that sorts each row, by merging: runs of 1, 2, 4, ... elements, each pair of neighbors into one.

Equal elements keep their order, and NaN is the largest, as in torch. TVM's own operator calls a library that a device does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels.rows import PARALLEL_ELEMENTS, Arguments, Lead
from khtst_compile.targets.kernels.vec import Expr

DTYPES = ("float32", "float64", "int64", "int32", "int8", "uint8")
LEAD1 = Lead(1)
LONGEST = 31  # rows have less than 2^31 elements


@dataclass(frozen=True)
class Argsort:
    """The kernel argsort(x) -> order.

    x:      (lead.., length) of `dtype`
    order:  (lead.., length) int64, the place in the row of each element of the sorted row

    descending: largest first. length: symbolic where it is None.
    """

    dtype: str = "float32"
    descending: bool = False
    lead: Lead = LEAD1
    length: int | None = None
    name: str = "argsort"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LoweringError(f"{self.name}: elements are {self.dtype}; needed: one of {', '.join(DTYPES)}; cast them first")


def prim_func(spec: Argsort) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        length = tirx.Var("n", "int64") if spec.length is None else T.int64(spec.length)
        arguments = Arguments(spec.lead.dims())
        arguments.rows("x", length, spec.dtype)
        arguments.rows("order", length, "int64")
        rows, flat = arguments.flatten()
        if not spec.parallel:
            with T.serial(T.int64(0), rows) as row:
                _row(spec, flat["x"], flat["order"], T.Bind(row * length), length)
        else:
            with T.If(rows * length >= PARALLEL_ELEMENTS):
                with T.Then(), T.parallel(T.int64(0), rows) as row:
                    _row(spec, flat["x"], flat["order"], T.Bind(row * length), length)
                with T.Else(), T.serial(T.int64(0), rows) as row:
                    _row(spec, flat["x"], flat["order"], T.Bind(row * length), length)
    return builder.get()


def _row(spec: Argsort, x: Expr, order: Expr, start: Expr, length: Expr) -> None:
    """The order of the row that begins at `start`."""
    merged = T.alloc_buffer((length,), "int64", scope="global")
    left, right = (T.alloc_buffer((1,), "int64", scope="global") for _ in range(2))
    with T.serial(T.int64(0), length) as i:
        T.buffer_store(order, i, [start + i])
    with T.serial(T.int64(0), T.int64(LONGEST)) as step:
        run = T.Bind(T.shift_left(T.int64(1), step))
        with T.If(run < length), T.Then():
            with T.serial(T.int64(0), T.ceildiv(length, 2 * run)) as pair:
                begin = T.Bind(pair * 2 * run)
                middle = T.Bind(T.min(begin + run, length))
                end = T.Bind(T.min(begin + 2 * run, length))
                T.buffer_store(left, begin, [0])
                T.buffer_store(right, middle, [0])
                with T.serial(T.int64(0), end - begin) as k:
                    # A side that is used up is read at its last element, and then not taken.
                    first = T.Bind(order[start + T.min(left[0], middle - 1)])
                    second = T.Bind(order[start + T.min(right[0], end - 1)])
                    sooner = _before(spec, T.Bind(x[start + second]), T.Bind(x[start + first]))
                    take = T.Bind(T.Or(left[0] == middle, T.And(right[0] < end, sooner)))
                    T.buffer_store(merged, T.Select(take, second, first), [begin + k])
                    T.buffer_store(right, right[0] + T.cast(take, "int64"), [0])
                    T.buffer_store(left, left[0] + (T.int64(1) - T.cast(take, "int64")), [0])
            with T.serial(T.int64(0), length) as i:
                T.buffer_store(order, merged[i], [start + i])


def _before(spec: Argsort, a: Expr, b: Expr) -> Expr:
    """Whether `a` goes before `b`; not where they are equal."""
    low, high = (b, a) if spec.descending else (a, b)
    less = low < high
    if not spec.dtype.startswith("float"):
        return less
    return T.Or(less, T.And(T.isnan(high), T.Not(T.isnan(low))))


def reference(spec: Argsort, x: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """What the kernel computes. x: (..., length)."""
    # Descending is the reverse of sorting the reversed row: equal elements keep their order.
    order: npt.NDArray[np.int64] = np.argsort(x[..., ::-1] if spec.descending else x, axis=-1, kind="stable")
    return x.shape[-1] - 1 - order[..., ::-1] if spec.descending else order
