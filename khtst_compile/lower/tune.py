"""`lower --tune`: measured tiles for the GEMMs of a program, as records that an artifact keeps and a later `lower` takes up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from khtst_compile.benchmark import plan_shapes
from khtst_compile.errors import ArtifactError, EnvironmentProblem
from khtst_compile.program import Program
from khtst_compile.targets.contract import Target, array
from khtst_compile.targets.kernels.tiles import Tile
from khtst_compile.targets.rules import GemmSpec, gemm_spec, tile_key
from khtst_compile.targets.search import Found, search


@dataclass(frozen=True)
class Record:
    """What was measured for one GEMM.

    kernel, isa, n, k, act, residual: what it holds for; rows: numbers of rows it was measured at; tile: the choice, None for the
    default; gain: time with it over time with the default; tried: candidates measured.
    """

    kernel: str
    isa: str
    n: int
    k: int
    act: str
    residual: bool
    rows: tuple[int, ...]
    tile: Tile | None
    gain: float
    tried: int

    @property
    def key(self) -> tuple[object, ...]:
        """As `rules.tile_key`."""
        return self.kernel, self.isa, self.n, self.k, self.act, self.residual

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": list(self.rows)}


_KINDS: dict[str, type | tuple[type, ...]] = {
    "kernel": str,
    "isa": str,
    "n": int,
    "k": int,
    "act": str,
    "residual": bool,
    "rows": list,
    "tile": (dict, type(None)),
    "gain": (int, float),
    "tried": int,
}


def records_of(manifest: Mapping[str, Any], where: object) -> list[Record]:
    """The records in a manifest; none where it was never tuned. Raises ArtifactError for damaged ones."""
    found = []
    entries = manifest.get("tuning", [])
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or any(not isinstance(entry.get(k), t) for k, t in _KINDS.items()):
            raise ArtifactError(
                f"{where}: manifest field 'tuning' holds {entry!r:.80}; needed: records as lower --tune writes; tune again"
            )
        try:
            tile = None if entry["tile"] is None else Tile(**entry["tile"])
        except TypeError as error:
            raise ArtifactError(
                f"{where}: manifest field 'tuning' holds a tile of another version ({error}); tune again"
            ) from error
        fields = {k: entry[k] for k in _KINDS if k not in ("rows", "tile")}
        found.append(Record(**fields, rows=tuple(int(m) for m in entry["rows"]), tile=tile))
    return found


def tiles(records: Iterable[Record]) -> dict[tuple[object, ...], Tile]:
    """The choices that differ from the default, as a target takes them."""
    return {r.key: r.tile for r in records if r.tile is not None}


def tune(
    program: Program,
    target: Target,
    seconds: float,
    known: Sequence[Record],
    say: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """Measure the GEMMs of a fused program that `known` does not cover, for about `seconds`; returns all records, those of `known` first.

    The time is shared equally among what is left to measure; a GEMM whose turn does not come has no record.
    Raises EnvironmentProblem where this machine cannot run the target.
    """
    lacking = target.unavailable()
    if lacking is not None:
        raise EnvironmentProblem(
            f"lower --tune: {target.name} cannot be measured here: {lacking}; tune where it runs, then use --tuned"
        )
    work = gemms(program, target)
    total = sum(count * spec.n * spec.k * (1 if spec.name == "gemm_i8" else 4) for spec, _, count in work)
    covered = {r.key for r in known}
    left = [(spec, rows) for spec, rows, _ in work if tile_key(spec) not in covered]
    records, end = list(known), now() + seconds
    for index, (spec, rows) in enumerate(left):
        share = (end - now()) / (len(left) - index)
        if share <= 0:
            say(f"tuning: no time left for {len(left) - index} of {len(left)} shapes; give --tune more seconds")
            break
        records.append(_record(search(spec, rows, total, now() + share, now), rows))
        last = records[-1]
        chosen = f"{last.gain:.3f} of the default's time with {last.tile}" if last.tile else "the default stays"
        say(f"tuning: {last.kernel} {last.n}x{last.k} at {', '.join(map(str, rows))} rows: {chosen} ({last.tried} tried)")
    return records


def _record(found: Found, rows: Sequence[int]) -> Record:
    s = found.spec
    return Record(s.name, s.isa.name, s.n, s.k, s.act, s.residual, tuple(rows), s.tile, round(found.gain, 4), found.tried)


def gemms(program: Program, target: Target) -> list[tuple[GemmSpec, tuple[int, ...], int]]:
    """(kernel, numbers of rows it will meet, how often it is called) of each distinct GEMM of a fused program."""
    tensors = program.tensors()

    def constants(node: Any) -> Any:
        return None if node is None else array(tensors[node.name])

    sizes = plan_shapes({"axes": {k: list(v) for k, v in program.axes.items()}}, None)
    found: dict[tuple[object, ...], tuple[GemmSpec, set[int], int]] = {}
    for node in program.graph.nodes:
        spec = gemm_spec(target.isa, node, constants, {}) if node.op == "call_function" else None
        if spec is None:
            continue
        key = tile_key(spec)
        _, rows, count = found.get(key, (spec, set(), 0))
        found[key] = (spec, rows | _rows(program, node, sizes), count + 1)
    return [(spec, tuple(sorted(rows)), count) for spec, rows, count in found.values()]


def _rows(program: Program, node: fx.Node, sizes: Sequence[Mapping[str, int]]) -> set[int]:
    """Products of the leading sizes of a node's first operand where the dynamic axes have these sizes."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    lead = first.meta["val"].shape[:-1]
    symbols = _symbols(program)
    found = set()
    for given in sizes:
        values = {symbol: given[axis] for symbol, axis in symbols.items() if axis in given}
        exact = [int(n) if isinstance(n, int) else n.node.expr.subs(values) for n in lead]
        found.add(math.prod(int(n) for n in exact))
    return found - {0}


def _symbols(program: Program) -> dict[Any, str]:
    """Symbol of the graph -> name of the dynamic axis it is the size of."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    found: dict[Any, str] = {}
    for name, spec in zip(program.user_inputs(), program.inputs, strict=True):
        for size, axis in zip(placeholders[name].meta["val"].shape, spec.shape, strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                found[size.node.expr] = axis
    return found
