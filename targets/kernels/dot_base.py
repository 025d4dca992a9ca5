"""What a way to sum products of int8 is to the GEMM kernels.

All sums are int32 modulo 2^32; the result of a dot product fits, so it is exact whatever the intermediate values were, and it does
not matter in which order an instruction set takes its terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import LoweringError

from .vec import Expr


@dataclass(frozen=True)
class Codes:
    """Codes as the innermost loop reads them.

    buffer:  flat.
    width:   elements of a row.
    terms:   int32 of each row, subtracted from where its sums start; None for zero.
    """

    buffer: Expr
    width: int
    terms: Expr | None = None


class Sums(ABC):
    """The sums of a tile while they are made, in small buffers that LLVM keeps in registers."""

    @abstractmethod
    def step(self, turn: Expr, place: int, unroll: int, weights: Expr, at: Expr) -> None:
        """Emit step `turn * unroll + place` over k, whose packed weights start at byte `at` of the flat int8 buffer."""

    def together(self) -> tuple[int, ...]:
        """How many steps `pairs` takes, most first; nothing where a tile leaves no registers for it."""
        return ()

    def pairs(self, steps: list[Expr], weights: Expr, at: list[Expr]) -> None:
        """Emit an even number of steps, whose packed weights start at bytes `at` and hold two by two to `step_order`. Only where
        `Dot.pairs`."""
        raise NotImplementedError

    @abstractmethod
    def result(self) -> list[list[Expr]]:
        """The sums, int32 vectors [row][vector of columns]."""


@dataclass(frozen=True)
class Dot(ABC):
    """One way to sum.

    kind:         its name, as `Isa.dot` has it.
    lanes:        int32 lanes of a vector of columns.
    group:        consecutive k one step takes in.
    rows:         rows of a default tile, whose accumulators, weights, codes and products fill the register file.
    unroll:       steps of one turn of the loop over k, by default.
    prefetch:     by default each step asks for the same step of the next panel. With 4 rows a panel that was not in the cache is used
                  up before hardware prefetching has followed: 9 % at 16 rows, 3 % at 128 (x86).
    vectors:      most vectors of a default panel; 0: what `panels_of` chooses.
    pairs:        two steps are taken at once where narrower sums hold the products of both, in an order that the weights decide.
    streams:      panels a single row walks side by side, each an equal part of the matrix from the next.
    aligned:      what the number of a tile's first row is a multiple of.
    whole_rows:   steps cover stored rows of codes with what fills them up, and not k alone: turns then come out even.
    """

    kind: str
    lanes: int
    group: int
    rows: int
    unroll: int = 1
    prefetch: bool = False
    vectors: int = 0
    whole_rows: bool = False
    pairs: bool = False
    streams: int = 1
    aligned: int = 1

    @property
    def bytes(self) -> int:
        """int8 weights of one vector of columns and one step."""
        return self.group * self.lanes

    @property
    @abstractmethod
    def chain_macs(self) -> int:
        """Multiply-adds of `chain`."""

    @abstractmethod
    def chain(self, old: Expr, weights: Expr, emulated: bool) -> Expr:
        """Products with the bytes of `old` itself, added to `old` (one register of int32): work that nothing can hoist or share.

        weights: flat int8 buffer, read from its start.
        """

    def registers(self, rows: int, vectors: int) -> int:
        """Registers that the sums of a tile fill."""
        return rows * vectors

    def check_rows(self, rows: int, name: str) -> None:
        """Raise LoweringError for a number of rows of a tile that this way cannot walk."""
        if rows < 1:
            raise LoweringError(f"{name}: tiles of {rows} rows; needed at least 1")

    def prepare(self, codes: Expr, rows: Expr, dims: list[Expr], width: int) -> Codes:
        """Emit what is to be done to all codes first.

        codes: flat (rows * width,), width a multiple of 16; dims: the dimensions whose product `rows` is.
        """
        return Codes(codes, width)

    @abstractmethod
    def begin(self, codes: Codes, first: Expr, count: int, starts: list[Expr | None], emulated: bool) -> Sums:
        """Emit the start of a tile's sums: rows `first` to `first + count`; one vector of columns for each of `starts`, None for 0."""

    def order(self, panels: int, vectors: int, steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks of the padded (n, k) weights, and the order of these axes in which `step` reads them."""
        return (panels, vectors, self.lanes, steps, self.group), (0, 3, 1, 2, 4)

    def column_start(self, weights: npt.NDArray[np.int8], offset: int) -> npt.NDArray[np.int32] | None:
        """What the sums of each column start at, (columns,) int32, or None for zero.

        weights: (columns, steps * group) int8; offset: what storage adds to a code.
        """
        return np.asarray(-offset * weights.sum(axis=1, dtype=np.int32), np.int32) if offset else None
