"""Quantise rows to int8 codes: activation, smoothing, Hadamard rotation, absolute maximum, codes, all in one kernel.

For a row x of K float32, in this order (every step rounds to float32 once, so torch gives the same bits):

    v = act(x)
    t = v * inv_smooth                                    if smooth
    t = unnormalised Walsh-Hadamard transform, blockwise  if rotation; see `Rotation` for the order of its stages
    dynamic:  a = max(max |t|, 1e-30),  inv = 127 / a,  scale = a / 127
    static:   inv and scale are constants of the whole tensor
    code = roundeven(t * inv), clamped to [-127, 127]

A NaN counts as nothing: it gets code 0 and does not enter the maximum. In a row with an infinity the scale is infinite and
every code is 0, so the row's results come out as NaN and not as plausible numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.act import activation
from khtst_compile.targets.kernels.rotation import Rotation, emit_rotation, rotation_reference
from khtst_compile.targets.kernels.rows import LEAD2, Arguments, Lead, each_vector, for_rows, load, only, round_up
from khtst_compile.targets.kernels.vec import (
    Expr,
    Floats,
    absolute,
    across,
    at_least,
    at_most,
    f32,
    i32,
    lane,
    mul,
    small,
    span,
    splat,
    store,
)

__all__ = ["PER_ROW", "QuantizeRows", "Quantizer", "Rotation", "RowQuantizer", "prim_func", "reference"]

LEVELS = 127
"""Largest code; -128 is not used, so that codes are symmetric."""
FLOOR = np.float32(1e-30)
"""Smallest absolute maximum of a row: a zero row gets zero codes and a finite scale."""


@dataclass(frozen=True)
class Quantizer:
    """What happens between a row of float32 and its codes.

    smooth:    multiply by inv_smooth (K,) first.
    rotation:  the transform applied next, or None.
    static:    scales are constants of the whole tensor instead of one per row.
    """

    smooth: bool = False
    rotation: Rotation | None = None
    static: bool = False

    def check(self, width: int, where: str) -> None:
        """Raise LoweringError when rows of `width` features cannot be rotated."""
        if self.rotation is not None and width % self.rotation.block:
            raise LoweringError(
                f"{where}: rotation block {self.rotation.block} must divide the {width} features; "
                "choose a smaller block or leave the rotation out"
            )

    def declare_inputs(self, args: Arguments, width: int, tag: str) -> None:
        """Declare inv_smooth (K,), then inv (1,) and static_scale (1,), those that this quantizer needs."""
        if self.smooth:
            args.vector(f"inv_smooth{tag}", width)
        if self.static:
            args.vector(f"inv{tag}", 1)
            args.vector(f"static_scale{tag}", 1)

    def declare_outputs(self, args: Arguments, isa: Isa, width: int, tag: str) -> None:
        """Declare codes (lead.., round_up(K, 16)) and scale (lead..)."""
        args.rows(f"codes{tag}", round_up(width), isa.codes_dtype)
        args.rows(f"scale{tag}", None)


PER_ROW = Quantizer()
"""Dynamic, nothing before it."""


def _track(peak: Expr, values: Expr) -> None:
    """Raise the running maxima of |value|; the comparison is false for a NaN, which therefore leaves them as they are."""
    store(peak, T.max(absolute(values), peak[span(0)]), 0)


def emit_codes(isa: Isa, codes: Expr, at: Expr, t: Expr, inv: Expr, static: bool) -> None:
    """Store 16 codes of t * inv. In a dynamic row |t * inv| <= 127 holds by itself; a static one is clamped.

    The conversion turns NaN into the integer -2**31 (x86) or 0 (ARM): either way the narrow code is 0.
    """
    scaled = mul(t, inv)
    if static:
        scaled = T.Bind(at_most(at_least(scaled, f32(-LEVELS)), f32(LEVELS)))
    whole = T.call_llvm_pure_intrin("int32x16", "llvm.lrint.v16i32.v16f32", scaled)
    if isa.codes_offset:
        whole = whole + i32(isa.codes_offset)
    store(codes, T.cast(whole, f"{isa.codes_dtype}x16"), at)


@dataclass
class RowQuantizer:
    """Emits one quantizer for one row after the other.

    flat:     flat buffers by argument name.
    tag:      suffix of this quantizer's argument names.
    stride: width of a row of codes.
    """

    isa: Isa
    spec: Quantizer
    width: int
    flat: dict[str, Expr]
    tag: str = ""
    stride: int = field(init=False)

    def __post_init__(self) -> None:
        self.stride = round_up(self.width)

    @property
    def needs_scratch(self) -> bool:
        """Whether `emit` wants a scratch row even when `source` may be read twice."""
        return self.spec.rotation is not None or (self.spec.smooth and not self.spec.static)

    def emit(self, row: Expr, source: Callable[[Expr, int], Expr], scratch: Expr | None) -> None:
        """Quantise one row.

        source(offset, valid):  16 float32 of the row, those beyond `valid` are 0.
        scratch:  float32 (round_up(K, 16),), or None where nothing `needs_scratch` and `source` may be read twice.
        """
        base = T.Bind(row * self.stride)
        if self.spec.static:
            self._static(row, base, source, scratch)
        else:
            self._dynamic(row, base, source, scratch)

    def _smoothed(self, source: Callable[[Expr, int], Expr], off: Expr, valid: int) -> Expr:
        value = source(off, valid)
        if self.spec.smooth:
            value = mul(value, load(self.flat[f"inv_smooth{self.tag}"], off, valid))
        return T.Bind(value)

    def _static(self, row: Expr, base: Expr, source: Callable[[Expr, int], Expr], scratch: Expr | None) -> None:
        codes, inv = self.flat[f"codes{self.tag}"], T.Bind(splat(self.flat[f"inv{self.tag}"][0]))
        if self.spec.rotation is None:
            each_vector(
                self.width,
                lambda off, valid: emit_codes(self.isa, codes, base + off, self._smoothed(source, off, valid), inv, static=True),
            )
        else:
            assert scratch is not None
            each_vector(self.width, lambda off, valid: store(scratch, self._smoothed(source, off, valid), off))
            emit_rotation(self.spec.rotation, scratch, self.width, lambda values: None)
            self._write(base, lambda off, valid: T.Bind(scratch[span(off)]), inv)
        T.buffer_store(self.flat[f"scale{self.tag}"], self.flat[f"static_scale{self.tag}"][0], [row])

    def _dynamic(self, row: Expr, base: Expr, source: Callable[[Expr, int], Expr], scratch: Expr | None) -> None:
        peak = small()
        store(peak, f32(float(FLOOR)), 0)
        rotation = self.spec.rotation

        def first(off: Expr, valid: int) -> None:
            value = self._smoothed(source, off, valid)
            if rotation is None:
                _track(peak, value)
            if scratch is not None:
                store(scratch, value, off)

        each_vector(self.width, first)
        if rotation is not None:
            assert scratch is not None
            emit_rotation(rotation, scratch, self.width, lambda values: _track(peak, values))
        amax = T.Bind(across(peak[span(0)], T.max))
        T.buffer_store(self.flat[f"scale{self.tag}"], lane(amax) / T.float32(LEVELS), [row])
        inv = T.Bind(f32(LEVELS) / amax)
        again = source if scratch is None else (lambda off, valid: T.Bind(scratch[span(off)]))
        self._write(base, again, inv)

    def _write(self, base: Expr, again: Callable[[Expr, int], Expr], inv: Expr) -> None:
        codes = self.flat[f"codes{self.tag}"]
        each_vector(
            self.width,
            lambda off, valid: emit_codes(self.isa, codes, base + off, again(off, valid), inv, self.spec.static),
        )


@dataclass(frozen=True)
class QuantizeRows:
    """The kernel quantize_rows(x, [inv_smooth], [inv, static_scale]) -> codes, scale.

    x:             (lead.., width) float32
    inv_smooth:    (width,) float32, if quantizer.smooth
    inv:           (1,) float32 and static_scale: (1,) float32, if quantizer.static
    codes:         (lead.., round_up(width, 16)) isa.codes_dtype, code + isa.codes_offset
    scale:         (lead..) float32

    act:           activation applied to x first, a name of `act.ACTIVATIONS`.
    parallel:      rows in parallel where there are enough of them.
    """

    isa: Isa
    width: int
    lead: Lead = LEAD2
    act: str = "none"
    quantizer: Quantizer = PER_ROW
    name: str = "quantize_rows"
    parallel: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise LoweringError(f"{self.name}: {self.width} features; needed at least 1")
        self.quantizer.check(self.width, self.name)
        activation(self.act)


@lru_cache(maxsize=32)  # layers of one shape share it
def prim_func(spec: QuantizeRows) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("x", spec.width)
        spec.quantizer.declare_inputs(args, spec.width, "")
        spec.quantizer.declare_outputs(args, spec.isa, spec.width, "")
        rows, flat = args.flatten()
        quantizer = RowQuantizer(spec.isa, spec.quantizer, spec.width, flat)
        act = activation(spec.act).emit

        def one(row: Expr, scratch: list[Expr]) -> None:
            start = T.Bind(row * spec.width)

            def source(off: Expr, valid: int) -> Expr:
                return only(act(load(flat["x"], start + off, valid)), valid)

            quantizer.emit(row, source, scratch[0] if scratch else None)

        # A dynamic quantizer reads its source twice: an activation is worth keeping.
        twice = spec.act != "none" and not spec.quantizer.static
        scratch = (round_up(spec.width),) if twice or quantizer.needs_scratch else ()
        for_rows(rows, spec.width, scratch, spec.parallel, one)
    return builder.get()


def reference(
    isa: Isa,
    quantizer: Quantizer,
    v: Floats,
    inv_smooth: Floats | None = None,
    inv: float = 1.0,
    static_scale: float = 1.0,
) -> tuple[npt.NDArray[np.generic], Floats]:
    """What the kernel computes from v = act(x), (..., K) float32: codes (..., round_up(K, 16)) as stored, scale (...)."""
    with np.errstate(all="ignore"):
        t = v if inv_smooth is None else v * inv_smooth
        if quantizer.rotation is not None:
            t = rotation_reference(t, quantizer.rotation)
        if quantizer.static:
            factor = np.full(v.shape[:-1], inv, np.float32)
            scale = np.full(v.shape[:-1], static_scale, np.float32)
        else:
            amax = np.maximum(np.nan_to_num(np.abs(t), nan=0.0, posinf=np.inf).max(axis=-1, initial=0), FLOOR)
            factor, scale = np.float32(LEVELS) / amax, amax / np.float32(LEVELS)
        scaled = t * factor[..., None]
        code = np.clip(np.rint(np.nan_to_num(scaled, nan=0.0, posinf=LEVELS, neginf=-LEVELS)), -LEVELS, LEVELS)
    stored = np.full((*v.shape[:-1], round_up(v.shape[-1])), isa.codes_offset, isa.codes_dtype)
    stored[..., : v.shape[-1]] = (code.astype(np.int32) + isa.codes_offset).astype(isa.codes_dtype)
    return stored, scale
