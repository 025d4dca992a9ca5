"""Scores of a codebook in int8, good enough to leave few codes to score exactly: codes are chosen by what they cost, not by their number.

On AVX2, vpmaddubsw adds two products of an unsigned and a signed byte in int16, twice as many a cycle as an exact sum of int32 takes.
Codes are within +-63 and stored + 64, so two products fit. Sums of a few steps stay in int16, wrapping around as they like: what they end
at fits by Cauchy-Schwarz, because a row's scale is chosen so that no part of its codes times the longest part of a code of the codebook is
above 32,767 (`CoarseLevel.part`). That costs next to no precision, where bounding it by the largest codes would cost half. Other
instruction sets sum in int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tvm.tirx.script import builder as T

from khtst_compile.layout import Layout
from khtst_compile.targets.isa import Isa

from .dot import Codes, Dot, Sums, dot_of
from .rows import round_up
from .tiles import Panels, panels_of
from .vec import Expr, Floats, small, span, splat, store

LEVELS = 127
"""Largest code of a codebook, and of a vector where sums are int32."""
BYTES_LEVELS = 63
"""Largest of a vector for vpmaddubsw: 2 * (63 + 64) * 127 fits int16."""
BYTES_OFFSET = 64
BLOCK = 8
"""Steps summed in int16, 16 products each. Of 16 steps, scales would have to be larger; of 4, a tile takes a sixth longer."""
CENTERED = 0.1
"""Least length of the mean of a codebook's codes, in units of the longest, to take it off: it costs a product for each row."""
DIAMETER_CODES = 8192
"""Codebooks of more have their diameter bounded by twice the radius: measured, it takes the square of their size."""
_GROUP = 4
_LIMIT = 32767


@dataclass(frozen=True)
class Bytes(Dot):
    """vpmaddubsw with sums of BLOCK steps in int16."""

    @property
    def chain_macs(self) -> int:
        raise NotImplementedError("measured as a whole (benchmarks/codebook.py)")

    def chain(self, old: Expr, weights: Expr, emulated: bool) -> Expr:
        raise NotImplementedError("measured as a whole (benchmarks/codebook.py)")

    def begin(self, codes: Codes, first: Expr, count: int, starts: list[Expr | None], emulated: bool) -> Sums:
        return _ByteSums(self, codes, first, count, starts)


class _ByteSums(Sums):
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

    def step(self, turn: Expr, place: int, unroll: int, weights: Expr, at: Expr) -> None:
        dot, codes = self._dot, self._codes
        size, pairs = dot.bytes, f"int16x{2 * dot.lanes}"
        columns = [T.Bind(weights[span(at + j * size, size)]) for j in range(len(self._acc[0]))]
        for i, row in enumerate(self._acc):
            start = (self._first + i) * codes.width + (turn * unroll + place) * dot.group
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
        return [[w[span(0, self._dot.lanes)] for w in row] for row in self._wide]


_BYTES = Bytes("bytes", 8, _GROUP, 4, vectors=2)


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
    def dot(self) -> Dot:
        """How products are summed."""
        return _BYTES if self.bytes else dot_of(self.isa)

    @property
    def most(self) -> int:
        """Largest code of a vector."""
        return BYTES_LEVELS if self.bytes else LEVELS

    @property
    def codes_dtype(self) -> str:
        """Of stored codes of vectors."""
        return "uint8" if self.bytes else self.isa.codes_dtype

    @property
    def codes_offset(self) -> int:
        """What storage adds to a code."""
        return BYTES_OFFSET if self.bytes else self.isa.codes_offset

    @property
    def panels(self) -> Panels:
        """The cut of the codebook."""
        return panels_of(self.codes, self.isa, self.dot.rows, most=self.dot.vectors)

    @property
    def width(self) -> int:
        """Elements of a stored row of codes, in whole blocks of steps."""
        return round_up(self.features, BLOCK * _GROUP if self.bytes else 16)

    @property
    def steps(self) -> int:
        """Steps over the features."""
        return self.width // self.dot.group

    @property
    def starts(self) -> int:
        """Elements of what the sums of a level start at: int16, or int32 where sums are; 0 for zero."""
        if self.bytes:
            return self.panels.count * (self.steps // BLOCK) * self.panels.vectors * 2 * self.dot.lanes
        return self.panels.padded if self.codes_offset else 0

    @property
    def layout(self) -> Layout:
        """The order of packed weights: how (codes, features) becomes them."""
        blocks, axes = self.dot.order(self.panels.count, self.panels.vectors, self.steps)
        return Layout((self.panels.padded, self.steps * self.dot.group), blocks, axes)

    def sums(
        self, codes: Codes, weights: Expr, starts: Expr | None, level: Expr, panel: Expr, first: Expr, count: int, turns: Expr
    ) -> list[list[Expr]]:
        """Emit a tile: int32 vectors [row][vector] of rows `first` to `first + count` against a panel of a level. turns: steps of a block,
        read at run time: the compiler would unroll a loop of a number it knows, and run out of registers."""
        panels, dot = self.panels, self.dot
        size = panels.vectors * dot.bytes
        base = T.Bind((level * panels.count + panel) * (self.steps * size))
        if self.bytes:
            assert starts is not None
            made = dot.begin(codes, first, count, [None] * panels.vectors, self.isa.emulated)
            assert isinstance(made, _ByteSums)
            blocks, lanes = self.steps // BLOCK, 2 * dot.lanes
            place = T.Bind((level * panels.count + panel) * (blocks * panels.vectors * lanes))
            with T.serial(T.int64(0), T.int64(blocks)) as block:
                at = T.Bind(place + block * (panels.vectors * lanes))
                made.open([T.Bind(starts[span(at + j * lanes, lanes)]) for j in range(panels.vectors)])
                with T.serial(T.int64(0), turns) as inner:
                    step = T.Bind(block * BLOCK + inner)
                    made.step(step, 0, 1, weights, T.Bind(base + step * size))
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


@dataclass(frozen=True)
class CoarseLevel:
    """One codebook in int8: a code is about mean + scale * weights.

    weights: (K, d) int8. scale: (K,) float32. mean: (d,) float32; what it adds is the same for all codes. part: a row's scale is at least
    this times the length of any of its parts that are summed in int16; 0 where sums are int32.
    off, apart: largest |code - mean - scale * weights|, and the largest distance of two such differences. radius, diameter: largest
    |code - mean|, and of two codes. All float64, and rounded up when they are used.
    """

    weights: npt.NDArray[np.int8]
    scale: Floats
    mean: Floats
    part: float
    off: float
    apart: float
    radius: float
    diameter: float


def quantize_codebook(coarse: Coarse, codes: Floats, used: npt.NDArray[np.bool_] | None = None) -> CoarseLevel:
    """codes: (K, d) float32, finite; used: (K,), rows that can be chosen, None for all -> the int8 codebook."""
    used = np.ones(len(codes), np.bool_) if used is None else used
    mean = codes[used].astype(np.float64).mean(0).astype(np.float32)
    if _radius(mean[None].astype(np.float64)) < CENTERED * _radius(codes[used].astype(np.float64)):
        mean[:] = 0
    wide = np.where(used[:, None], codes.astype(np.float64) - mean, 0.0)
    peak = np.abs(wide).max(1)
    scale = np.where(peak > 0, peak / LEVELS, 1.0).astype(np.float32)
    weights = np.clip(np.rint(wide / scale[:, None]), -LEVELS, LEVELS).astype(np.int8)
    part = 0.0
    if coarse.bytes:
        longest = float(np.sqrt(np.square(_lanes(coarse, weights)).sum(-1).max()))
        # Rounding adds half to each of the 16 codes of a part, so 2 to its length. 2^-10 pays for float32.
        part = (1 + 2.0**-10) / (_LIMIT / max(1.0, longest) - 0.5 * (2 * BLOCK) ** 0.5)
    rest = wide - scale[:, None].astype(np.float64) * weights
    return CoarseLevel(weights, scale, mean, part, _radius(rest), _diameter(rest[used]), _radius(wide), _diameter(wide[used]))


def _radius(rows: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(rows).sum(1).max()))


def _diameter(rows: npt.NDArray[np.float64]) -> float:
    """Largest distance of two rows, or twice the radius where these are too many; never less than it is."""
    if len(rows) > DIAMETER_CODES:
        return 2 * _radius(rows)
    squares, largest = np.square(rows).sum(1), 0.0
    for first in range(0, len(rows), 1024):
        part = squares[first : first + 1024, None] + squares - 2 * rows[first : first + 1024] @ rows.T
        largest = max(largest, float(part.max()))
    return float(np.sqrt(largest + 1e-12 * squares.max()))


def _lanes(coarse: Coarse, weights: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
    """(K, d) -> (K, blocks, 2, 16): what one lane of int16 sums in a block of steps."""
    padded = np.zeros((len(weights), coarse.width), np.int32)
    padded[:, : weights.shape[1]] = weights
    split = padded.reshape(len(weights), -1, BLOCK, 2, _GROUP // 2)
    return split.transpose(0, 1, 3, 2, 4).reshape(len(weights), split.shape[1], 2, -1)


def pack_starts(coarse: Coarse, weights: npt.NDArray[np.int8]) -> npt.NDArray[np.generic] | None:
    """weights: (K, d) int8 -> what the sums of a level start at, flat; None for zero."""
    panels = coarse.panels
    if not coarse.starts:
        return None
    padded = np.zeros((panels.padded, coarse.width), np.int8)
    padded[: len(weights), : weights.shape[1]] = weights
    if not coarse.bytes:
        start = coarse.dot.column_start(padded, coarse.codes_offset)
        assert start is not None
        return start
    sums = -coarse.codes_offset * _lanes(coarse, padded).sum(-1)  # (padded, blocks, 2)
    wrapped = sums.astype(np.int64).astype(np.uint16).view(np.int16)
    blocks = wrapped.shape[1]
    order = wrapped.reshape(panels.count, panels.vectors, panels.lanes, blocks, 2).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(order).reshape(-1)
