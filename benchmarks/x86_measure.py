"""The parts of benchmarks/x86.py that measure. In each, engines take turns (A B C A B C), and only times of one round are compared."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.x86_peers import REFERENCE, Engine, file_name, say
from khtst_compile.benchmark import bound
from khtst_compile.listing import list_kernels
from khtst_compile.parity import relative_error_db

LONG_S = 0.3
"""A run this long brings its weights back into the cache in a small part of its time, so none is spent on that alone."""
SLOW_S = 8.0
"""An engine is left out of shapes at which a single run would take longer."""
FEWEST = 3
"""Rounds at least."""
BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32), (16, 32, 64, 128, 256, 512)
PROMPT, NEW = 124, 64
"""Tokens of the prompt, and how many are added to it."""

Shape = tuple[int, int]


def shape_name(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape)


def inputs(work: Path, shape: Shape) -> dict[str, str]:
    """The command that makes a worker use the inputs of a shape."""
    return {"inputs": str(work / f"{shape_name(shape)}.npz")}


def latency(
    engines: list[Engine], work: Path, shapes: Sequence[Shape], rounds: int, seconds: float, budget: float
) -> list[dict[str, Any]]:
    """All engines at all shapes; a row each, with the median of each turn in `turns_s`.

    shapes: smaller ones first; rounds: at each shape, fewer (but FEWEST) once they have taken `budget` seconds; seconds: length of a turn.
    """
    rows = []
    pace: dict[str, float] = {}  # seconds a token, at the shape before
    for shape in shapes:
        tokens = shape[0] * shape[1]
        slow = {e.name: pace[e.name] * tokens for e in engines if pace.get(e.name, 0.0) * tokens > SLOW_S}
        taking = [e for e in engines if e.name not in slow]
        outputs = {e.name: prepared(e, work, shape) for e in taking}
        turns: dict[str, list[float]] = {e.name: [] for e in taking}
        done, started = 0, time.perf_counter()
        while done < min(FEWEST, rounds) or (done < rounds and time.perf_counter() - started < budget):
            for engine in taking:
                command = {"seconds": seconds, "warm": turns[engine.name][-1:] < [LONG_S]}
                times = engine.ask(command).get("times")
                turns[engine.name].append(statistics.median(times) if times else math.nan)
            done += 1
        say(f"{shape_name(shape)}: measured in {done} rounds")
        pace |= {e.name: statistics.median(turns[e.name]) / tokens for e in taking if e.failed is None}
        rows += [row(e, shape, turns, outputs, slow.get(e.name)) for e in engines]
    return rows


def prepared(engine: Engine, work: Path, shape: Shape) -> Any:
    """The engine's output on the inputs of a shape, or None."""
    output = work / f"{file_name(engine.name, engine.threads)}.npy"
    engine.ask(inputs(work, shape))
    return np.load(output) if engine.ask({"output": str(output)}).get("ok") else None


def row(
    engine: Engine, shape: Shape, turns: dict[str, list[float]], outputs: dict[str, Any], slow_s: float | None = None
) -> dict[str, Any]:
    """What is known of one engine at one shape. slow_s: seconds a run would have taken, where that was too long."""
    known = {"engine": engine.name, "shape": shape_name(shape), "threads": engine.threads}
    if engine.failed is not None:
        return {**known, "failed": engine.failed}
    if slow_s is not None:
        return {**known, "failed": f"{shape_name(shape)} left out, a run would take about {slow_s:.0f} s"}
    exact, got = outputs.get(REFERENCE), outputs[engine.name]
    return {
        **known,
        "median_ms": statistics.median(turns[engine.name]) * 1e3,
        "turns_s": turns[engine.name],
        "error_db": relative_error_db(got, exact) if exact is not None and engine.name != REFERENCE else None,
        "ready_s": engine.ready_s,
    }


def scaling(engines: list[Engine], work: Path, shape: Shape, rounds: int) -> dict[str, Any]:
    """engines: the same with one thread and with two -> how many times as fast the second is, median over rounds."""
    for engine in engines:
        engine.ask(inputs(work, shape))
    turns: list[list[float]] = []
    for _ in range(rounds):
        times = [e.ask({"seconds": 0.0, "warm": True}).get("times") for e in engines]
        turns.append([statistics.median(t) if t else math.nan for t in times])
    failed = next((e.failed for e in engines if e.failed), None)
    speedup = None if failed else statistics.median(one / two for one, two in turns)
    return {"shape": shape_name(shape), "speedup": speedup, "turns_s": [] if failed else turns, "failed": failed}


def growth(engines: list[Engine], work: Path, shapes: Sequence[Shape], rounds: int, seconds: float) -> dict[str, Any]:
    """Time of each shape, the least of a round's medians: shapes are compared with each other here, and a disturbance only adds."""
    best: dict[tuple[str, Shape], float] = {}
    for at in range(rounds):
        for shape in shapes:
            for engine in engines:
                engine.ask(inputs(work, shape))
                times = engine.ask({"seconds": seconds, "warm": True}).get("times")
                if times:
                    key = (engine.name, shape)
                    best[key] = min(best.get(key, math.inf), statistics.median(times))
        say(f"growth: round {at + 1} of {rounds}")
    points = [
        {"engine": name, "batch": b, "seq": s, "ms": t * 1e3, "us_per_token": t * 1e6 / (b * s)}
        for (name, (b, s)), t in best.items()
    ]
    return {"rounds": rounds, "points": points, "failed": {e.name: e.failed for e in engines if e.failed}}


def peak(library: Path, shape: Shape, times: int, runs: int) -> dict[str, Any]:
    """Share of this machine's int8 peak that the whole program reaches, counting multiply-adds of linear layers alone; one thread."""
    sizes, shares, listing = dict(zip(("batch", "seq"), shape, strict=True)), [], None
    with bound(sorted(os.sched_getaffinity(0))[:1]):
        for _ in range(times):  # peak and program are seconds apart, so each time both are measured
            listing = list_kernels(library, sizes=sizes, timed=True, threads=1, runs=runs)
            shares.append(listing.totals["linear_share"])
    assert listing is not None
    known = [s for s in shares if s is not None]
    return {
        "shape": shape_name(shape),
        "share": statistics.median(known),
        "shares": known,
        "int8_macs_per_s": listing.peak.int8_macs,
    }


def decode(engines: list[Engine], ids: list[int], new: int, rounds: int) -> list[dict[str, Any]]:
    """Tokens a second of the prompt (until the first new token is there) and of the `new` - 1 after it, in turns."""
    turns: dict[str, list[dict[str, Any]]] = {e.name: [] for e in engines}
    for engine in engines:
        engine.ask({"ids": ids, "new": 2})
    for _ in range(rounds):
        for engine in engines:
            turns[engine.name].append(engine.ask({"ids": ids, "new": new}))
    rows = []
    for engine in engines:
        known: dict[str, Any] = {"engine": engine.name, "threads": engine.threads}
        if engine.failed is not None:
            rows.append({**known, "failed": engine.failed})
            continue
        prefill = [len(ids) / t["prefill_s"] for t in turns[engine.name]]
        steps = [(new - 1) / t["decode_s"] for t in turns[engine.name]]
        rates = {"prefill_tokens_per_s": statistics.median(prefill), "decode_tokens_per_s": statistics.median(steps)}
        rows.append({**known, **rates, "prefill_turns": prefill, "decode_turns": steps})
    return rows
