"""Quantise rows to int8 codes: activation, smoothing, Hadamard rotation, absolute maximum, codes, all in one kernel.

For a row x of K float32, in this order (every step rounds to float32 once, so torch gives the same bits):

    v = act(x)
    t = v * inv_smooth                                    if smooth
    t = unnormalised Walsh-Hadamard transform, blockwise  if rotation; see `Rotation` for the order of its stages
    dynamic:  a = max(max |t|, 1e-30),  inv = 127 / a,  scale = a / 127
    static:   inv and scale are constants of the whole tensor
    code = roundeven(t * inv), clamped to [-127, 127]

A row that holds a NaN has scale NaN and no code but 0 (static: the NaN's); one with an infinity has scale infinity and no code but 0. What
a linear layer makes of such a row is NaN and not plausible numbers. Static, an infinity is clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.act import activation
from khtst_compile.targets.kernels.rotation import Rotation, emit_rotation, lanes_at_once, rotation_reference
from khtst_compile.targets.kernels.rows import (
    LEAD2,
    Arguments,
    Lead,
    Phase,
    Place,
    Source,
    each_vector,
    for_rows,
    load,
    only,
    round_up,
)
from khtst_compile.targets.kernels.vec import (
    LANES,
    Expr,
    Floats,
    absolute,
    across,
    at_least,
    at_most,
    bits,
    f32,
    i32,
    lane,
    lanes_of,
    maximum,
    mul,
    rounded,
    small,
    span,
    splat,
    store,
)

__all__ = ["PER_ROW", "QuantizeRows", "Quantizer", "Rotation", "RowQuantizer", "prim_func", "reference"]

LEVELS = 127
"""Largest code; -128 is not used, so that codes are symmetric."""
ROUNDING = 12_582_912.0  # 1.5 * 2**23: a float32 of this size has no fraction
ROUNDING_BITS = 0x4B400000
FLOOR = np.float32(1e-30)
"""Smallest absolute maximum of a row: a zero row gets zero codes and a finite scale."""
INFINITY = 0x7F800000
"""Its bits: magnitudes above are NaN."""


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


def new_peak(lanes: int = LANES, floats: bool = False) -> Expr:
    """Running maxima of |value|, in which a NaN stays. They are kept as bits, since magnitudes compare as integers and a NaN is larger than
    them all; or as floats, where the maximum of floats keeps a NaN by itself."""
    floor = f32(float(FLOOR), lanes)
    peak = small(lanes, "float32" if floats else "int32")
    store(peak, floor if floats else bits(floor), 0)
    return peak


def track(peak: Expr, values: Expr) -> None:
    """Raise running maxima."""
    before, size = peak[span(0, lanes_of(values))], absolute(values)
    store(peak, T.max(bits(size), before) if str(peak.dtype) == "int32" else maximum(size, before), 0)


def largest(peak: Expr, lanes: int = LANES) -> Expr:
    """The largest of running maxima, a scalar; NaN where any value was."""
    return T.Bind(T.reinterpret("float32", _largest_bits(peak, lanes)))


def _largest_bits(peak: Expr, lanes: int = LANES) -> Expr:
    found = peak[span(0, lanes)]
    return lane(across(found if str(peak.dtype) == "int32" else bits(T.Bind(found)), T.max))


def emit_codes(isa: Isa, codes: Expr, at: Expr, t: Expr, inv: Expr, static: bool) -> None:
    """Store 16 codes of t * inv."""
    whole = rounded_codes(t, inv, static, isa.rounds)
    if isa.codes_offset:
        whole = whole + i32(isa.codes_offset)
    store(codes, T.cast(whole, f"{isa.codes_dtype}x16"), at)


def rounded_codes(t: Expr, inv: Expr, static: bool = False, rounds: bool = True) -> Expr:
    """16 codes of t * inv as int32. In a dynamic row |t * inv| <= 127 holds by itself; a static one is clamped.

    The conversion turns NaN into the integer -2**31 (x86) or 0 (ARM): either way the narrow code is 0. Where no instruction rounds
    (`rounds`), adding 1.5 * 2**23 leaves the nearest integer in the low bits, and 0 there for NaN.
    """
    scaled = mul(t, inv)
    if static:
        scaled = T.Bind(at_most(at_least(scaled, f32(-LEVELS)), f32(LEVELS)))
    if not rounds:
        return bits(T.Bind(rounded(scaled + f32(ROUNDING)))) - i32(ROUNDING_BITS)
    return T.call_llvm_pure_intrin("int32x16", "llvm.lrint.v16i32.v16f32", scaled)


@dataclass
class RowQuantizer:
    """Emits one quantizer, in two phases: the row as it is to be rounded and its scale; then the codes.

    flat:    flat buffers by argument name.
    tag:     suffix of this quantizer's argument names.
    source:  the values of a row, by its place.
    cost:    of these: "read" (from memory, so that twice costs nothing), "light" or "heavy" (kept before a rotation, whose
             registers they would fill).
    """

    isa: Isa
    spec: Quantizer
    width: int
    flat: dict[str, Expr]
    source: Callable[[Place], Source]
    cost: str = "read"
    tag: str = ""

    @property
    def _keeps(self) -> bool:
        """Whether the first phase leaves a row in scratch memory."""
        if self.spec.rotation is not None:
            return True
        return not self.spec.static and (self.spec.smooth or self.cost != "read")

    @property
    def scratch(self) -> dict[str, int]:
        """float32 elements of a row of each scratch buffer: the row to be rounded where it is kept, and 127 / maximum."""
        kept = {"kept": round_up(self.width)} if self._keeps else {}
        return kept if self.spec.static else {**kept, "inverse": 1}

    def phases(self) -> list[Phase]:
        """What to emit, in order."""
        return [self._prepare, self._write] if self.scratch else [self._write]

    def _smoothed(self, place: Place) -> Source:
        source = self.source(place)

        def values(off: Expr, valid: int, lanes: int) -> Expr:
            value = source(off, valid, lanes)
            if self.spec.smooth:
                value = mul(value, load(self.flat[f"inv_smooth{self.tag}"], off, valid, lanes))
            return T.Bind(value)

        return values

    def _kept(self, place: Place) -> Expr:
        return place.scratch["kept"] if self._keeps else None

    def _prepare(self, place: Place) -> None:
        rotation, static = self.spec.rotation, self.spec.static
        lanes = LANES if rotation is None else lanes_at_once(self.isa)
        peak = None if static else new_peak(lanes, self.isa.max_keeps_nan)
        source, kept = self._smoothed(place), self._kept(place)
        at = T.Bind(place.slot * round_up(self.width))

        def visit(values: Expr) -> None:
            if not static:
                track(peak, values)

        def one(off: Expr, valid: int) -> None:
            value = source(off, valid, LANES)
            visit(value)
            if self._keeps:
                store(kept, value, at + off)

        if rotation is None:
            each_vector(self.width, one)
        else:
            if self.cost == "heavy":
                values = source
                each_vector(self.width, lambda off, valid: store(kept, values(off, valid, LANES), at + off))
                source = lambda off, valid, lanes: T.Bind(kept[span(at + off, lanes)])  # noqa: E731
            emit_rotation(self.isa, rotation, source, kept, at, self.width, visit)
        if not static:
            amax = largest(peak, lanes)
            T.buffer_store(self.flat[f"scale{self.tag}"], amax / T.float32(LEVELS), [place.row])
            T.buffer_store(place.scratch["inverse"], T.float32(LEVELS) / amax, [place.slot])

    def _write(self, place: Place) -> None:
        static, codes = self.spec.static, self.flat[f"codes{self.tag}"]
        inv = T.Bind(splat(self.flat[f"inv{self.tag}"][0] if static else place.scratch["inverse"][place.slot]))
        base, at = T.Bind(place.row * round_up(self.width)), T.Bind(place.slot * round_up(self.width))
        source, kept = self._smoothed(place), self._kept(place)
        peak = new_peak(floats=self.isa.max_keeps_nan) if static else None

        def one(off: Expr, valid: int) -> None:
            value = T.Bind(kept[span(at + off)]) if self._keeps else source(off, valid, LANES)
            if static:
                track(peak, value)
            emit_codes(self.isa, codes, base + off, value, inv, static)

        each_vector(self.width, one, unroll=2)
        if static:
            is_nan = _largest_bits(peak) > T.int32(INFINITY)
            scale = T.Select(is_nan, T.float32(float("nan")), self.flat[f"static_scale{self.tag}"][0])
            T.buffer_store(self.flat[f"scale{self.tag}"], scale, [place.row])


@dataclass(frozen=True)
class QuantizeRows:
    """The kernel quantize_rows(x, [inv_smooth], [inv, static_scale]) -> codes, scale.

    x:             (lead.., width) float32; with a gate (lead.., 2 * width)
    inv_smooth:    (width,) float32, if quantizer.smooth
    inv:           (1,) float32 and static_scale: (1,) float32, if quantizer.static
    codes:         (lead.., round_up(width, 16)) isa.codes_dtype, code + isa.codes_offset
    scale:         (lead..) float32

    act:           activation applied to x first, a name of `act.ACTIVATIONS`.
    gate:          the values are act(first half of x) * second half.
    parallel:      rows in parallel where there are enough of them.
    """

    isa: Isa
    width: int
    lead: Lead = LEAD2
    act: str = "none"
    quantizer: Quantizer = PER_ROW
    gate: bool = False
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
        columns = spec.width * (2 if spec.gate else 1)
        args.rows("x", columns)
        spec.quantizer.declare_inputs(args, spec.width, "")
        spec.quantizer.declare_outputs(args, spec.isa, spec.width, "")
        rows, flat = args.flatten()
        act = activation(spec.act).emit

        def row(place: Place) -> Source:
            start = T.Bind(place.row * columns)

            def values(off: Expr, valid: int, lanes: int) -> Expr:
                value = act(load(flat["x"], start + off, valid, lanes))
                if spec.gate:
                    value = mul(T.Bind(value), load(flat["x"], start + spec.width + off, valid, lanes))
                return only(value, valid)

            return values

        cost = "heavy" if spec.gate or spec.act != "none" else "read"
        quantizer = RowQuantizer(spec.isa, spec.quantizer, spec.width, flat, row, cost)
        for_rows(rows, spec.width, quantizer.scratch, spec.parallel, quantizer.phases())
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
    code, scale = reference_codes(quantizer, v, inv_smooth, inv, static_scale)
    stored = np.full((*v.shape[:-1], round_up(v.shape[-1])), isa.codes_offset, isa.codes_dtype)
    stored[..., : v.shape[-1]] = (code + isa.codes_offset).astype(isa.codes_dtype)
    return stored, scale


def reference_codes(
    quantizer: Quantizer, v: Floats, inv_smooth: Floats | None = None, inv: float = 1.0, static_scale: float = 1.0
) -> tuple[npt.NDArray[np.int32], Floats]:
    """v: (..., K) float32 -> codes (..., K) int32 in [-127, 127] and scale (...) float32."""
    with np.errstate(all="ignore"):
        t = v if inv_smooth is None else v * inv_smooth
        if quantizer.rotation is not None:
            t = rotation_reference(t, quantizer.rotation)
        if quantizer.static:
            factor = np.full(v.shape[:-1], inv, np.float32)
            scale = np.where(np.isnan(t).any(axis=-1), np.float32(np.nan), np.float32(static_scale))
        else:
            amax = np.maximum(np.abs(t).max(axis=-1, initial=0), FLOOR)
            factor, scale = np.float32(LEVELS) / amax, amax / np.float32(LEVELS)
        scaled = t * factor[..., None]
        code = np.clip(np.rint(np.nan_to_num(scaled, nan=0.0, posinf=LEVELS, neginf=-LEVELS)), -LEVELS, LEVELS)
    return code.astype(np.int32), scale
