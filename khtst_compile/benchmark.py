"""How fast an artifact is beside torch and onnxruntime: engines take turns in one process, so that whatever else the machine does disturbs
all of them alike, and the figure that counts is the ratio within a round."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact as artifacts
from khtst_compile.api import GOLDEN
from khtst_compile.checks import check_count, check_type
from khtst_compile.engines import Engine, baseline_engines, open_engine
from khtst_compile.errors import UsageError
from khtst_compile.parity import relative_error_db, worst_cosine
from khtst_compile.signature import TensorSpec

Array = npt.NDArray[Any]
BASELINES = ("torch", "ort")
BURST_S = 0.05
"""An engine's turn: long enough that its weights are back in the cache for most of it, short enough for many turns."""
MIN_ROUNDS = 5


@dataclass(frozen=True)
class BenchRow:
    """One engine at one shape.

    shape: axis -> size; median_ms: of all its timed runs; ratio: the artifact's time over this engine's, median over rounds (below 1: the
    artifact is faster); error_db, worst_cosine: of the first output against torch in float32 on the same inputs (None without that
    baseline); rounds: turns taken.
    """

    engine: str
    shape: dict[str, int]
    median_ms: float
    ratio: float
    error_db: float | None
    worst_cosine: float | None
    rounds: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    artifact: str | Path,
    *,
    also: Sequence[str | Path] = (),
    baselines: Sequence[str] = BASELINES,
    shapes: Sequence[Sequence[int]] | None = None,
    threads: int = 1,
    seconds: float = 2.0,
    report: Callable[[str], None] | None = None,
) -> list[BenchRow]:
    """Time `artifact` (a folder of `lower`, or of `export`) beside others.

    also: further artifacts of the same model; baselines: "torch" (eager float32) and "ort" (onnxruntime, float32 and its own dynamic
    int8), made again from the model the artifact came from; shapes: sizes of the dynamic axes in the order of the manifest; threads: for
    every engine, 1 binds the process to one core; seconds: measuring time per engine and shape.
    Raises UsageError for unknown baselines or shapes and where that model is no longer there.
    """
    if unknown := [b for b in baselines if b not in BASELINES]:
        raise UsageError(f"bench: baseline {unknown[0]!r} is unknown; known: {', '.join(BASELINES)}")
    check_count(threads, "bench: threads")
    check_type(seconds, "bench: seconds", (int, float), "a number above 0")
    if not 0 < seconds < math.inf:
        raise UsageError(f"bench: seconds is {seconds}; needed: a number above 0")
    say = report or (lambda line: None)
    folder = artifacts.read(artifact, kind=("library", "onnx"))
    sizes = plan_shapes(folder.manifest, shapes)
    inputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
    golden = golden_inputs(folder)
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory() as scratch:
        engines = [open_engine(folder.path, threads)]
        engines += [open_engine(Path(p), threads) for p in also]
        engines = _distinct(engines, [folder.path, *map(Path, also)])
        engines += baseline_engines(folder.manifest, baselines, threads, Path(scratch), say)
        for size in sizes:
            feed = make_inputs(inputs, size, golden)
            rows += _measure(engines, feed, size, threads, seconds)
            say(f"bench: {shape_text(size)} measured over {rows[-1].rounds} rounds")
    return rows


def _distinct(engines: list[Engine], paths: list[Path]) -> list[Engine]:
    """Engines of one name, such as two artifacts for one target, are told apart by their folders. Raises UsageError for the same twice."""
    if len({p.resolve() for p in paths}) < len(paths):
        raise UsageError("bench: the same artifact is given twice; name each once")
    names = [e.name for e in engines]
    return [replace(e, name=f"{e.name} ({p})") if names.count(e.name) > 1 else e for e, p in zip(engines, paths, strict=True)]


def plan_shapes(manifest: dict[str, Any], asked: Sequence[Sequence[int]] | None) -> list[dict[str, int]]:
    """The sizes to measure at: as asked, else small, long and batched ones that the axes allow."""
    axes = {name: (int(low), int(high)) for name, (low, high) in manifest["axes"].items()}
    names = list(axes)
    if asked is None:
        usual = ((1, 16), (1, 128), (8, 128)) if len(names) == 2 else tuple((n,) * len(names) for n in (1, 8))
        fitted = [tuple(min(max(n, axes[a][0]), axes[a][1]) for n, a in zip(s, names, strict=True)) for s in usual]
        return [dict(zip(names, s, strict=True)) for s in dict.fromkeys(fitted)]
    planned = []
    for sizes in asked:
        text = "x".join(str(n) for n in sizes)
        if len(sizes) != len(names):
            raise UsageError(
                f"--shape {text}: {len(sizes)} sizes; needed: one for each dynamic axis ({', '.join(names) or 'none'})"
            )
        for name, size in zip(names, sizes, strict=True):
            low, high = axes[name]
            if not low <= size <= high:
                raise UsageError(f"--shape {text}: axis {name!r} is {size}; needed: {low}..{high}")
        planned.append(dict(zip(names, (int(n) for n in sizes), strict=True)))
    return planned


def golden_inputs(folder: artifacts.Folder) -> dict[str, Array]:
    """The inputs stored with the artifact: real samples, so that errors measured on them mean something."""
    arrays = folder.arrays(GOLDEN)
    return {name.removeprefix("in/"): array for name, array in arrays.items() if name.startswith("in/")}


def make_inputs(specs: tuple[TensorSpec, ...], sizes: dict[str, int], golden: dict[str, Array]) -> dict[str, Array]:
    """Arrays of the asked sizes: golden inputs cut, or repeated along each dynamic axis."""
    feed = {}
    for spec in specs:
        array = golden[spec.name]
        for axis, wanted in enumerate(spec.shape):
            if isinstance(wanted, str):
                array = np.take(array, np.arange(sizes[wanted]), axis=axis, mode="wrap")
        feed[spec.name] = np.ascontiguousarray(array)
    return feed


def shape_text(sizes: dict[str, int]) -> str:
    """{"batch": 1, "seq": 16} -> "1x16"."""
    return "x".join(str(n) for n in sizes.values()) or "fixed"


def _measure(engines: list[Engine], feed: dict[str, Array], size: dict[str, int], threads: int, seconds: float) -> list[BenchRow]:
    """All engines at one shape, in turns."""
    outputs = {e.name: e.run(feed) for e in engines}  # also starts every thread pool, before anything is bound to a core
    first = next(iter(outputs[engines[0].name]))
    exact = next((outputs[e.name][first] for e in engines if e.reference), None)
    times: dict[str, list[list[float]]] = {e.name: [] for e in engines}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    spent = 0.0
    with bound(cores[:1] if threads == 1 else None):
        while len(times[engines[0].name]) < MIN_ROUNDS or spent < seconds * len(engines):
            started = time.perf_counter()
            for engine in engines:
                times[engine.name].append(_turn(engine, feed))
            spent += time.perf_counter() - started
    ours = [statistics.median(t) for t in times[engines[0].name]]
    rows = []
    for engine in engines:
        turns = [statistics.median(t) for t in times[engine.name]]
        ratio = statistics.median(a / b for a, b in zip(ours, turns, strict=True))
        got = outputs[engine.name].get(first)
        known = exact is not None and got is not None and not engine.reference
        rows.append(
            BenchRow(
                engine.name,
                size,
                statistics.median(t for turn in times[engine.name] for t in turn) * 1e3,
                ratio,
                relative_error_db(got, exact) if known and got is not None and exact is not None else None,
                worst_cosine(got, exact) if known and got is not None and exact is not None else None,
                len(turns),
            )
        )
    return rows


def _turn(engine: Engine, feed: dict[str, Array]) -> list[float]:
    """Seconds of each run of one turn. The first run brings the weights back into the cache and is not counted."""
    engine.run(feed)
    seconds: list[float] = []
    while sum(seconds) < BURST_S:
        started = time.perf_counter()
        engine.run(feed)
        seconds.append(time.perf_counter() - started)
    return seconds


@contextlib.contextmanager
def bound(cores: list[int] | None) -> Iterator[None]:
    """The calling thread on these cores while the block runs; None and machines without affinity: as it is."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
