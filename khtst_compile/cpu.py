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
