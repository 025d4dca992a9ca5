"""What the GEMM kernels share: panels of columns, tiles of rows, and the last steps of a result on its way to memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import Isa

from .act import activation
from .vec import Expr, fma, rounded, small, span, splat, store

ROWS_MOST = 6
"""Rows of a tile: 6 x 2 of 8 lanes and 6 x 4 of 16 lanes fill 16 and 32 registers; more rows spill."""
TASKS = 16
"""Pieces of parallel work aimed at; with fewer column panels than this, rows are cut into blocks too."""
ROW_BLOCK = 48
"""Fewest rows of a block, so that reading a panel of weights again for the next block stays a small part."""
BLOCK_BYTES = 128 << 10
"""Most bytes of the left matrix in a block of rows: every panel walks them, so they have to stay in a 512 KiB L2."""
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


def panels_of(n: int, isa: Isa, rows: int = ROWS_MOST) -> Panels:
    """Cut n columns for an instruction set: few vectors of padding, and wide panels where the register file allows.

    rows: rows of a full tile.
    """
    lanes = isa.lanes
    most = 2 if isa.registers == 16 else 4
    needed = -(-n // lanes)
    # One row of a panel costs its vectors, padding included, and about one more for the broadcast.
    vectors = min(range(most, 0, -1), key=lambda v: -(-needed // v) * (v + 1))
    return Panels(n, lanes, vectors, rows)


@dataclass(frozen=True)
class Sink:
    """Where a tile's values go: activation, residual, then C.

    A tile is stored from registers where nothing else is to be done. With an activation or a ragged last panel it goes
    through scratch memory, and the rest is a loop: unrolled for every accumulator and every number of rows, it takes
    seconds to compile.

    panels:    the cut of the columns.
    out:       flat (M * n,) buffer, float32 or int32.
    dtype:     of `out`.
    act:       name of the activation.
    residual:  flat (M * n,) float32 buffer, or None.
    """

    panels: Panels
    out: Expr
    dtype: str = "float32"
    act: str = "none"
    residual: Expr | None = None

    @property
    def direct(self) -> bool:
        """Whether tiles are stored from registers."""
        return self.act == "none" and self.panels.n % self.panels.width == 0

    @property
    def _step(self) -> int:
        return min(self.panels.rows, _STACK_FLOATS // self.panels.width)

    def scratch(self) -> list[Expr]:
        """Buffers for one tile, each of a few whole rows."""
        if self.direct:
            return []
        count = -(-self.panels.rows // self._step)
        return [small(self._step * self.panels.width, self.dtype) for _ in range(count)]

    def put(self, scratch: list[Expr], panel: Expr, first: Expr, row: int, vector: int, value: Expr) -> None:
        """Take the value of one vector of one row of the tile that starts at row `first`."""
        panels = self.panels
        if not self.direct:
            inside = row % self._step * panels.width + vector * panels.lanes
            store(scratch[row // self._step], value, inside)
            return
        start = T.Bind((first + row) * panels.n + panel * panels.width + vector * panels.lanes)
        if self.residual is not None:
            value = rounded(value) + self.residual[span(start, panels.lanes)]
        store(self.out, value, start)

    def finish(self, scratch: list[Expr], panel: Expr, first: Expr, count: Expr) -> None:
        """Store what is in scratch, for `count` rows (an int64 expression) from row `first`."""
        panels, step = self.panels, self._step
        for index, buffer in enumerate(scratch):
            here = T.Bind(T.min(T.max(count - index * step, T.int64(0)), T.int64(step)))
            if self.act != "none":
                with T.serial(T.int64(0), here * panels.vectors) as v:
                    value = activation(self.act).emit(T.Bind(buffer[span(v * panels.lanes, panels.lanes)]))
                    store(buffer, value, v * panels.lanes)
            with T.serial(T.int64(0), here) as r:
                start = T.Bind((first + index * step + r) * panels.n + panel * panels.width)
                self._store_row(buffer, r * panels.width, panel, start)

    def _store_row(self, buffer: Expr, inside: Expr, panel: Expr, start: Expr) -> None:
        panels = self.panels

        def full() -> None:
            for j in range(0, panels.width, panels.lanes):
                value = buffer[span(inside + j, panels.lanes)]
                if self.residual is not None:
                    value = value + self.residual[span(start + j, panels.lanes)]
                store(self.out, value, start + j)

        def ragged() -> None:
            with T.serial(T.int64(0), T.int64(panels.n % panels.width)) as c:
                value = buffer[inside + c]
                if self.residual is not None:
                    value = value + self.residual[start + c]
                T.buffer_store(self.out, value, [start + c])

        if panels.n % panels.width == 0:
            full()
            return
        with T.If(panel == panels.count - 1):
            with T.Then():
                ragged()
            with T.Else():
                full()


def for_tiles(rows: Expr, row_bytes: int, sink: Sink, tile: Callable[[list[Expr], Expr, Expr, int], None]) -> None:
    """Emit `tile(scratch, panel, first row, number of rows)` over all rows (int64) and panels, in parallel.

    The number of rows is a Python int: `panels.rows`, or less for what is left at the end. The tile gives its values to
    `sink.put`. Rows are cut into blocks that stay in the cache while all panels pass, and into smaller ones where there
    are too few panels to share out.

    row_bytes: of the left matrix.
    """
    panels = sink.panels
    most = max(ROW_BLOCK, BLOCK_BYTES // row_bytes) // panels.rows * panels.rows
    cuts = -(-TASKS // panels.count)
    even = T.ceildiv(rows, T.int64(cuts * panels.rows)) * panels.rows
    least = opaque(T.ceildiv(rows, T.min(T.max(even, T.int64(ROW_BLOCK)), T.int64(most))))
    # Equal blocks: threads get runs of tasks, and a small last block would leave one of them with less to do.
    block = opaque(T.ceildiv(rows, T.max(least, T.int64(1)) * panels.rows) * panels.rows)
    blocks = opaque(T.ceildiv(rows, T.max(block, T.int64(1))))
    with T.parallel(T.int64(0), blocks * panels.count) as task:
        number = opaque(T.truncdiv(task, T.int64(panels.count)))
        panel = opaque(task - number * panels.count)
        first = opaque(number * block)
        scratch = sink.scratch()
        walk_rows(
            first,
            opaque(T.min(rows, first + block)),
            panels.rows,
            lambda row, count: tile(scratch, panel, row, count),
            lambda row, count: sink.finish(scratch, panel, row, count),
        )


def walk_rows(
    first: Expr, last: Expr, most: int, tile: Callable[[Expr, int], None], finish: Callable[[Expr, Expr], None]
) -> None:
    """Emit `tile(row, count)` for tiles of `most` rows from `first` to `last` (int64), then for the fewer rows left.

    `count` is a Python int. `finish(row, count)`, with an int64 count, follows each tile.
    """
    full = T.Bind(T.truncdiv(last - first, T.int64(most)))
    with T.serial(T.int64(0), full) as i:
        row = opaque(first + i * most)
        tile(row, most)
        finish(row, T.int64(most))
    start = opaque(first + full * most)
    rest = opaque(last - start)
    for left in range(1, most):
        with T.If(rest == left), T.Then():
            tile(start, left)
    finish(start, rest)


def opaque(value: Expr) -> Expr:
    """An int64 expression through memory (LLVM removes it): TVM's simplifiers need not look into it at every use."""
    cell = T.alloc_buffer((1,), "int64", scope="global")
    T.buffer_store(cell, value, [0])
    return T.Bind(cell[0])


def multiply_add(
    panels: Panels, count: int, depth: Expr, start: Callable[[int], Expr], a: Callable[[int, Expr], Expr], b: Expr, base: Expr
) -> list[list[Expr]]:
    """Emit a float32 tile: acc[i][j] = start(j), then fma(a(i, k), b[k, j], acc) for k = 0 .. depth - 1 in order.

    a:     (row, k) -> scalar expression.
    b:     flat buffer of packed panels [k, vector, lane]; `base` is where this panel starts.
    Returns the accumulators: small buffers that LLVM keeps in registers.
    """
    lanes, vectors = panels.lanes, panels.vectors
    acc = [[small(lanes) for _ in range(vectors)] for _ in range(count)]
    for j in range(vectors):
        value = T.Bind(start(j))
        for i in range(count):
            store(acc[i][j], value, 0)
    with T.serial(T.int64(0), depth) as k:
        columns = [T.Bind(b[span(base + k * panels.width + j * lanes, lanes)]) for j in range(vectors)]
        for i in range(count):
            row = T.Bind(splat(a(i, k), lanes))
            for j in range(vectors):
                store(acc[i][j], fma(row, columns[j], acc[i][j][span(0, lanes)]), 0)
    return acc
