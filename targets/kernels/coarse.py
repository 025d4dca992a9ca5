"""Scores of a codebook in int8, good enough to leave few codes to score exactly: codes are chosen by what they cost, not by their number.

On AVX2, vpmaddubsw adds two products of an unsigned and a signed byte in int16, twice as many a cycle as an exact sum of int32 takes.
Codes are within +-63 and stored + 64, so two products fit. Sums of a few steps stay in int16, wrapping around as they like: what they end
at fits by Cauchy-Schwarz, because a row's scale is chosen so that no part of its codes times the longest part of a code of the codebook is
above 32,767 (`Int8Codebook.part`). That costs next to no precision, where bounding it by the largest codes would cost half. Other
instruction sets sum in int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tvm.tirx.script import builder as T

from khtst_compile.layout import Layout
from khtst_compile.quant.codebook_int8 import GROUP, LEVELS, NARROW_LEVELS, STEPS, lanes
from khtst_compile.targets.isa import Isa

from .dot import Codes, Dot, dot_of
from .rows import round_up
from .tiles import Panels, panels_of
from .vec import Expr, small, span, splat, store

UNROLL = 2
"""Steps of one turn of the innermost loop."""
OFFSET = 64
"""What storage of codes adds where sums are int16."""


@dataclass(frozen=True)
class Bytes:
    """vpmaddubsw with sums of STEPS steps in int16. Members as those of `Dot`."""

    lanes: int = 8
    group: int = GROUP
    rows: int = 4
    vectors: int = 2

    @property
    def bytes(self) -> int:
        """int8 weights of one vector of columns and one step."""
        return self.group * self.lanes

    def order(self, panels: int, vectors: int, steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks of the padded (K, d) weights, and the order of these axes in which they are read."""
        return (panels, vectors, self.lanes, steps, self.group), (0, 3, 1, 2, 4)


class _ByteSums:
    """The sums of a tile while they are made, in small buffers that LLVM keeps in registers."""

    def __init__(self, dot: Bytes, codes: Codes, first: Expr, count: int, starts: list[Expr | None]):
        self._dot, self._codes, self._first = dot, codes, first
        self._wide = [[small(dot.lanes, "int32") for _ in starts] for _ in range(count)]
        self._acc = [[small(2 * dot.lanes, "int16") for _ in starts] for _ in range(count)]
        for row in self._wide:
            for a in row:
                store(a, T.broadcast(T.int32(0), dot.lanes), 0)

    def open(self, starts: list[Expr]) -> None:
        """Begin a block of steps; starts: int16 of each vector of columns."""
        for row in self._acc:
            for a, start in zip(row, starts, strict=True):
                store(a, start, 0)

    def step(self, number: Expr, weights: Expr, at: Expr) -> None:
        """Step `number` of a row, whose packed weights start at byte `at`."""
        dot, codes = self._dot, self._codes
        size, pairs = dot.bytes, f"int16x{2 * dot.lanes}"
        columns = [T.Bind(weights[span(at + j * size, size)]) for j in range(len(self._acc[0]))]
        for i, row in enumerate(self._acc):
            start = (self._first + i) * codes.width + number * dot.group
            group = T.reinterpret("int32", codes.buffer[span(start, dot.group)])
            given = T.Bind(T.reinterpret(f"uint8x{size}", splat(group, dot.lanes)))
            for a, w in zip(row, columns, strict=True):
                product = T.call_llvm_pure_intrin(pairs, "llvm.x86.avx2.pmadd.ub.sw", given, w)
                store(a, a[span(0, 2 * dot.lanes)] + product, 0)

    def close(self) -> None:
        """End a block: its sums into int32."""
        lanes = self._dot.lanes
        ones = T.broadcast(T.int16(1), 2 * lanes)
        for row, wide in zip(self._acc, self._wide, strict=True):
            for a, w in zip(row, wide, strict=True):
                more = T.call_llvm_pure_intrin(f"int32x{lanes}", "llvm.x86.avx2.pmadd.wd", a[span(0, 2 * lanes)], ones)
                store(w, w[span(0, lanes)] + more, 0)

    def result(self) -> list[list[Expr]]:
        """int32 vectors [row][vector of columns]."""
        return [[w[span(0, self._dot.lanes)] for w in row] for row in self._wide]


_BYTES = Bytes()


@dataclass(frozen=True)
class Coarse:
    """How one instruction set scores `codes` rows of `features` in int8."""

    isa: Isa
    codes: int
    features: int

    @property
    def bytes(self) -> bool:
        """Whether sums are those of vpmaddubsw."""
        return self.isa.dot == "pairs"

    @property
    def dot(self) -> Bytes | Dot:
        """How products are summed."""
        return _BYTES if self.bytes else dot_of(self.isa)

    @property
    def most(self) -> int:
        """Largest code of a vector."""
        return NARROW_LEVELS if self.bytes else LEVELS

    @property
    def codes_dtype(self) -> str:
        """Of stored codes of vectors."""
        return "uint8" if self.bytes else self.isa.codes_dtype

    @property
    def codes_offset(self) -> int:
        """What storage adds to a code."""
        return OFFSET if self.bytes else self.isa.codes_offset

    @property
    def panels(self) -> Panels:
        """The cut of the codebook."""
        return panels_of(self.codes, self.isa, self.dot.rows, most=self.dot.vectors)

    @property
    def width(self) -> int:
        """Elements of a stored row of codes, in whole blocks of steps."""
        return round_up(self.features, STEPS * GROUP if self.bytes else 16)

    @property
    def steps(self) -> int:
        """Steps over the features."""
        return self.width // self.dot.group

    @property
    def starts(self) -> int:
        """Elements of what the sums of a level start at: int16, or int32 where sums are; 0 for zero."""
        if self.bytes:
            return self.panels.count * (self.steps // STEPS) * self.panels.vectors * 2 * self.dot.lanes
        return self.panels.padded if self.codes_offset else 0

    @property
    def layout(self) -> Layout:
        """The order of packed weights: how (codes, features) becomes them."""
        blocks, axes = self.dot.order(self.panels.count, self.panels.vectors, self.steps)
        return Layout((self.panels.padded, self.steps * self.dot.group), blocks, axes)

    def prepare(self, codes: Expr, rows: Expr, most: int) -> Codes:
        """Emit what is to be done to a block of `rows` stored codes first, `most` at most."""
        return (
            Codes(codes, self.width)
            if isinstance(self.dot, Bytes)
            else self.dot.prepare(codes, rows, [T.int64(most)], self.width)
        )

    def sums(
        self, codes: Codes, weights: Expr, starts: Expr | None, level: Expr, panel: Expr, first: Expr, count: int, turns: Expr
    ) -> list[list[Expr]]:
        """Emit a tile: int32 vectors [row][vector] of rows `first` to `first + count` against a panel of a level. turns: steps of a block,
        read at run time: the compiler would unroll a loop of a number it knows, and run out of registers."""
        panels, dot = self.panels, self.dot
        size = panels.vectors * dot.bytes
        base = T.Bind((level * panels.count + panel) * (self.steps * size))
        if isinstance(dot, Bytes):
            assert starts is not None
            made = _ByteSums(dot, codes, first, count, [None] * panels.vectors)
            blocks, lanes = self.steps // STEPS, 2 * dot.lanes
            place = T.Bind((level * panels.count + panel) * (blocks * panels.vectors * lanes))
            with T.serial(T.int64(0), T.int64(blocks)) as block:
                at = T.Bind(place + block * (panels.vectors * lanes))
                made.open([T.Bind(starts[span(at + j * lanes, lanes)]) for j in range(panels.vectors)])
                with T.serial(T.int64(0), turns) as inner:
                    for place in range(UNROLL):
                        step = T.Bind(block * STEPS + inner * UNROLL + place)
                        made.step(step, weights, T.Bind(base + step * size))
                made.close()
            return made.result()
        column = T.Bind(level * panels.padded + panel * panels.width)
        first_sums: list[Expr | None] = [None] * panels.vectors
        if starts is not None:
            first_sums = [T.Bind(starts[span(column + j * panels.lanes, panels.lanes)]) for j in range(panels.vectors)]
        tile = dot.begin(codes, first, count, first_sums, self.isa.emulated)
        with T.serial(T.int64(0), T.int64(self.steps)) as turn:
            tile.step(turn, 0, 1, weights, T.Bind(base + turn * size))
        return tile.result()


def pack_starts(coarse: Coarse, weights: npt.NDArray[np.int8]) -> npt.NDArray[np.generic] | None:
    """weights: (K, d) int8 -> what the sums of a level start at, flat; None for zero."""
    panels = coarse.panels
    if not coarse.starts:
        return None
    padded = np.zeros((panels.padded, coarse.width), np.int8)
    padded[: len(weights), : weights.shape[1]] = weights
    if isinstance(coarse.dot, Dot):
        start = coarse.dot.column_start(padded, coarse.codes_offset)
        assert start is not None
        return start
    sums = -coarse.codes_offset * lanes(padded).sum(-1)  # (padded, blocks, 2)
    wrapped = sums.astype(np.int64).astype(np.uint16).view(np.int16)
    blocks = wrapped.shape[1]
    order = wrapped.reshape(panels.count, panels.vectors, panels.lanes, blocks, 2).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(order).reshape(-1)
