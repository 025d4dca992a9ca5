"""What arm_count.c wrote: instructions of each call, where they were, and of which kind. Pure functions but for `symbols`."""

from __future__ import annotations

import bisect
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STEADY = 0.01
"""Share by which the two shortest calls may differ."""
# In order: (name, mask, value) of an instruction word. The vectors' int8 products, float32 products, and all that reads or writes memory.
_KINDS = (
    ("sdot", 0x9F20FC00, 0x0E009400),  # and udot
    ("sdot", 0x9F00F400, 0x0F00E000),  # by element
    ("smmla", 0xDFE0F400, 0x4E80A400),  # and ummla, usmmla
    ("smull", 0x9F20DC00, 0x0E20C000),  # and umull, both halves
    ("smlal", 0x9F20DC00, 0x0E208000),  # and umlal, both halves
    ("sadalp", 0x9F3FFC00, 0x0E206800),  # and uadalp
    ("fmla", 0xBFA0FC00, 0x0E20CC00),
    ("fmla", 0xBF80F400, 0x0F801000),  # by element
    ("memory", 0x0A000000, 0x08000000),
)


@dataclass(frozen=True)
class Block:
    """Code without a jump in it. address: of its first instruction; times: how often it ran; words: its instructions."""

    address: int
    times: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """intervals: instructions between each two marks; blocks: what ran in the last interval."""

    intervals: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Mapping:
    """Part of a file in memory: addresses `start` to `end` hold it from byte `offset` on."""

    start: int
    end: int
    offset: int
    file: str


@dataclass(frozen=True)
class Library:
    """functions: (address, name) in order; parts: (offset in the file, address, bytes) of what is loaded."""

    functions: tuple[tuple[int, str], ...]
    parts: tuple[tuple[int, int, int], ...]

    def address(self, offset: int) -> int:
        """Where a byte of the file is, as the file's symbols have it."""
        return next(address + offset - start for start, address, size in self.parts if start <= offset < start + size)

    def function(self, address: int) -> str:
        """The function an address is in."""
        at = bisect.bisect(self.functions, (address, "\U0010ffff")) - 1
        return self.functions[at][1] if at >= 0 else "?"


def parse(text: str) -> Counts:
    """The file of the plugin. Raises ValueError where it is none, or has no interval."""
    intervals, blocks = [], []
    for line in text.splitlines():
        kind, *words = line.split()
        if kind == "interval":
            intervals.append(int(words[0]))
        elif kind == "block":
            blocks.append(Block(int(words[0], 16), int(words[1]), tuple(int(w, 16) for w in words[2:])))
        else:
            raise ValueError(f"a count has a line {line[:40]!r}; needed: interval or block")
    if not intervals:
        raise ValueError("the program executed fewer than two marks; needed: a mark before and after each call")
    return Counts(tuple(intervals), tuple(blocks))


def of_calls(intervals: Sequence[int]) -> list[int]:
    """Instructions of each call, where every call has a mark before and after it: every other interval is between calls."""
    if len(intervals) % 2 == 0:
        raise ValueError(f"{len(intervals)} intervals; needed an odd number: two marks for each call")
    return list(intervals[::2])


def least(calls: Sequence[int]) -> int:
    """Instructions of a call: the least after the first, which sets things up; what else happens in a program only adds.

    Raises ValueError where no other call is close to it.
    """
    first, second = sorted(calls[1:])[:2]
    if second - first > STEADY * first:
        raise ValueError(
            f"calls took {', '.join(f'{c:,}' for c in calls)} instructions; needed: two after the first within {STEADY:.0%}"
        )
    return first


def kinds(blocks: Sequence[Block]) -> dict[str, int]:
    """Instructions by kind: the names in _KINDS, and "other"."""
    found: Counter[str] = Counter()
    for block in blocks:
        for word in block.words:
            found[kind(word)] += block.times
    return dict(found)


def kind(word: int) -> str:
    """Of one instruction."""
    return next((name for name, mask, value in _KINDS if word & mask == value), "other")


def mappings(text: str) -> list[Mapping]:
    """/proc/self/maps, the parts that files lie in."""
    lines = (re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \S+\s+(/.*)", line) for line in text.splitlines())
    return [Mapping(int(m[1], 16), int(m[2], 16), int(m[3], 16), m[4]) for m in lines if m]


def executed(blocks: Sequence[Block], maps: Sequence[Mapping], file: Path, library: Library) -> Counter[int]:
    """Address of an instruction in a library -> how often it ran."""
    found: Counter[int] = Counter()
    own = [m for m in maps if Path(m.file).resolve() == file.resolve()]
    for block in blocks:
        part = next((m for m in own if m.start <= block.address < m.end), None)
        if part is not None:
            first = library.address(block.address - part.start + part.offset)
            for i in range(len(block.words)):
                found[first + 4 * i] += block.times
    return found


def by_function(times: Counter[int], library: Library) -> dict[str, int]:
    """Instructions of each function, the most first."""
    found: Counter[str] = Counter()
    for address, count in times.items():
        found[library.function(address)] += count
    return dict(found.most_common())


def symbols(file: Path) -> Library:
    """What is where in a library, by the cross compiler's tools."""
    names = _output("aarch64-linux-gnu-nm", "--defined-only", str(file)).splitlines()
    functions = {
        (int(w[0], 16), w[2]) for w in map(str.split, names) if len(w) == 3 and w[1] in "tT" and not w[2].startswith("$")
    }
    header = _output("aarch64-linux-gnu-readelf", "-lW", str(file))
    parts = re.findall(r"LOAD\s+0x(\w+) 0x(\w+) 0x\w+ 0x(\w+)", header)
    return Library(tuple(sorted(functions)), tuple((int(a, 16), int(b, 16), int(c, 16)) for a, b, c in parts))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
