"""A large batch in parts small enough that what one kernel writes is still in the cache when the next one reads it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.signature import TensorSpec

Array = npt.NDArray[Any]
ROWS = 128
"""Rows of a part, for each thread: enough for a matrix product to run at full speed, and MiniLM's widest tensor still fits 1 MB."""
MACS = 20_000_000
"""Fewest multiply-adds of a part, which take some 0.25 ms: beside them what a call costs is nothing."""


def cut(
    arrays: Sequence[Array], specs: Sequence[TensorSpec], axis: str | None, fewest: int, macs: int, threads: int
) -> list[slice]:
    """Entries of `axis`, which leads inputs and outputs, that are to run together, in order: one slice for all of it, or several.

    arrays: the inputs, as `specs` describe them; axis: None where samples are not known to be independent; fewest: entries the program
    takes; macs: multiply-adds of linear layers for one row.
    """
    led = [a for a, s in zip(arrays, specs, strict=True) if axis is not None and s.shape[:1] == (axis,)]
    entries = led[0].shape[0] if led else 0
    rows = max((_rows(a) for a in led), default=0)
    if not rows or not macs:
        return [slice(0, entries)]
    size = max(1, fewest, max(ROWS * threads, -(-MACS // macs)) // rows)
    count = max(1, entries // size)
    ends = [entries * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def taken(arrays: Sequence[Array], specs: Sequence[TensorSpec], axis: str | None, part: slice) -> list[Array]:
    """The inputs of one part: views."""
    return [a[part] if axis is not None and s.shape[:1] == (axis,) else a for a, s in zip(arrays, specs, strict=True)]


def joined(results: Sequence[Sequence[Array]]) -> list[Array]:
    """The outputs of all parts, each whole again."""
    return list(results[0]) if len(results) == 1 else [np.concatenate(each) for each in zip(*results, strict=True)]


def _rows(array: Array) -> int:
    """Rows one entry has: positions of its ids, or of its vectors."""
    inner = array.shape[1:] if array.dtype.kind in "iub" else array.shape[1:-1]
    return int(np.prod(inner, dtype=np.int64))
