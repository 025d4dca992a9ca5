"""What an artifact says of its codebooks: sizes, proofs, and how often calibration chose each code; as a summary, as text and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from khtst_compile import artifact
from khtst_compile.errors import EnvironmentProblem, UsageError

COLUMNS = 64  # of a histogram in text
DEAD_NAMED = 12  # codes, on one screen
BARS = "▁▂▃▄▅▆▇█"
PLOTS = (".png", ".svg")
_ACROSS = 4  # panels of a plot


@dataclass(frozen=True)
class Level:
    """One level of a codebook. codes: how many there are; counts: how often calibration chose each, or None where that was not counted
    code by code; dead: ids that it never chose; perplexity: exp of the entropy of the shares."""

    site: str
    number: int
    codes: int
    counts: tuple[int, ...] | None
    dead: tuple[int, ...]
    perplexity: float

    @property
    def used(self) -> int | None:
        return None if self.counts is None else self.codes - len(self.dead)

    @property
    def label(self) -> str:
        return f"{self.site}, level {self.number}"


def codebooks(path: str | Path) -> dict[str, Any]:
    """-> {"path", "kind", "codebooks"}: each entry of the manifest's `meta.codebooks` with `used`, codes chosen at least once, a level.

    An artifact without codebooks has an empty list. Raises ArtifactError where the folder is no artifact."""
    folder = artifact.read(path)
    entries = (folder.manifest.get("meta") or {}).get("codebooks") or []
    return {
        "path": str(folder.path),
        "kind": folder.kind,
        "codebooks": [{**entry, "used": [level.used for level in levels(entry)]} for entry in entries],
    }


def levels(entry: dict[str, Any]) -> list[Level]:
    """The levels of one entry of `meta.codebooks`."""
    made = []
    for number, codes in enumerate(entry["codes"]):
        counts = entry["counts"][number] if number < len(entry.get("counts") or []) else None
        dead = () if counts is None else tuple(i for i, n in enumerate(counts) if n == 0)
        made.append(
            Level(entry["site"], number, codes, None if counts is None else tuple(counts), dead, entry["perplexity"][number])
        )
    return made


def histogram(counts: Sequence[int], columns: int = COLUMNS) -> tuple[str, int]:
    """Counts by id as a line of at most `columns` characters, and how many codes each stands for.

    The height of a bar is its share of the highest one; a dot stands for codes that were never chosen."""
    width = max(1, math.ceil(len(counts) / columns))
    sums = [sum(counts[i : i + width]) for i in range(0, len(counts), width)]
    most = max(sums, default=0)
    return "".join("." if n == 0 else BARS[math.ceil(n * len(BARS) / most) - 1] for n in sums), width


def named(ids: Sequence[int], limit: int = DEAD_NAMED) -> str:
    """The first of `ids`, and how many more there are."""
    more = len(ids) - limit
    return ", ".join(map(str, ids[:limit])) + (f" and {more} more" if more > 0 else "")


def plot(entries: Sequence[dict[str, Any]], file: Path) -> None:
    """Write uses of codes, a panel a level, to a .png or .svg; dead codes are marked on the axis.

    Raises UsageError for another ending and where no level was counted code by code, EnvironmentProblem without matplotlib."""
    if file.suffix.lower() not in PLOTS:
        raise UsageError(f"--plot {file}: the file ends in {file.suffix or 'nothing'!r}; needed: {' or '.join(PLOTS)}")
    panels = [level for entry in entries for level in levels(entry) if level.counts is not None]
    if not panels:
        raise UsageError("--plot: no codebook has counts of its codes, so there is nothing to draw; leave --plot out")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentProblem(
            f"plotting needs matplotlib, which does not load ({error}); pip install 'khtst-compile[zoo]'"
        ) from error
    across = min(_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(4.5 * across, 3 * down), layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axis, level in zip(grid, panels, strict=False):
        axis.bar(range(level.codes), level.counts, width=1.0)
        axis.plot(level.dead, [0.0] * len(level.dead), "x", color="tab:red", clip_on=False, label=f"{len(level.dead)} dead")
        axis.set(title=f"{level.label}: perplexity {level.perplexity:.1f} of {level.codes}", xlabel="code", ylabel="times chosen")
        axis.set_xlim(-0.5, level.codes - 0.5)
        axis.legend(loc="upper right")
    for axis in grid[len(panels) :]:
        axis.set_axis_off()
    with artifact.staged_file(file) as temporary:
        figure.savefig(temporary, dpi=120)
