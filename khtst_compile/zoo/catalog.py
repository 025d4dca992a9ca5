"""The zoo's models as the compiler is given them, by name: what `make zoo` takes the whole way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor, nn

# Each holds ENTRIES: tuple[Entry, ...]. A name once, whichever file it is in.
PARTS = ("catalog_codes", "catalog_moe", "catalog_jepa")


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    build: the trained or seeded module, in eval mode, the same on every call. inputs: an example of forward's arguments, batch first,
    which export traces with (batch >= 2). samples: real data, tuples like `inputs` whose batch may differ; the first three quarters
    calibrate and the rest, which calibration never sees, judge.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    samples: Callable[[], Sequence[tuple[Tensor, ...]]]


def catalog() -> dict[str, Entry]:
    """Every entry of every part there is, by name. Raises ValueError where two parts give one name."""
    found: dict[str, Entry] = {}
    for part in PARTS:
        if find_spec(f"khtst_compile.zoo.{part}") is None:
            continue
        for entry in import_module(f"khtst_compile.zoo.{part}").ENTRIES:
            if entry.name in found:
                raise ValueError(f"{part}: {entry.name!r} is in the catalog already; give it another name")
            found[entry.name] = entry
    return found
