"""Scaffolding of kernels that work row by row: leading dimensions, tails, chunks of rows in parallel, scratch memory.

A row kernel sees every tensor as (M, K), M the product of the leading dimensions, through a flat alias of its buffer. Rows
are handled in chunks, so that scratch memory is taken once a chunk and a parallel region has few, equal pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels.vec import LANES, Expr, dtype_of, f32, keep, lanes_of, shuffle2, small, span, splat, store

PARALLEL_ELEMENTS = 16384
"""Below this many elements a parallel region (about 5 us) costs more than a second core saves."""
CHUNK_ELEMENTS = 4096
"""Elements of one parallel piece: a few microseconds of work, and its scratch stays in the L1 cache."""


@dataclass(frozen=True)
class Lead:
    """The leading dimensions of a kernel's tensors, all merged into the rows of a matrix.

    ndim:   how many, 1, 2 or 3.
    shape:  the static ones; None stands for a symbolic one, () for all symbolic. Buffers of one kernel share them.
    """

    ndim: int = 2
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.ndim <= 3:
            raise LoweringError(f"row kernel: {self.ndim} leading dimensions; 1, 2 or 3 are supported; reshape the tensor")
        if self.shape and len(self.shape) != self.ndim:
            raise LoweringError(f"row kernel: lead shape {self.shape} has {len(self.shape)} entries, needed {self.ndim}")

    def dims(self) -> list[Expr]:
        """Fresh int64 dimensions, symbolic or constant."""
        shape = self.shape or (None,) * self.ndim
        return [tirx.Var(f"d{i}", "int64") if n is None else T.int64(n) for i, n in enumerate(shape)]


LEAD2 = Lead(2)
"""Two symbolic leading dimensions: batch and sequence."""


@dataclass
class Arguments:
    """The arguments of the kernel being built: declares them in order and hands out flat views.

    dims:     the leading dimensions, int64.
    pending:  (name, declared buffer, its elements from the number of rows, dtype) of the arguments so far; their views are made by
              `flatten`, since every argument has to be declared before the first statement. None: it is flat as it is.
    """

    dims: list[Expr]
    pending: list[tuple[str, Expr, Callable[[Expr], Expr] | None, str]] = field(default_factory=list)

    def rows(self, name: str, width: Expr | None, dtype: str = "float32", shared: bool = False) -> None:
        """Declare a tensor (lead.., width), or (lead..) when width is None; shared: of 1 in all leading dimensions but the last."""
        last = T.int64(width) if isinstance(width, int) else width
        dims = [*(T.int64(1) for _ in self.dims[:-1]), self.dims[-1]] if shared else self.dims
        buffer = T.arg(name, T.buffer([*dims] if last is None else [*dims, last], dtype))
        columns = 1 if last is None else last
        self.pending.append((name, buffer, lambda rows: (dims[-1] if shared else rows) * columns, dtype))

    def vector(self, name: str, length: int, dtype: str = "float32") -> None:
        """Declare a constant tensor (length,)."""
        buffer = T.arg(name, T.buffer((T.int64(length),), dtype))
        self.pending.append((name, buffer, None, dtype))

    def matrix(self, name: str, rows: int, columns: int, dtype: str = "float32") -> None:
        """Declare a constant tensor (rows, columns)."""
        buffer = T.arg(name, T.buffer((T.int64(rows), T.int64(columns)), dtype))
        self.pending.append((name, buffer, lambda _: T.int64(rows * columns), dtype))

    def flatten(self) -> tuple[Expr, dict[str, Expr]]:
        """Number of rows (int64) and, by name, every argument as a flat buffer."""
        rows = self.dims[0]
        for dim in self.dims[1:]:
            rows = rows * dim
        rows = T.Bind(rows)
        flat = {}
        for name, buffer, elements, dtype in self.pending:
            flat[name] = buffer if elements is None else T.decl_buffer((elements(rows),), dtype, data=buffer.data)
        return rows, flat


def round_up(value: int, step: int = LANES) -> int:
    """Smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def fixed(index: Expr) -> Expr:
    """An int64 index computed once: through a variable in memory (a register to LLVM), where TVM's simplifiers stop.

    They expand bound index expressions wherever these are used, which takes seconds once a kernel has divisions by symbols.
    """
    cell = T.alloc_buffer((1,), "int64", scope="global")
    T.buffer_store(cell, index, [0])
    return T.Bind(cell[0])


def each_vector(length: int, body: Callable[[Expr, int], None], unroll: int = 1) -> None:
    """Emit `body(offset, valid)` for every 16-lane piece of a row: a loop of full ones, then the tail (valid < 16).

    unroll: pieces per turn of the loop, for bodies with long chains of dependent operations.
    """
    full, tail = divmod(length, LANES)
    turns = full // unroll
    if turns:
        with T.serial(T.int64(0), T.int64(turns)) as j:
            for u in range(unroll):
                body(j * (LANES * unroll) + LANES * u, LANES)
    for k in range(turns * unroll, full):
        body(T.int64(k * LANES), LANES)
    if tail:
        body(T.int64(full * LANES), tail)


Source = Callable[[Expr, int, int], Expr]
"""source(offset, valid, lanes): `lanes` float32 of a row from `offset`, 0 beyond the first `valid`; fewer than all only of 16."""


def load(buffer: Expr, start: Expr, valid: int = LANES, lanes: int = LANES) -> Expr:
    """`lanes` float32 from `start`; only the first `valid` are read, the others are 0."""
    if valid == lanes:
        return T.Bind(buffer[span(start, lanes)])
    piece = small()
    store(piece, f32(0.0), 0)
    with T.serial(T.int64(0), T.int64(valid)) as i:
        T.buffer_store(piece, buffer[start + i], [i])
    return T.Bind(piece[span(0)])


def save(buffer: Expr, value: Expr, start: Expr, valid: int = LANES) -> None:
    """Store the first `valid` lanes from `start`; nothing beyond is written."""
    if valid == lanes_of(value):
        store(buffer, value, start)
        return
    piece = small(dtype=dtype_of(value).partition("x")[0])
    store(piece, value, 0)
    with T.serial(T.int64(0), T.int64(valid)) as i:
        T.buffer_store(buffer, piece[i], [start + i])


def only(value: Expr, valid: int) -> Expr:
    """The first `valid` lanes, 0 in the others."""
    if valid == lanes_of(value):
        return value
    return keep(shuffle2(value, splat(T.float32(0.0)), [i if i < valid else LANES + i for i in range(LANES)]))


@dataclass(frozen=True)
class Place:
    """A row of a chunk.

    row:      its number in the tensors.
    slot:     its number in the chunk.
    scratch:  float32 buffers by name, for what one phase leaves to the next; a row's part starts at slot * elements of a row.
    """

    row: Expr
    slot: Expr
    scratch: dict[str, Expr]


Phase = Callable[[Place], None]


def for_rows(rows: Expr, width: int, scratch: dict[str, int], parallel: bool, phases: Sequence[Phase]) -> None:
    """Emit every phase for all rows of a chunk before the next one, chunk by chunk, in parallel where there is enough work.

    A phase ends with what its whole row decides (a sum, a maximum, a division), and the next one needs that first. Rows of one
    phase do not depend on each other, so a processor begins the next row while such an end is still being computed.

    rows:     int64 expression.
    width:    elements of a row, from which the chunk is sized.
    scratch:  float32 elements a row of each scratch buffer.
    phases:   each emits its work for one row.
    """
    chunk = max(1, CHUNK_ELEMENTS // max(1, width))

    def piece(first: Expr) -> None:
        buffers = {name: T.alloc_buffer((chunk * n,), "float32", scope="global") for name, n in scratch.items()}
        count = T.Bind(T.min(T.int64(chunk), rows - first))
        for phase in phases:
            with T.serial(T.int64(0), count) as i:
                phase(Place(T.Bind(first + i), i, buffers))

    chunks = T.Bind(T.ceildiv(rows, T.int64(chunk)))
    if not parallel:
        with T.serial(T.int64(0), chunks) as c:
            piece(T.Bind(c * chunk))
        return
    with T.If(rows * width >= PARALLEL_ELEMENTS):
        with T.Then(), T.parallel(T.int64(0), chunks) as c:
            piece(T.Bind(c * chunk))
        with T.Else(), T.serial(T.int64(0), chunks) as c:
            piece(T.Bind(c * chunk))
