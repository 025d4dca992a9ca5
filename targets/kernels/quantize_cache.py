"""Keys and values of new positions to int8 codes in the layout of a cache, a scale for each position and head.

For every head h of K and of V, D features from column offset + h * D on:

    a = max(max |x|, 1e-30),  inv = 127 / a,  scale = a / 127
    code = roundeven(x * inv)

as in `quantize.py`, but the codes are int8 on every target: they leave the program, and another CPU may go on with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels.attention_spec import Operand
from khtst_compile.targets.kernels.quantize import LEVELS, PER_ROW, largest, new_peak, reference_codes, rounded_codes, track
from khtst_compile.targets.kernels.rows import Phase, Place, each_vector, for_rows, load, save
from khtst_compile.targets.kernels.vec import LANES, Expr, Floats, splat

_TENSORS = ("k", "v")


@dataclass(frozen=True)
class QuantizeCache:
    """The kernel quantize_cache(k, v) -> codes_k, codes_v, scales.

    k, v:       (batch, seq, row) float32, heads side by side from a column on; may be the same tensor
    codes_*:    (seq, batch, kv_heads * head_dim) int8
    scales:     (seq, batch, 2 * kv_heads) float32, of the heads of k, then of v

    batch:  where it is static.
    """

    k: Operand
    v: Operand
    kv_heads: int
    head_dim: int
    batch: int | None = None
    name: str = "quantize_cache"
    parallel: bool = True

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.head_dim) < 1:
            raise LoweringError(f"{self.name}: {self.kv_heads} heads of {self.head_dim} features; needed at least 1 of 1")
        for what, operand in zip(_TENSORS, (self.k, self.v), strict=True):
            if operand.offset < 0 or operand.offset + self.width > operand.row:
                raise LoweringError(
                    f"{self.name}: {what} needs {self.width} columns from {operand.offset} on, its rows have {operand.row}"
                )

    @property
    def width(self) -> int:
        """Features of a position."""
        return self.kv_heads * self.head_dim


def prim_func(spec: QuantizeCache) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        batch = tirx.Var("b", "int64") if spec.batch is None else T.int64(spec.batch)
        seq = tirx.Var("s", "int64")
        shapes = {
            "k": ([batch, seq, T.int64(spec.k.row)], "float32"),
            "v": ([batch, seq, T.int64(spec.v.row)], "float32"),
            "codes_k": ([seq, batch, T.int64(spec.width)], "int8"),
            "codes_v": ([seq, batch, T.int64(spec.width)], "int8"),
            "scales": ([seq, batch, T.int64(2 * spec.kv_heads)], "float32"),
        }
        declared = {name: T.arg(name, T.buffer(dims, dtype)) for name, (dims, dtype) in shapes.items()}
        rows = T.Bind(batch * seq)
        flat = {name: T.decl_buffer((rows * dims[2],), dtype, data=declared[name].data) for name, (dims, dtype) in shapes.items()}

        def position(place: Place) -> Expr:
            return T.Bind(place.row % seq * batch + place.row // seq)

        phases = _phases(spec, flat, position)
        for_rows(rows, 2 * spec.width, {"inverse": 2 * spec.kv_heads}, spec.parallel, phases)
    return builder.get()


def _phases(spec: QuantizeCache, flat: dict[str, Expr], position: Callable[[Place], Expr]) -> list[Phase]:
    """position(place): the row of the results in which a place's go."""
    heads = 2 * spec.kv_heads

    def scales(place: Place) -> None:
        out = T.Bind(position(place) * heads)
        for at, (name, operand) in enumerate(zip(_TENSORS, (spec.k, spec.v), strict=True)):
            begin = T.Bind(place.row * operand.row + operand.offset)
            with T.serial(T.int64(0), T.int64(spec.kv_heads)) as head:
                peak = new_peak()
                start = T.Bind(begin + head * spec.head_dim)

                def look(off: Expr, valid: int, name: str = name, start: Expr = start, peak: Expr = peak) -> None:
                    track(peak, load(flat[name], start + off, valid))

                each_vector(spec.head_dim, look)
                amax = largest(peak)
                place_of_head = T.Bind(head + at * spec.kv_heads)
                T.buffer_store(flat["scales"], amax / T.float32(LEVELS), [out + place_of_head])
                T.buffer_store(place.scratch["inverse"], T.float32(LEVELS) / amax, [place.slot * heads + place_of_head])

    def codes(place: Place) -> None:
        out = T.Bind(position(place) * spec.width)
        for at, (name, operand) in enumerate(zip(_TENSORS, (spec.k, spec.v), strict=True)):
            begin = T.Bind(place.row * operand.row + operand.offset)
            with T.serial(T.int64(0), T.int64(spec.kv_heads)) as head:
                inverse = T.Bind(splat(place.scratch["inverse"][place.slot * heads + at * spec.kv_heads + head]))
                first = T.Bind(head * spec.head_dim)

                def piece(
                    off: Expr, valid: int, name: str = name, begin: Expr = begin, first: Expr = first, inverse: Expr = inverse
                ) -> None:
                    whole = rounded_codes(load(flat[name], begin + first + off, valid), inverse)
                    save(flat[f"codes_{name}"], T.Bind(T.cast(whole, f"int8x{LANES}")), out + first + off, valid)

                each_vector(spec.head_dim, piece)

    return [scales, codes]


def reference(spec: QuantizeCache, k: Floats, v: Floats) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8], Floats]:
    """What the kernel computes, to the bit."""
    codes, scales = [], []
    for t, operand in ((k, spec.k), (v, spec.v)):
        part = t[..., operand.offset : operand.offset + spec.width]
        heads = part.reshape(*t.shape[:2], spec.kv_heads, spec.head_dim).swapaxes(0, 1)
        found, scale = reference_codes(PER_ROW, heads)
        codes.append(found.astype(np.int8).reshape(*heads.shape[:2], spec.width))
        scales.append(scale)
    return codes[0], codes[1], np.concatenate(scales, -1)
