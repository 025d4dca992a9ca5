"""One program built for several instruction sets: in processes side by side, with every matrix stored once.

A build takes a processor for seconds, and TVM's Python parts cannot be entered by two threads. Each further process loads the quantized
artifact for itself, so that nothing depends on what the first has in memory, threads included.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from khtst_compile import errors
from khtst_compile.errors import KhtstError, ResourceError
from khtst_compile.layout import Layout, Packed
from khtst_compile.lower.digest import digest
from khtst_compile.targets import table
from khtst_compile.targets.contract import Target

if TYPE_CHECKING:
    from khtst_compile.lower.relax import Graph
    from khtst_compile.lower.tune import Record

Array = npt.NDArray[Any]
HELPERS = "helpers"  # where helpers write, inside the folder being made
FAILURE, OUTPUT, RECORDS = "failure.json", "output.txt", "tuning.json"


@dataclass(frozen=True)
class Weight:
    """One argument of a library: the array with that digest, as it is or in a layout."""

    digest: str
    layout: Layout | None = None


@dataclass(frozen=True)
class Built:
    """A library that was built. target: its name; weights: its arguments; macs: multiply-adds a row, by kernel; calls: the kernels
    called, in order (fields of relax.Call); build_s: wall time."""

    target: str
    weights: tuple[Weight, ...]
    macs: dict[str, int]
    calls: list[dict[str, Any]]
    build_s: float


def library_name(target: Target) -> str:
    """The library's file in the artifact."""
    return f"model-{target.isa.name}.so"


def build_variant(graph: Graph, target: Target, folder: Path, arrays: dict[str, Array], records: Sequence[Record] = ()) -> Built:
    """Build for `target` into `folder`, with the tiles of `records`; what its weights are made of is added to `arrays`, by digest."""
    from khtst_compile.lower.build import build, export_library
    from khtst_compile.lower.relax import to_relax
    from khtst_compile.lower.tune import tiles

    started = time.perf_counter()
    target = target.tuned(tiles(records))
    lowered = to_relax(graph, target)
    export_library(build(lowered.module, target), folder / library_name(target), target)
    weights = []
    for weight in lowered.weights:
        layout = weight.layout if isinstance(weight, Packed) else None
        array = np.ascontiguousarray(weight.matrix if isinstance(weight, Packed) else weight)
        weights.append(Weight(digest(array), layout))
        arrays.setdefault(weights[-1].digest, array)
    calls = [asdict(c) for c in lowered.calls]
    return Built(target.name, tuple(weights), lowered.macs, calls, round(time.perf_counter() - started, 3))


class Helpers:
    """Processes that build the `targets` beyond the first share, from the artifact at `source` into folders of their own inside `folder`.

    processes: how many builds run side by side, this process's own included; records: tiles that were measured, for all of them.
    As a context: what still runs at the end is stopped.
    """

    def __init__(self, source: Path, targets: Sequence[Target], folder: Path, processes: int, records: Sequence[Record] = ()):
        self.records = tuple(records)
        count = max(1, min(processes, len(targets)))
        self.own = tuple(targets[::count])
        self._names = [[t.name for t in targets[i::count]] for i in range(1, count)]
        self._folder = folder / HELPERS
        self._processes: list[subprocess.Popen[bytes]] = []
        self._source = source
        self.triple = targets[0].isa.triple

    def __enter__(self) -> Helpers:
        path = os.pathsep.join(p for p in sys.path if p)
        for number, names in enumerate(self._names):
            place = self._folder / str(number)
            place.mkdir(parents=True)
            (place / RECORDS).write_text(json.dumps([r.to_json() for r in self.records]), encoding="utf-8")
            command = [sys.executable, "-m", "khtst_compile.lower.helper", str(self._source), str(place), self.triple, *names]
            with (place / OUTPUT).open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "PYTHONPATH": path},
                        start_new_session=True,  # an interrupt is this process's to handle
                    )
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def results(self, graph: Graph, folder: Path, arrays: dict[str, Array]) -> list[Built]:
        """Wait, and take over libraries and arrays. Raises what a build raised."""
        built = []
        for number, process in enumerate(self._processes):
            place = self._folder / str(number)
            code = process.wait()
            if code:
                _fail(place, self._names[number], code)
            for name in self._names[number]:
                built.append(_take(place, name, graph, folder, arrays))
        return built


def _fail(place: Path, names: list[str], code: int) -> None:
    """Raise what a helper died of."""
    if (place / FAILURE).is_file():
        failure = json.loads((place / FAILURE).read_text(encoding="utf-8"))
        kind = getattr(errors, failure["class"], None)
        if isinstance(kind, type) and issubclass(kind, KhtstError):
            raise kind(failure["message"])
    if code < 0:
        raise ResourceError(
            f"the process that built {', '.join(names)} was ended by {signal.Signals(-code).name}; "
            "if memory ran out: lower with --threads 1, or for one of these targets at a time"
        )
    last = ((place / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    raise RuntimeError(f"building {', '.join(names)}: {last}")


def write_results(place: Path, built: Built, graph: Graph, arrays: dict[str, Array]) -> None:
    """What `results` reads, beside the library."""
    for key, array in arrays.items():
        if not (place / f"{key}.npy").is_file():
            np.save(place / f"{key}.npy", array)
    weights = [{"digest": w.digest, "layout": None if w.layout is None else str(w.layout)} for w in built.weights]
    text = json.dumps(
        {
            "weights": weights,
            "macs": built.macs,
            "calls": built.calls,
            "build_s": built.build_s,
            "taps": [asdict(t) for t in graph.taps],
        }
    )
    (place / f"{built.target}.json").write_text(text, encoding="utf-8")


def _take(place: Path, name: str, graph: Graph, folder: Path, arrays: dict[str, Array]) -> Built:
    data = json.loads((place / f"{name}.json").read_text(encoding="utf-8"))
    assert data["taps"] == json.loads(json.dumps([asdict(t) for t in graph.taps])), "two processes fused one program differently"
    weights = tuple(Weight(w["digest"], Layout.parse(w["layout"]) if w["layout"] else None) for w in data["weights"])
    for weight in weights:
        if weight.digest not in arrays:
            arrays[weight.digest] = np.load(place / f"{weight.digest}.npy", allow_pickle=False)
    library = library_name(table.target(name))
    (place / library).rename(folder / library)
    return Built(name, weights, data["macs"], data["calls"], data["build_s"])


def merge(built: Sequence[Built], arrays: dict[str, Array]) -> tuple[list[Array], list[dict[str, Any]]]:
    """The arrays to store, and for each library its arguments: "arrays", their places, and "layouts", None or the text of a Layout.

    A matrix that all libraries read in one layout is stored in it, and needs no work when it is loaded.
    """
    layouts: dict[str, set[Layout | None]] = {}
    for library in built:
        for weight in library.weights:
            layouts.setdefault(weight.digest, set()).add(weight.layout)
    places = {key: place for place, key in enumerate(layouts)}
    stored = []
    for key, used in layouts.items():
        only = next(iter(used)) if len(used) == 1 else None
        stored.append(only.apply(arrays[key]) if only is not None else arrays[key])
    arguments = [
        {
            "arrays": [places[w.digest] for w in library.weights],
            "layouts": [str(w.layout) if w.layout and len(layouts[w.digest]) > 1 else None for w in library.weights],
        }
        for library in built
    ]
    return stored, arguments
