"""Slots sorted by the expert they ask for, and the work on them cut into equal pieces.

A slot is one of a row's top_k. Rows are cut into at most `parts` runs; a bucket holds the slots of one run and one expert, rows ascending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from .tiles import opaque
from .vec import Expr, small

PIECES = 32
"""Pieces the work on panels is cut into: few enough that finding them costs nothing, many enough for 8 threads to end together."""
LEAST_ROWS = 8
"""Rows a panel costs at least as much as: so long its weights take to arrive."""


@dataclass(frozen=True)
class Slots:
    """Where the slots of a block of rows went.

    row, expert: int32 of each place, the row in the tensors and its expert; weight: float32 of each place. expert is None where nobody
    reads it: TVM would shrink its memory to what one store needs.
    first, count: int32 of each bucket, where its places begin and how many they are.
    active: buckets with slots, ascending; base: before each of them, the sum of what panels cost in those before it.
    state: [how many are active, places in use (holes included), rows of a run, runs].
    lost: int32 of each row of the block, 1 where its weights hold a NaN.
    """

    row: Expr
    expert: Expr | None
    weight: Expr
    first: Expr
    count: Expr
    active: Expr
    base: Expr
    state: Expr
    lost: Expr

    def number(self, index: int) -> Expr:
        """An entry of `state` as int64."""
        return T.Bind(T.cast(self.state[index], "int64"))


def allocate(experts: int, parts: int, rows: Expr, places: Expr, named: bool) -> Slots:
    """Memory for blocks of at most `rows` rows with `places` places. named: whether anyone reads `Slots.expert`."""

    def room(size: Expr, dtype: str = "int32") -> Expr:
        return T.alloc_buffer((size,), dtype, scope="global")

    buckets = experts * parts
    return Slots(
        room(places),
        room(places) if named else None,
        room(places, "float32"),
        room(buckets),
        room(buckets),
        room(buckets),
        room(buckets + 1, "int64"),
        room(4),
        room(rows),
    )


def sort(
    slots: Slots,
    ids: Expr,
    weights: Expr,
    top_k: int,
    experts: int,
    parts: int,
    aligned: int,
    least_rows: int,
    first: Expr,
    rows: Expr,
) -> None:
    """Emit the sort of rows `first` to `first + rows` (int64). ids, weights: flat, top_k each row.

    Rows are cut into `parts` runs where each has `least_rows`. A bucket begins at a multiple of `aligned`. Slots without an expert, and
    all of lost rows, go nowhere.
    """
    runs = T.Bind(T.Select(rows >= parts * least_rows, T.int64(parts), T.int64(1))) if parts > 1 else T.int64(1)
    length = opaque(T.max(T.ceildiv(rows, runs), T.int64(1)))
    T.buffer_store(slots.state, T.cast(length, "int32"), [2])
    T.buffer_store(slots.state, T.cast(runs, "int32"), [3])
    buckets = opaque(runs * experts)
    with T.serial(T.int64(0), buckets) as b:
        T.buffer_store(slots.count, T.int32(0), [b])

    def each(body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """body(row of the block, slot, expert, bucket) for slots that go somewhere."""
        with T.serial(T.int64(0), rows) as row, T.If(slots.lost[row] == 0), T.Then():
            run = opaque(T.truncdiv(row, length))
            with T.serial(T.int64(0), T.int64(top_k)) as j:
                slot = opaque((first + row) * top_k + j)
                expert = opaque(T.cast(ids[slot], "int64"))
                with T.If(T.And(expert >= 0, expert < experts)), T.Then():
                    body(row, slot, expert, opaque(run * experts + expert))

    with T.serial(T.int64(0), rows) as row:
        T.buffer_store(slots.lost, T.int32(0), [row])
        with T.serial(T.int64(0), T.int64(top_k)) as j:
            size = T.bitwise_and(T.reinterpret("int32", weights[(first + row) * top_k + j]), T.int32(0x7FFFFFFF))
            with T.If(size > T.int32(0x7F800000)), T.Then():
                T.buffer_store(slots.lost, T.int32(1), [row])
    each(lambda row, slot, expert, bucket: T.buffer_store(slots.count, slots.count[bucket] + 1, [bucket]))
    place, active, cost = (small(1, t) for t in ("int32", "int32", "int64"))
    for cell in (place, active, cost):
        T.buffer_store(cell, T.cast(T.int32(0), str(cell.dtype)), [0])
    with T.serial(T.int64(0), buckets) as b:
        count = T.Bind(slots.count[b])
        T.buffer_store(slots.first, place[0], [b])
        with T.If(count > 0), T.Then():
            T.buffer_store(slots.active, T.cast(b, "int32"), [T.cast(active[0], "int64")])
            T.buffer_store(slots.base, cost[0], [T.cast(active[0], "int64")])
            T.buffer_store(active, active[0] + 1, [0])
            T.buffer_store(cost, cost[0] + T.cast(T.max(count, T.int32(LEAST_ROWS)), "int64"), [0])
            T.buffer_store(place, place[0] + T.truncdiv(count + (aligned - 1), T.int32(aligned)) * aligned, [0])
        T.buffer_store(slots.count, T.int32(0), [b])
    T.buffer_store(slots.base, cost[0], [T.cast(active[0], "int64")])
    T.buffer_store(slots.state, active[0], [0])
    T.buffer_store(slots.state, place[0], [1])
    if aligned > 1:  # holes read row `first`, whoever it asks for
        with T.serial(T.int64(0), T.cast(place[0], "int64")) as hole:
            T.buffer_store(slots.row, T.cast(first, "int32"), [hole])
            if slots.expert is not None:
                T.buffer_store(slots.expert, T.int32(0), [hole])

    def put(row: Expr, slot: Expr, expert: Expr, bucket: Expr) -> None:
        at = opaque(T.cast(slots.first[bucket] + slots.count[bucket], "int64"))
        T.buffer_store(slots.row, T.cast(first + row, "int32"), [at])
        if slots.expert is not None:
            T.buffer_store(slots.expert, T.cast(expert, "int32"), [at])
        T.buffer_store(slots.weight, weights[slot], [at])
        T.buffer_store(slots.count, slots.count[bucket] + 1, [bucket])

    each(put)


def for_pieces(slots: Slots, units: int, experts: int, body: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
    """Emit, in parallel, `body(expert, first place, places, unit)` for every bucket and 0 <= unit < units, pieces of equal cost."""
    active = slots.number(0)
    total = T.Bind(slots.base[active] * units)
    with T.parallel(T.int64(0), T.int64(PIECES)) as piece:
        begin = opaque(T.truncdiv(total * piece, T.int64(PIECES)))
        end = opaque(T.truncdiv(total * (piece + 1), T.int64(PIECES)))
        with T.serial(T.int64(0), active) as a:
            before = T.Bind(slots.base[a])
            cost = opaque(slots.base[a + 1] - before)
            start = opaque(before * units)
            with T.If(T.And(start < end, start + cost * units > begin)), T.Then():

                def unit_at(limit: Expr, start: Expr = start, cost: Expr = cost) -> Expr:
                    ahead = T.max(limit - start, T.int64(0))
                    return opaque(T.min(T.truncdiv(ahead + cost - 1, cost), T.int64(units)))

                low, high = unit_at(begin), unit_at(end)
                bucket = opaque(T.cast(slots.active[a], "int64"))
                expert = opaque(T.truncmod(bucket, T.int64(experts)))
                first = opaque(T.cast(slots.first[bucket], "int64"))
                places = opaque(T.cast(slots.count[bucket], "int64"))
                with T.serial(T.int64(0), high - low) as u:
                    body(expert, first, places, opaque(low + u))
