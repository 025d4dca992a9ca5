"""Which axes of the inputs may vary, what they are called, and between which sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from khtst_compile.errors import UsageError

Range = tuple[int, int]
BATCH: Range = (1, 4096)
_TEXT = re.compile(r"([A-Za-z_][\w.]*)=(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True)
class Axis:
    """name: as in Program.axes; places: (input name, axis) pairs that share one size; asked: the user wrote it down."""

    name: str
    places: tuple[tuple[str, int], ...]
    low: int
    high: int
    asked: bool = False

    @property
    def fixed(self) -> bool:
        return self.low == self.high


def parse_shapes(texts: Sequence[str]) -> dict[str, Range]:
    """["seq=1..512", "batch=8"] -> {"seq": (1, 512), "batch": (8, 8)}. Raises UsageError where a text is no such thing."""
    ranges: dict[str, Range] = {}
    for text in texts:
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--shapes {text!r}: needed NAME=MIN..MAX or NAME=SIZE, such as seq=1..512, batch=8 or x.1=16..64")
        name, low, high = match[1], int(match[2]), int(match[3] or match[2])
        if name in ranges:
            raise UsageError(f"--shapes {text!r}: {name!r} is given twice")
        if low < 1 or high < low:
            raise UsageError(f"--shapes {text!r}: needed 1 <= MIN <= MAX, found {low}..{high}")
        ranges[name] = (low, high)
    return ranges


def plan_axes(known: Sequence[Axis], ranks: Mapping[str, int], shapes: Mapping[str, Range] | None) -> list[Axis]:
    """Overrule the `known` axes (batch, seq, ...) by what the user asked for in `shapes` ("seq" or "input.axis").

    ranks: input name -> number of axes. Raises UsageError for a name that is neither a known axis nor an axis of an input.
    """
    axes = {a.name: a for a in known}
    for name, (low, high) in (shapes or {}).items():
        if not 1 <= low <= high:
            raise UsageError(f"shapes: {name!r} is {low}..{high}; needed 1 <= min <= max")
        if name in axes:
            axes[name] = Axis(name, axes[name].places, low, high, asked=True)
            continue
        source, _, position = name.rpartition(".")
        if source in ranks and position.isdigit() and int(position) < ranks[source]:
            place = (source, int(position))
            for other in list(axes.values()):
                left = tuple(p for p in other.places if p != place)
                if left != other.places:
                    axes[other.name] = Axis(other.name, left, other.low, other.high, other.asked)
            axes[name] = Axis(identifier(name), (place,), low, high, asked=True)
            continue
        places = [f"{n}.{i}" for n, rank in ranks.items() for i in range(rank)]
        raise UsageError(f"shapes: there is no axis {name!r}; there are {', '.join([*(a.name for a in known), *places])}")
    return [a for a in axes.values() if a.places]


def identifier(name: str) -> str:
    """`name` with everything that cannot stand in a Python identifier replaced by "_"."""
    return re.sub(r"\W", "_", name)


def resized(example: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """`example` with `size` entries along `axis`: cut, or repeated from the start."""
    if example.shape[axis] == size:
        return example
    return example.index_select(axis, torch.arange(size) % max(example.shape[axis], 1))


def trace_size(axis: Axis, given: int) -> int:
    """The size to trace `axis` at: the example's own where it serves. 1 would be taken for a constant, so at least 2 where allowed."""
    return min(max(given, axis.low, 2), axis.high)
