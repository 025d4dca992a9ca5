"""Rotary position embedding of all heads of a row, after an RMSNorm of each head where there is one: one pass, no copies.

h = x[offset + head * D ..]                       D features of a head
h = gamma * (h * rstd),  rstd = 1 / sqrt(sum(h^2) / D + eps)    with a norm; the sum's order is that of `norm`
y[j]         = fma(-h[j + D/2], sin[j],         h[j] * cos[j])          j < D/2
y[j + D/2]   = fma( h[j],       sin[j + D/2],   h[j + D/2] * cos[j + D/2])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.exact import fma_reference
from khtst_compile.targets.kernels.norm import row_sum, row_sum_reference
from khtst_compile.targets.kernels.rows import LEAD2, Arguments, Lead, Place, each_vector, for_rows, load, save
from khtst_compile.targets.kernels.vec import Expr, Floats, f32, fma, lanes_of, mul, rounded, splat, sqrt


@dataclass(frozen=True)
class Rotary:
    """The kernel rotary(x, cos, sin, [gamma]) -> y.

    x:         (lead.., columns) float32, heads side by side from column `offset`
    cos, sin:  (lead.., head_dim), or with per_length (1, .., length, head_dim): the same for every batch
    gamma:     (head_dim,), if norm
    y:         (lead.., heads * head_dim)

    eps: of the norm.
    """

    columns: int
    heads: int
    head_dim: int
    offset: int = 0
    per_length: bool = True
    norm: bool = False
    eps: float = 0.0
    lead: Lead = LEAD2
    name: str = "rotary"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise LoweringError(f"{self.name}: heads of {self.head_dim} features; needed an even number of them")
        if self.offset < 0 or self.offset + self.heads * self.head_dim > self.columns:
            raise LoweringError(
                f"{self.name}: {self.heads} heads of {self.head_dim} from column {self.offset} in {self.columns} columns; "
                "needed room for all of them"
            )


def prim_func(spec: Rotary) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    width = spec.heads * spec.head_dim
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("x", spec.columns)
        for name in ("cos", "sin"):
            args.rows(name, spec.head_dim, shared=spec.per_length)
        if spec.norm:
            args.vector("gamma", spec.head_dim)
        args.rows("y", width)
        rows, flat = args.flatten()

        def one(place: Place) -> None:
            position = place.row % args.dims[-1] if spec.per_length else place.row
            angle = T.Bind(position * spec.head_dim)
            start, out = T.Bind(place.row * spec.columns + spec.offset), T.Bind(place.row * width)
            with T.serial(T.int64(0), T.int64(spec.heads)) as head:
                _turn(spec, flat, T.Bind(start + head * spec.head_dim), angle, T.Bind(out + head * spec.head_dim))

        for_rows(rows, width, {}, spec.parallel, [one])
    return builder.get()


def _turn(spec: Rotary, flat: dict[str, Expr], start: Expr, angle: Expr, out: Expr) -> None:
    """One head, from x[start..] to y[out..]."""
    rstd = None
    if spec.norm:
        square = row_sum(
            spec.head_dim,
            lambda off, valid, lanes: load(flat["x"], start + off, valid, lanes),
            lambda total, v: fma(v, v, total),
        )
        variance = T.Bind(rounded(square / T.float32(spec.head_dim)))
        rstd = T.Bind(T.float32(1.0) / sqrt(T.Bind(rounded(variance + T.float32(float(np.float32(spec.eps)))))))
    half = spec.head_dim // 2

    def read(off: Expr, valid: int) -> Expr:
        h = load(flat["x"], start + off, valid)
        return h if rstd is None else T.Bind(mul(mul(h, splat(rstd)), load(flat["gamma"], off, valid)))

    def piece(off: Expr, valid: int) -> None:
        low, high = read(off, valid), read(off + half, valid)
        (cos, cos_high), (sin, sin_high) = (
            tuple(load(flat[name], angle + at, valid) for at in (off, off + half)) for name in ("cos", "sin")
        )
        save(flat["y"], T.Bind(fma(f32(-0.0, lanes_of(high)) - high, sin, mul(low, cos))), out + off, valid)
        save(flat["y"], T.Bind(fma(low, sin_high, mul(high, cos_high))), out + half + off, valid)

    each_vector(half, piece)


def reference(spec: Rotary, x: Floats, cos: Floats, sin: Floats, gamma: Floats | None = None) -> Floats:
    """What the kernel computes, to the bit: x (batch, length, columns), cos and sin (batch or 1, length, head_dim)."""
    h = x[..., spec.offset : spec.offset + spec.heads * spec.head_dim].reshape(*x.shape[:-1], spec.heads, spec.head_dim)
    if gamma is not None:
        square = row_sum_reference(h, lambda total, v: fma_reference(v, v, total))
        rstd = np.float32(1) / np.sqrt(square / np.float32(spec.head_dim) + np.float32(spec.eps))
        h = h * rstd * gamma
    cos, sin, half = cos[..., None, :], sin[..., None, :], spec.head_dim // 2
    low, high = h[..., :half], h[..., half:]
    first = fma_reference(-high, sin[..., :half], low * cos[..., :half])
    second = fma_reference(low, sin[..., half:], high * cos[..., half:])
    return np.concatenate([first, second], -1).reshape(*x.shape[:-1], spec.heads * spec.head_dim)
