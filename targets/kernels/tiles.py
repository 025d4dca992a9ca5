"""What the GEMM kernels share: panels of columns, tiles of rows, and the last steps of a result on its way to memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa

from . import fmla_lane
from .act import activation
from .vec import Expr, fma, prefetch, rounded, small, span, splat, store

ROWS_MOST = 6
"""Rows of a tile: 6 x 2 of 8 lanes and 6 x 4 of 16 lanes fill 16 and 32 registers; more rows spill."""
TASKS = 16
"""Pieces of parallel work aimed at; with fewer column panels than this, rows are cut into blocks too."""
ROW_BLOCK = 48
"""Fewest rows of a block, so that reading a panel of weights again for the next block stays a small part."""
BLOCK_BYTES = 128 << 10
"""Most bytes of the left matrix in a block of rows: every panel walks them, so they have to stay in a 512 KiB L2."""
LINE = 64
"""Bytes of a cache line."""
_STACK_FLOATS = 255
"""TVM turns a buffer of 1,024 bytes or more into a heap call."""


@dataclass(frozen=True)
class Tile:
    """How a GEMM kernel walks its matrices. No choice changes a result: every sum keeps its one order.

    rows, vectors:  of the accumulators of a full tile; a panel of columns is `vectors` registers wide.
    unroll:         steps over k in one turn of the innermost loop.
    ahead:          bytes ahead in the packed weights that each step asks for; 0 for none.
    ahead_few:      the same for a tile of one row and one panel, which uses weights up fastest (float32: for tiles that are not full).
    block:          most bytes of the left matrix in a block of rows, which all panels walk.
    panels_first:   tasks go through all panels of a block of rows, then the next block; else through all blocks of a panel.
    """

    rows: int
    vectors: int
    unroll: int = 1
    ahead: int = 0
    ahead_few: int = 0
    block: int = BLOCK_BYTES
    panels_first: bool = True

    def check(self, isa: Isa, name: str, steps: int, registers: int | None = None) -> None:
        """Raise LoweringError for a tile that no register file holds, with sizes that mean nothing, or turns that do not divide `steps`.

        registers: that its sums fill, where that is not one for each row and vector.
        """
        registers = self.rows * self.vectors if registers is None else registers
        if min(self.rows, self.vectors, self.unroll, self.block) < 1 or min(self.ahead, self.ahead_few) < 0:
            raise LoweringError(f"{name}: {self}; needed: rows, vectors, unroll, block of at least 1, ahead of at least 0")
        if registers > isa.registers - 2:
            raise LoweringError(
                f"{name}: {self.rows} rows of {self.vectors} vectors take {registers} registers; {isa.name} has {isa.registers}, "
                f"two of them for operands; use fewer rows or vectors"
            )
        if steps % self.unroll:
            raise LoweringError(f"{name}: {steps} steps over k in turns of {self.unroll}; needed: a divisor")


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


def panels_of(n: int, isa: Isa, rows: int = ROWS_MOST, vectors: int | None = None, most: int = 0) -> Panels:
    """Cut n columns for an instruction set: few vectors of padding, and wide panels where the register file allows.

    rows: rows of a full tile; vectors: of a panel, instead of that choice; most: vectors of a panel at most, 0 for what registers allow.
    """
    lanes = isa.lanes
    if vectors is not None:
        return Panels(n, lanes, vectors, rows)
    most = most or (2 if isa.registers == 16 else 4)
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

    def scratch(self, rows: int | None = None) -> list[Expr]:
        """Buffers for one tile of `rows` rows (default: a full one), each of a few whole rows."""
        if self.direct:
            return []
        rows = self.panels.rows if rows is None else rows
        return [small(min(self._step, rows - first) * self.panels.width, self.dtype) for first in range(0, rows, self._step)]

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


EmitTile = Callable[[list[list[Expr]], list[Expr], Expr, int], None]
"""(scratch of each panel, panels side by side, first row, number of rows): emit one tile, its values going to `sink.put`."""


def for_tiles(rows: Expr, row_bytes: int, sink: Sink, tile: EmitTile, how: Tile, groups: Sequence[int] = ()) -> None:
    """Emit `tile` over all rows (int64) and panels, in parallel.

    The number of rows is a Python int: `panels.rows`, or less for what is left at the end. Rows are cut into blocks that
    stay in the cache while all panels pass, and into smaller ones where there are too few panels to share out.

    row_bytes: of the left matrix.
    how: see Tile.
    groups: panels side by side in a tile where the whole matrix has 1, 2, .. rows: few rows alone would leave registers empty.
    """
    if not groups:
        _all_rows(rows, row_bytes, sink, tile, how)
        return
    *fewer, group = groups
    count, group = len(groups), math.gcd(sink.panels.count, group)
    if group == 1:
        for_tiles(rows, row_bytes, sink, tile, how, fewer)
        return
    with T.If(rows == count):
        with T.Then():
            _few_rows(count, group, sink, tile)
        with T.Else():
            for_tiles(rows, row_bytes, sink, tile, how, fewer)


def _few_rows(count: int, group: int, sink: Sink, tile: EmitTile) -> None:
    """All rows in one tile, `group` panels wide, from as many parts of the matrix: each is read from its start to its end."""
    tasks = sink.panels.count // group
    with T.parallel(T.int64(0), T.int64(tasks)) as task:
        panels = [opaque(task + g * tasks) for g in range(group)]
        scratch = [sink.scratch(count) for _ in panels]
        tile(scratch, panels, T.int64(0), count)
        for panel, buffers in zip(panels, scratch, strict=True):
            sink.finish(buffers, panel, T.int64(0), T.int64(count))


def _all_rows(rows: Expr, row_bytes: int, sink: Sink, tile: EmitTile, how: Tile) -> None:
    panels = sink.panels
    most = max(ROW_BLOCK, how.block // row_bytes) // panels.rows * panels.rows
    cuts = -(-TASKS // panels.count)
    even = T.ceildiv(rows, T.int64(cuts * panels.rows)) * panels.rows
    least = opaque(T.ceildiv(rows, T.min(T.max(even, T.int64(ROW_BLOCK)), T.int64(most))))
    # Equal blocks: threads get runs of tasks, and a small last block would leave one of them with less to do.
    block = opaque(T.ceildiv(rows, T.max(least, T.int64(1)) * panels.rows) * panels.rows)
    blocks = opaque(T.ceildiv(rows, T.max(block, T.int64(1))))
    with T.parallel(T.int64(0), blocks * panels.count) as task:
        inner = T.int64(panels.count) if how.panels_first else blocks
        outer = opaque(T.truncdiv(task, inner))
        rest = task - outer * inner
        number, panel = (outer, opaque(rest)) if how.panels_first else (opaque(rest), outer)
        first = opaque(number * block)
        scratch = sink.scratch()
        walk_rows(
            first,
            opaque(T.min(rows, first + block)),
            panels.rows,
            lambda row, count: tile([scratch], [panel], row, count),
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


def ask_ahead(
    weights: Expr, panels: Panels, side: Sequence[Expr], step: int, steps: int, bytes_each: int, ahead: int
) -> Callable[[Expr], None] | None:
    """A function that emits the prefetches of one step in panels side by side: lines `ahead` bytes further in the packed weights.

    step: elements of `weights` a step reads; steps: of a panel; bytes_each: of an element. The last panel asks for itself.
    None where `ahead` is 0.
    """
    if not ahead:
        return None
    last = T.int64((panels.count - 1) * steps * step)
    starts = [T.Bind(T.min(panel * (steps * step) + ahead // bytes_each, last)) for panel in side]

    def emit(index: Expr) -> None:
        for start in starts:
            for line in range(0, step * bytes_each, LINE):
                prefetch(weights, start + index * step + line // bytes_each)

    return emit


def multiply_add(
    panels: Panels,
    count: int,
    depth: Expr,
    start: Callable[[int, int], Expr],
    a: Callable[[int, Expr], Expr],
    b: Expr,
    bases: Sequence[Expr],
    ask: Callable[[Expr], None] | None = None,
    unroll: int = 1,
    rows: tuple[Expr, Callable[[Expr], Expr], int] | None = None,
) -> list[list[list[Expr]]]:
    """Emit float32 tiles side by side: acc[p][i][j] = start(p, j), then fma(a(i, k), b[p, k, j], acc) for k = 0 .. depth - 1 in order.

    a:      (row, k) -> scalar expression.
    b:      flat buffer of packed panels [k, vector, lane]; `bases` are where the panels p start.
    ask:    called with k first in each step.
    unroll: steps of one turn; divides the depth.
    rows:   where a tile takes several steps at once (fmla_lane.py): the flat buffer of a, k -> index of row 0, floats between rows.
    Returns the accumulators: small buffers that LLVM keeps in registers.
    """
    lanes, vectors = panels.lanes, panels.vectors
    acc = [[[small(lanes) for _ in range(vectors)] for _ in range(count)] for _ in bases]
    for p, tile in enumerate(acc):
        for j in range(vectors):
            value = T.Bind(start(p, j))
            for i in range(count):
                store(tile[i][j], value, 0)
    done: Expr = T.int64(0)
    if rows is not None:
        buffer, at, pitch = rows
        done = T.Bind(T.truncdiv(depth, T.int64(fmla_lane.STEPS)) * fmla_lane.STEPS)
        with T.serial(T.int64(0), T.truncdiv(depth, T.int64(fmla_lane.STEPS))) as turn:
            k = T.Bind(turn * fmla_lane.STEPS)
            if ask is not None:
                for step in range(fmla_lane.STEPS):
                    ask(k + step)
            sums = [[T.address_of(cell[0]) for cell in row] for row in acc[0]]
            fmla_lane.multiply_steps(sums, T.address_of(buffer[at(k)]), pitch, T.address_of(b[bases[0] + k * panels.width]))
        unroll = 1
    turns = depth - done if unroll == 1 else T.truncdiv(depth, T.int64(unroll))
    with T.serial(T.int64(0), turns) as turn:
        for u in range(unroll):
            k = done + turn if unroll == 1 else turn * unroll + u
            if ask is not None:
                ask(k)
            columns = [[T.Bind(b[span(base + k * panels.width + j * lanes, lanes)]) for j in range(vectors)] for base in bases]
            for i in range(count):
                row = T.Bind(splat(a(i, k), lanes))
                for p, tile in enumerate(acc):
                    for j in range(vectors):
                        store(tile[i][j], fma(row, columns[p][j], tile[i][j][span(0, lanes)]), 0)
    return acc
