"""What the CPU under us can do, by its flags and never by its name."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def flags() -> frozenset[str]:
    """CPU feature flags as /proc/cpuinfo spells them (`flags` on x86, `Features` on ARM); empty where that file is missing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def missing(needed: list[str] | tuple[str, ...]) -> list[str]:
    """Those of `needed` this CPU lacks."""
    return [f for f in needed if f not in flags()]


def cores() -> frozenset[int]:
    """Numbers of the cores the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(range(os.cpu_count() or 1))


def bind(numbers: frozenset[int]) -> None:
    """Let the calling thread run on these cores alone; without effect where the system has no such thing."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, numbers)


def usable_cores() -> int:
    """Cores the calling thread may run on."""
    return len(cores())


def available_memory() -> int | None:
    """Bytes that can be used without swapping (Linux: MemAvailable), or None where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def processes(asked: int | None, weight_bytes: int) -> int:
    """How many processes may each hold a program of that size: at most `asked`, one a core, and what memory allows."""
    each = 4 * weight_bytes + (1 << 30)  # the program, its packed weights, TVM's copy, and libraries
    free = available_memory()
    room = usable_cores() if free is None else free // each
    return max(1, min(asked or usable_cores(), usable_cores(), room))
