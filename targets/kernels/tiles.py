"""What the GEMM kernels share: panels of columns, tiles of rows, and the last steps of a result on its way to memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import Isa

from .act import activation
from .vec import Expr, rounded, shuffle, small, span, store

ROWS_MOST = 6
"""Rows of a tile: 6 x 2 of 8 lanes and 6 x 4 of 16 lanes fill 16 and 32 registers; more rows spill."""
TASKS = 16
"""Pieces of parallel work aimed at; with fewer column panels than this, rows are cut into blocks too."""
ROW_BLOCK = 48
"""Fewest rows of a block, so that reading a panel of weights again for the next block stays a small part."""
_STACK_FLOATS = 255
"""TVM turns a buffer of 1,024 bytes or more into a heap call."""


@dataclass(frozen=True)
class Panels:
    """How n columns are cut into panels of `vectors` registers of `lanes` columns, and rows into tiles.

    n:        columns.
    lanes:    32-bit lanes of a register.
    vectors:  registers side by side in a panel.
    rows:     rows of a full tile.
    """

    n: int
    lanes: int
    vectors: int
    rows: int

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.lanes * self.vectors

    @property
    def count(self) -> int:
        """Number of panels."""
        return -(-self.n // self.width)

    @property
    def padded(self) -> int:
        """Columns with the last panel filled up."""
        return self.count * self.width

    def valid(self, vector: int) -> int:
        """Columns that exist in one vector of the last panel, 0 to `lanes`."""
        start = (self.count - 1) * self.width + vector * self.lanes
        return max(0, min(self.lanes, self.n - start))


def panels_of(n: int, isa: Isa) -> Panels:
    """Cut n columns for an instruction set: few vectors of padding, and wide panels where the register file allows."""
    lanes = isa.lanes
    most = 2 if isa.registers == 16 else 4
    needed = -(-n // lanes)
    # One row of a panel costs its vectors, padding included, and about one more for the broadcast.
    vectors = min(range(most, 0, -1), key=lambda v: -(-needed // v) * (v + 1))
    return Panels(n, lanes, vectors, ROWS_MOST)


def for_tiles(rows: Expr, panels: Panels, tile: Callable[[Expr, Expr, int], None]) -> None:
    """Emit `tile(panel, first row, number of rows)` over all rows (an int64 expression) and panels, in parallel.

    The number of rows is a Python int: `panels.rows`, or less for what is left at the end.
    """

    def walk(panel: Expr, first: Expr, last: Expr) -> None:
        full = T.Bind(T.truncdiv(last - first, T.int64(panels.rows)))
        with T.serial(T.int64(0), full) as i:
            tile(panel, T.Bind(first + i * panels.rows), panels.rows)
        start = T.Bind(first + full * panels.rows)
        for left in range(1, panels.rows):
            with T.If(last - start == left), T.Then():
                tile(panel, start, left)

    cuts = -(-TASKS // panels.count)
    if cuts == 1:
        with T.parallel(T.int64(0), T.int64(panels.count)) as panel:
            walk(panel, T.int64(0), rows)
        return
    even = T.ceildiv(rows, T.int64(cuts * panels.rows)) * panels.rows
    block = T.Bind(T.max(even, T.int64(ROW_BLOCK)))
    blocks = T.Bind(T.ceildiv(rows, block))
    with T.parallel(T.int64(0), blocks * panels.count) as task:
        panel = T.Bind(T.truncdiv(task, blocks))
        first = T.Bind((task - panel * blocks) * block)
        walk(panel, first, T.Bind(T.min(rows, first + block)))


def put(buffer: Expr, value: Expr, start: Expr, valid: int, lanes: int, residual: Expr | None = None) -> None:
    """Store the first `valid` lanes from `start` (plus the residual there); nothing beyond is read or written."""
    if residual is not None:
        value = T.Bind(rounded(value))
    at, size = 0, lanes
    while size:
        if at + size <= valid:
            piece = value if size == lanes else shuffle(value, range(at, at + size))
            index = span(start + at, size) if size > 1 else start + at
            if residual is not None:
                piece = piece + residual[index]
            T.buffer_store(buffer, piece, [index])
            at += size
        size //= 2


@dataclass(frozen=True)
class Sink:
    """Where a tile's values go: activation, residual, then C.

    panels:    the cut of the columns.
    out:       flat (M * n,) buffer.
    act:       name of the activation.
    residual:  flat (M * n,) float32 buffer, or None.
    """

    panels: Panels
    out: Expr
    act: str = "none"
    residual: Expr | None = None

    def store_tile(self, panel: Expr, first: Expr, count: int, value: Callable[[int, int], Expr]) -> None:
        """Store `value(row of tile, vector of panel)` for `count` rows from row `first`."""
        if self.act == "none":
            self._store_rows(panel, lambda i: first + i, range(count), value)
            return
        lanes, width = self.panels.lanes, self.panels.width
        emit = activation(self.act).emit
        step = max(1, _STACK_FLOATS // width)
        for start in range(0, count, step):
            block = range(start, min(count, start + step))
            scratch = small(len(block) * width)
            for i in block:
                for j in range(self.panels.vectors):
                    store(scratch, value(i, j), (i - start) * width + j * lanes)
            # A loop: unrolled, a polynomial for every accumulator takes seconds to compile.
            with T.serial(T.int64(0), T.int64(len(block) * self.panels.vectors)) as v:
                store(scratch, emit(T.Bind(scratch[span(v * lanes, lanes)])), v * lanes)
            with T.serial(T.int64(0), T.int64(len(block))) as r:
                row = T.Bind(first + start + r)

                def activated(_: int, j: int, scratch: Expr = scratch, r: Expr = r) -> Expr:
                    return T.Bind(scratch[span(r * width + j * lanes, lanes)])

                self._store_rows(panel, lambda _, row=row: row, range(1), activated)  # type: ignore[misc]

    def _store_rows(self, panel: Expr, row: Callable[[int], Expr], block: range, value: Callable[[int, int], Expr]) -> None:
        cut = self.panels
        ragged = cut.n % cut.width != 0

        def emit(last: bool) -> None:
            for i in block:
                start = T.Bind(row(i) * cut.n + panel * cut.width)
                for j in range(cut.vectors):
                    valid = cut.valid(j) if last else cut.lanes
                    if valid:
                        put(self.out, value(i, j), start + j * cut.lanes, valid, cut.lanes, self.residual)

        if not ragged or cut.count == 1:
            emit(ragged)
            return
        with T.If(panel == cut.count - 1):
            with T.Then():
                emit(True)
            with T.Else():
                emit(False)
