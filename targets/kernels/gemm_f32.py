"""float32 matrix product with packed weights, bias, activation and residual fused.

    C = act(sum_k fma(a[m, k], w[n, k], .) from bias[n], k = 0 .. K-1 in order) (+ residual)

Every output element has one accumulator and one order of additions, whatever the tile, so all CPUs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.exact import fma_reference
from khtst_compile.layout import Layout
from khtst_compile.targets.isa import Isa

from . import fmla_lane
from .act import activation
from .rows import LEAD2, Arguments, Lead
from .tiles import Panels, Sink, Tile, ask_ahead, for_tiles, multiply_add, panels_of
from .vec import Expr, Floats, span

CHAINS = 8
"""Sums that have to run side by side for none to wait: two multiply-adds start in a cycle, each takes four."""


@dataclass(frozen=True)
class GemmF32:
    """One float32 GEMM kernel.

    isa:       instruction set.
    n, k:      output and input features; weights are (n, k).
    lead:      leading dimensions of input, residual and output.
    act:       activation after the bias, a name in act.ACTIVATIONS.
    residual:  whether a float32 (lead.., n) tensor is added last.
    tile:      how the matrices are walked; None for `default_tile`.
    name:      of the function.
    """

    isa: Isa
    n: int
    k: int
    lead: Lead = LEAD2
    act: str = "none"
    residual: bool = False
    tile: Tile | None = None
    name: str = "gemm_f32"

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise LoweringError(f"{self.name}: weight is ({self.n}, {self.k}); needed at least (1, 1)")
        activation(self.act)
        self.how.check(self.isa, self.name, self.k)

    @property
    def default_tile(self) -> Tile:
        """What is chosen where nothing was measured."""
        panels = panels_of(self.n, self.isa)
        return Tile(panels.rows, panels.vectors)

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
        """Panels side by side for matrices of 1, 2, .. rows: a chain of sums waits 4 cycles for each of its multiply-adds, and two
        start in every cycle, so fewer than 8 chains would wait."""
        vectors, found = self.how.vectors, list[int]()
        for rows in range(1, self.how.rows):
            # Sums, weights used for more than one row, and one broadcast have to fit.
            each = rows * vectors + (vectors if rows > 1 else 0)
            found.append(max(1, min(CHAINS // (rows * vectors), (self.isa.registers - 1) // each)))
        return tuple(found)


@lru_cache(maxsize=32)  # layers of one shape share it
def prim_func(spec: GemmF32) -> tirx.PrimFunc:
    """The TIR of `spec`.

    Arguments: a (lead.., k) float32; the arrays of `pack`; [residual (lead.., n) float32]; C (lead.., n) float32.
    """
    panels = spec.panels
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("a", spec.k)
        args.vector("weights", panels.padded * spec.k)
        args.vector("bias", panels.padded)
        if spec.residual:
            args.rows("residual", spec.n)
        args.rows("out", spec.n)
        rows, flat = args.flatten()
        sink = Sink(panels, flat["out"], act=spec.act, residual=flat.get("residual"))

        def tile(scratch: list[list[Expr]], side: list[Expr], first: Expr, count: int) -> None:
            columns = [T.Bind(panel * panels.width) for panel in side]
            ahead = spec.how.ahead_few if count < spec.how.rows else spec.how.ahead
            ask = ask_ahead(flat["weights"], panels, side, panels.width, spec.k, 4, ahead)
            acc = multiply_add(
                panels,
                count,
                T.int64(spec.k),
                lambda p, j: flat["bias"][span(columns[p] + j * panels.lanes, panels.lanes)],
                lambda i, k: flat["a"][(first + i) * spec.k + k],
                flat["weights"],
                [column * spec.k for column in columns],
                ask,
                spec.how.unroll,
                (flat["a"], lambda k: first * spec.k + k, spec.k)
                if len(side) == 1 and fmla_lane.serves(spec.isa, count, panels.vectors, spec.k)
                else None,
            )
            for p, panel in enumerate(side):
                for i in range(count):
                    for j in range(panels.vectors):
                        sink.put(scratch[p], panel, first, i, j, acc[p][i][j][span(0, panels.lanes)])

        for_tiles(rows, 4 * spec.k, sink, tile, spec.how, spec.groups)
    return builder.get()


def pack(spec: GemmF32, weights: Floats, bias: Floats | None = None) -> list[Floats]:
    """The constant arguments of `spec`, in order.

    weights:  (n, k) float32; bias: (n,) float32 or None for zero.
    returns:  weights [panel, k, column] float32, flat; bias (padded n,) float32.
    Raises LoweringError when a shape does not fit.
    """
    if weights.shape != (spec.n, spec.k):
        raise LoweringError(f"{spec.name}: weights {weights.shape}; needed {(spec.n, spec.k)}")
    panels = spec.panels
    start = np.zeros(panels.padded, np.float32)
    if bias is not None:
        start[: spec.n] = bias
    return [layout(spec).apply(weights), start]


def layout(spec: GemmF32) -> Layout:
    """The order of the packed weights: how (n, k) becomes the first array of `pack`."""
    panels = spec.panels
    return Layout((panels.padded, spec.k), (panels.count, panels.width, spec.k), (0, 2, 1))


def reference(
    a: Floats, weights: Floats, bias: Floats | None = None, act: str = "none", residual: Floats | None = None
) -> Floats:
    """What the kernel computes, to the bit: a (lead.., k), weights (n, k) -> (lead.., n), all float32."""
    acc = np.zeros((*a.shape[:-1], weights.shape[0]), np.float32)
    if bias is not None:
        acc += bias
    for k in range(weights.shape[1]):
        acc = fma_reference(a[..., k, None], weights[:, k], acc)
    value = activation(act).reference(acc)
    return value if residual is None else value + residual
