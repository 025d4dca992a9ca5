"""What this machine can do at this moment: multiply-adds a second and bytes a second, measured. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from khtst_compile import workers
from khtst_compile.targets.isa import ALL_ISAS, Isa

ROUNDS = 25
LEVELS = (1 << 17, 1 << 20, 1 << 23, 1 << 26)
"""Bytes of memory read over and over: what stays in a cache is read faster than what does not."""


@dataclass(frozen=True)
class Roofline:
    """int8_macs, float32_macs: multiply-adds a second; reads: (bytes walked through, bytes a second), rising in the first; threads: at
    work together."""

    isa: str
    threads: int
    int8_macs: float
    float32_macs: float
    reads: tuple[tuple[int, float], ...]

    def macs(self, products: str) -> float:
        """Multiply-adds a second of "int8" or "float32"."""
        return self.int8_macs if products == "int8" else self.float32_macs

    def read_rate(self, walked: float) -> float:
        """Bytes a second where so many bytes are walked through before the first of them is read again."""
        return next((rate for size, rate in self.reads if size >= walked), self.reads[-1][1])

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def isa_named(name: str) -> Isa:
    """The instruction set of that name. Raises KeyError."""
    return {i.name: i for i in ALL_ISAS}[name]


def clock(threads: int) -> Callable[[], float]:
    """CPU time of one thread, which other work on the machine does not lengthen; wall time for several."""
    return time.thread_time if threads == 1 else time.perf_counter


def measure(isa: Isa, threads: int) -> Roofline:
    """Measure all figures in turns, in about a second. The best of each counts: a disturbance can only lower it."""
    from khtst_compile.targets.kernels import ceiling
    from khtst_compile.targets.single import bind, compile_alone

    peaks = [ceiling.Ceiling(isa, p, threads, p) for p in ("int8", "float32")]
    step = isa.lanes * 4 * ceiling.STRIDE * threads
    readers = [ceiling.Reader(isa, size // step * ceiling.STRIDE, threads, f"read{size}") for size in LEVELS]
    functions = {s.name: ceiling.prim_func(s) for s in peaks} | {s.name: ceiling.read_func(s) for s in readers}
    library = compile_alone(functions, isa)
    sums = threads * ceiling.CHAINS * isa.lanes
    # Ones, not zeros: untouched zero pages are all the same page.
    data = [np.ones(r.bytes // 4, np.int32) for r in readers]
    runs: dict[str, tuple[Callable[[], object], float]] = {
        s.name: (bind(library[s.name], [np.zeros(sums, d), np.ones(64, np.int8)]), s.macs)
        for s, d in zip(peaks, (np.int32, np.float32), strict=True)
    }
    runs |= {
        s.name: (bind(library[s.name], [d, np.zeros(threads * isa.lanes, np.int32)]), s.bytes)
        for s, d in zip(readers, data, strict=True)
    }
    best = dict.fromkeys(runs, 0.0)

    def all_rounds() -> None:
        for run, _ in runs.values():
            run()
        for _ in range(ROUNDS):
            for name, (run, amount) in runs.items():
                best[name] = max(best[name], _rate(run, amount, clock(threads)))

    workers.run(threads, all_rounds)
    reads = tuple((size, best[s.name]) for size, s in zip(LEVELS, readers, strict=True))
    return Roofline(isa.name, threads, best["int8"], best["float32"], reads)


def _rate(run: Callable[[], object], amount: float, now: Callable[[], float]) -> float:
    """Amount a second over at least half a millisecond."""
    count, started = 0, now()
    while (spent := now() - started) < 5e-4:
        run()
        count += 1
    return amount * count / spent
