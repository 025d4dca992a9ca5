"""int8 x int8 matrix product with the dequantization, bias, activation and residual of a linear layer fused.

    C = act(fma(float(acc), a_scale[m] * w_scale[n], bias[n])) (+ residual)      acc[m, n] = sum_k a[m, k] w[n, k]

acc is an exact int32: |a|, |w| <= 127, and the widest k is limited so that it cannot overflow. It is converted to float32
(round to nearest), the product of the scales is rounded to float32, then one fused multiply-add.

The matrix is cut into panels of a few vectors of columns, packed at compile time; a panel is walked by tiles of rows
whose accumulators fill the registers, over the whole of k. Tile sizes come from the register file: accumulators, one
vector of weights per column vector, one broadcast of codes and one product have to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.exact import fma_reference
from khtst_compile.layout import Layout
from khtst_compile.targets.isa import Isa

from .act import activation
from .dot import Codes, Dot, Sums, dot_of
from .rows import LEAD2, Arguments, Lead, round_up
from .step_order import step_order
from .tiles import Panels, Sink, Tile, ask_ahead, for_tiles, panels_of
from .vec import Expr, Floats, fma, span, splat, to_float

CODES_ALIGNMENT = 16
"""Codes are stored in rows of round_up(K, 16) elements."""
LIMIT = 127
"""Largest magnitude of a code and of a weight."""

AHEAD_FEW = 1024
"""Bytes ahead that a row left over asks for: 12 to 15 % faster than the next panel, which is far at a wide k, from L3 and from memory."""


@dataclass(frozen=True)
class GemmI8:
    """One int8 GEMM kernel.

    isa:       instruction set.
    n, k:      output and input features; weights are (n, k).
    lead:      leading dimensions of codes, scales, residual and output.
    act:       activation after the bias, a name in act.ACTIVATIONS.
    residual:  whether a float32 (lead.., n) tensor is added last.
    output:    "float32", or "acc": the raw int32 sums, without scales, bias, activation or residual.
    tile:      how the matrices are walked; None for `default_tile`.
    name:      of the function.
    """

    isa: Isa
    n: int
    k: int
    lead: Lead = LEAD2
    act: str = "none"
    residual: bool = False
    output: str = "float32"
    tile: Tile | None = None
    name: str = "gemm_i8"

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise LoweringError(f"{self.name}: weight is ({self.n}, {self.k}); needed at least (1, 1)")
        widest = (2**31 - 1) // LIMIT**2
        if self.k > widest:
            raise LoweringError(f"{self.name}: {self.k} input features; int32 sums are exact up to {widest}; split the layer")
        if self.output not in ("float32", "acc"):
            raise LoweringError(f"{self.name}: output '{self.output}'; use 'float32' or 'acc'")
        if self.output == "acc" and (self.residual or self.act != "none"):
            raise LoweringError(f"{self.name}: output 'acc' has no activation or residual; use output 'float32'")
        activation(self.act)
        self.dot.check_rows(self.how.rows, self.name)
        if self.dot.pairs and self.how.unroll != 1:
            raise LoweringError(
                f"{self.name}: turns of {self.how.unroll} steps; {self.isa.name} takes them in pairs; needed unroll 1"
            )
        self.how.check(self.isa, self.name, self.steps, self.dot.registers(self.how.rows, self.how.vectors))

    @property
    def default_tile(self) -> Tile:
        """What is chosen where nothing was measured."""
        dot = self.dot
        panels = panels_of(self.n, self.isa, dot.rows, most=dot.vectors)
        ahead = self.steps * panels.vectors * dot.bytes if dot.prefetch else 0
        return Tile(dot.rows, panels.vectors, dot.unroll, ahead, AHEAD_FEW if dot.prefetch else 0)

    @property
    def how(self) -> Tile:
        """The tile in use."""
        return self.tile or self.default_tile

    @property
    def panels(self) -> Panels:
        """The cut of the columns."""
        return panels_of(self.n, self.isa, self.how.rows, self.how.vectors)

    @property
    def groups(self) -> tuple[int, ...]:
        """Panels side by side for matrices of 1, 2, .. rows: only of one row, as more keep the registers full on one panel."""
        return (self.dot.streams,)

    @property
    def dot(self) -> Dot:
        """How products are summed."""
        return dot_of(self.isa)

    @property
    def steps(self) -> int:
        """Steps over k. Weights beyond k are zero, so whatever codes hold there does not count."""
        return (self.codes_width if self.dot.whole_rows else round_up(self.k, self.dot.group)) // self.dot.group

    @property
    def codes_width(self) -> int:
        """Elements of a stored row of codes."""
        return round_up(self.k, CODES_ALIGNMENT)

    @property
    def needs_compensation(self) -> bool:
        """Whether the sums of a column start at a constant other than zero."""
        return self.isa.codes_offset != 0 or self.dot.kind == "pairs"


@lru_cache(maxsize=32)  # layers of one shape share it
def prim_func(spec: GemmI8) -> tirx.PrimFunc:
    """The TIR of `spec`.

    Arguments: codes (lead.., round_up(k, 16)) codes_dtype; a_scale (lead..) float32; the arrays of `pack`;
    [residual (lead.., n) float32]; C (lead.., n) float32 (int32 for output "acc"). Every buffer starts at a multiple of
    64 bytes, as TVM allocates them. Stored codes beyond k may be anything from -32,640 to 32,640.
    """
    panels, dot = spec.panels, spec.dot
    raw = spec.output == "acc"
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("codes", spec.codes_width, spec.isa.codes_dtype)
        args.rows("a_scale", None)
        args.vector("weights", panels.count * spec.steps * panels.vectors * dot.bytes, "int8")
        if dot.pairs:
            args.vector("order", panels.count * (1 + spec.steps), "int16")
        if spec.needs_compensation:
            args.vector("compensation", panels.padded, "int32")
        args.vector("w_scale", panels.padded)
        args.vector("bias", panels.padded)
        if spec.residual:
            args.rows("residual", spec.n)
        args.rows("out", spec.n, "int32" if raw else "float32")
        rows, flat = args.flatten()
        dtype = "int32" if raw else "float32"
        sink = Sink(panels, flat["out"], dtype, spec.act, flat.get("residual"))

        codes = dot.prepare(flat["codes"], rows, args.dims, spec.codes_width)

        def tile(scratch: list[list[Expr]], side: list[Expr], first: Expr, count: int) -> None:
            sums = tile_sums(spec, flat, codes, side, [first] * len(side), count)
            for panel, buffers, acc in zip(side, scratch, sums, strict=True):
                for (i, j), value in _values(spec, flat, acc, panel, first):
                    sink.put(buffers, panel, first, i, j, value)

        row_bytes = spec.codes_width * np.dtype(spec.isa.codes_dtype).itemsize
        for_tiles(rows, row_bytes, sink, tile, spec.how, spec.groups)
    return builder.get()


def _values(
    spec: GemmI8, flat: dict[str, Expr], acc: list[list[Expr]], panel: Expr, first: Expr
) -> Iterator[tuple[tuple[int, int], Expr]]:
    """((row, vector), value of C before the activation) for each vector of a tile of sums."""
    panels = spec.panels
    lanes, count = panels.lanes, len(acc)
    column = T.Bind(panel * panels.width)
    for j in range(panels.vectors):
        if spec.output == "acc":
            yield from (((i, j), acc[i][j]) for i in range(count))
            continue
        scale = T.Bind(flat["w_scale"][span(column + j * lanes, lanes)])
        bias = T.Bind(flat["bias"][span(column + j * lanes, lanes)])
        for i in range(count):
            both = T.Bind(splat(flat["a_scale"][first + i], lanes) * scale)
            yield (i, j), fma(to_float(acc[i][j]), both, bias)


def tile_sums(
    spec: GemmI8, flat: dict[str, Expr], codes: Codes, side: list[Expr], firsts: list[Expr], count: int
) -> list[list[list[Expr]]]:
    """Accumulate tiles over all of k, for panels side by side, from row `firsts` each: int32 vectors [panel][row][vector]."""
    panels, dot = spec.panels, spec.dot

    def starts(panel: Expr) -> list[Expr | None]:
        if not spec.needs_compensation:
            return [None] * panels.vectors
        column = panel * panels.width
        return [T.Bind(flat["compensation"][span(column + j * panels.lanes, panels.lanes)]) for j in range(panels.vectors)]

    sums = [dot.begin(codes, row, count, starts(p), spec.isa.emulated) for p, row in zip(side, firsts, strict=True)]
    size, unroll = panels.vectors * dot.bytes, spec.how.unroll
    bases = [T.Bind(panel * (spec.steps * size)) for panel in side]
    # Several streams are prefetched by themselves; asking, too, would cost a tenth.
    ahead = spec.how.ahead if count > 1 else spec.how.ahead_few if len(side) == 1 else 0
    ask = ask_ahead(flat["weights"], panels, side, size, spec.steps, 1, ahead)
    if dot.pairs:
        for panel, base, tile in zip(side, bases, sums, strict=True):
            _in_order(spec, flat, panel, base, tile, ask)
        return [tile.result() for tile in sums]
    with T.serial(T.int64(0), T.int64(spec.steps // unroll)) as turn:
        for place in range(unroll):
            step = turn * unroll + place
            if ask is not None:
                ask(step)
            for base, tile in zip(bases, sums, strict=True):
                tile.step(turn, place, unroll, flat["weights"], T.Bind(base + step * size))
    return [tile.result() for tile in sums]


def _in_order(
    spec: GemmI8, flat: dict[str, Expr], panel: Expr, base: Expr, tile: Sums, ask: Callable[[Expr], None] | None
) -> None:
    """Emit all steps of a panel: first those that go in pairs, then the others. ask: what `ask_ahead` returned."""
    order, size = flat["order"], spec.panels.vectors * spec.dot.bytes
    start = T.Bind(panel * (1 + spec.steps))
    paired = T.Bind(T.cast(order[start], "int64"))

    def step(place: Expr) -> Expr:
        number = T.Bind(T.cast(order[start + 1 + place], "int64"))
        if ask is not None:
            ask(number)
        return number

    done: Expr = T.int64(0)
    for together in tile.together():
        turns = T.Bind(T.truncdiv(paired - done, T.int64(together)))
        with T.serial(T.int64(0), turns) as turn:
            steps = [step(done + turn * together + i) for i in range(together)]
            tile.pairs(steps, flat["weights"], [T.Bind(base + s * size) for s in steps])
        done = T.Bind(done + turns * together)
    with T.serial(T.int64(0), T.int64(spec.steps) - done) as single:
        alone = step(done + single)
        tile.step(alone, 0, 1, flat["weights"], T.Bind(base + alone * size))


def pack(
    spec: GemmI8, weights: npt.NDArray[np.int8], w_scale: Floats, bias: Floats | None = None
) -> list[npt.NDArray[np.generic]]:
    """The constant arguments of `spec`, in order.

    weights:  (n, k) int8 in [-127, 127].
    w_scale:  (n,) float32; bias: (n,) float32 or None for zero.
    returns:  weights [panel, step of k, vector, part, lane, k] int8, flat (see Dot); [what `step_order` finds, int16, flat, where
              steps go in pairs]; [what the sums of each column start at, (padded n,) int32, where `needs_compensation`]; w_scale and
              bias (padded n,) float32.
    Raises LoweringError when a shape does not fit or a weight is -128.
    """
    if weights.shape != (spec.n, spec.k) or w_scale.shape != (spec.n,):
        raise LoweringError(
            f"{spec.name}: weights {weights.shape} and scales {w_scale.shape}; needed {(spec.n, spec.k)} and {(spec.n,)}"
        )
    if weights.dtype != np.int8 or weights.min() < -LIMIT:
        raise LoweringError(f"{spec.name}: weights are {weights.dtype}, least {weights.min()}; needed int8 >= -127")
    panels, dot = spec.panels, spec.dot
    padded = np.zeros((panels.padded, spec.steps * dot.group), np.int8)
    padded[: spec.n, : spec.k] = weights
    packed: list[npt.NDArray[np.generic]] = [layout(spec).apply(weights)]
    if dot.pairs:
        packed.append(step_order(padded, panels.width, dot.group).reshape(-1))
    start = dot.column_start(padded, spec.isa.codes_offset)
    if start is not None:
        packed.append(start)
    for values in (w_scale, bias):
        column = np.zeros(panels.padded, np.float32)
        if values is not None:
            column[: spec.n] = values
        packed.append(column)
    return packed


def layout(spec: GemmI8) -> Layout:
    """The order of the packed weights: how (n, k) becomes the first array of `pack`."""
    panels, dot = spec.panels, spec.dot
    blocks, axes = dot.order(panels.count, panels.vectors, spec.steps)
    return Layout((panels.padded, spec.steps * dot.group), blocks, axes)


def store_codes(isa: Isa, codes: npt.NDArray[np.int8]) -> npt.NDArray[np.generic]:
    """int8 codes (lead.., K) as kernels read them: (lead.., round_up(K, 16)) codes_dtype, with the offset added."""
    width = codes.shape[-1]
    stored = np.full((*codes.shape[:-1], round_up(width, CODES_ALIGNMENT)), isa.codes_offset, isa.codes_dtype)
    stored[..., :width] = (codes.astype(np.int32) + isa.codes_offset).astype(isa.codes_dtype)
    return stored


def reference(
    codes: npt.NDArray[np.int8],
    a_scale: Floats,
    weights: npt.NDArray[np.int8],
    w_scale: Floats,
    bias: Floats | None = None,
    act: str = "none",
    residual: Floats | None = None,
) -> Floats:
    """What the kernel computes, to the bit: codes (lead.., k) int8, a_scale (lead..), weights (n, k) -> (lead.., n)."""
    # Sums of products of int8 are exact in float64 up to 2^53.
    acc = (codes.astype(np.float64) @ weights.astype(np.float64).T).astype(np.int32)
    scale = a_scale[..., None] * w_scale
    value = fma_reference(acc.astype(np.float32), scale, np.float32(0) if bias is None else bias)
    value = activation(act).reference(value)
    return value if residual is None else value + residual
