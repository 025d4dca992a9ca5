"""x86.json -> x86.png: each engine's time over ours, how time per token grows, and tokens a second. Needs matplotlib alone.

python x86_plot.py results/x86.json results/x86.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = "khtst int8"
LINES = 3
"""Sizes of the other axis a panel of growth shows: the smallest, the middle and the largest, and any at which there is a cliff."""


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rows, grown = result.get("latency", []), result.get("growth")
    counts = sorted({r["threads"] for r in rows})
    panels: list[tuple[Any, ...]] = [(bars, [r for r in rows if r["threads"] == n], f"{n} thread(s)") for n in counts]
    panels += [(growth, grown, axis) for axis in ("seq", "batch") if grown and grown["points"]]
    talking = [r for r in result.get("decode", []) if "failed" not in r]
    panels += [(rates, talking, f"{what}_tokens_per_s", what) for what in ("prefill", "decode") if talking]
    if not panels:
        return
    columns = min(2, len(panels))
    height = -(-len(panels) // columns)
    figure, places = plt.subplots(height, columns, figsize=(7.5 * columns, 6 * height), squeeze=False)
    for place in places.flat[len(panels) :]:
        place.axis("off")
    for place, (draw, *what) in zip(places.flat, panels, strict=False):
        draw(place, *what)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=120)


def bars(panel: Any, rows: list[dict[str, Any]], title: str) -> None:
    """A group of bars for each engine that ran, one for each shape."""
    found = {(r["engine"], r["shape"]): r["turns_s"] for r in rows if "turns_s" in r}
    names = [n for n in dict.fromkeys(e for e, _ in found) if n != OURS]
    shapes = list(dict.fromkeys(s for _, s in found))
    height = 0.8 / max(1, len(shapes))
    for i, shape in enumerate(shapes):
        for at, name in enumerate(names):
            if (name, shape) not in found or (OURS, shape) not in found:
                continue
            value = statistics.median(a / b for a, b in zip(found[name, shape], found[OURS, shape], strict=True))
            place, first = at + (i - (len(shapes) - 1) / 2) * height, at == 0
            panel.barh(place, value, height, color=f"C{i}", label=shape if first else None)
            panel.text(value, place, f" {value:.2f}", va="center", fontsize=7)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log")
    _plain(panel.xaxis, [1.0, *(bar.get_width() for bar in panel.patches)])
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel(f"time over {OURS} (right of the line: {OURS} is faster)")
    panel.set_title(f"MiniLM-L6, {title}")
    panel.margins(x=0.1)
    panel.legend(title="batch x tokens", fontsize=8)


def rates(panel: Any, rows: list[dict[str, Any]], key: str, what: str) -> None:
    """A bar for each engine and number of threads."""
    for at, row in enumerate(rows):
        panel.barh(at, row[key], 0.6, color=f"C{row['threads'] - 1}")
        panel.text(row[key], at, f" {row[key]:.0f}", va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), [f"{r['engine']}, {r['threads']} thread(s)" for r in rows])
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel("tokens a second")
    panel.set_title(f"SmolLM2-135M, {what}")


def growth(panel: Any, grown: dict[str, Any], axis: str) -> None:
    """Lines along an axis for some sizes of the other; cliffs have a ring."""
    other = "batch" if axis == "seq" else "seq"
    sizes = sorted({p[other] for p in grown["points"]})
    steep = [c for c in grown["cliffs"] if c["axis"] == axis]
    shown = sorted({sizes[i * (len(sizes) - 1) // (LINES - 1)] for i in range(LINES)} | {c[other] for c in steep})
    engines = list(dict.fromkeys(p["engine"] for p in grown["points"]))
    for at, engine in enumerate(engines):
        for i, size in enumerate(shown):
            line = sorted((p[axis], p["us_per_token"]) for p in grown["points"] if p["engine"] == engine and p[other] == size)
            panel.plot(
                *zip(*line, strict=True),
                color=f"C{i}",
                linestyle=("-", "--")[at % 2],
                marker=".",
                label=f"{engine}, {other} {size}",
            )
        rings = [(c[axis], c["us_per_token"]) for c in steep if c["engine"] == engine]
        if rings:
            panel.scatter(
                *zip(*rings, strict=True), s=90, facecolors="none", edgecolors="red", zorder=3, label=f"{engine}: cliff"
            )
    panel.set_xscale("log", base=2)
    ticks = sorted({p[axis] for p in grown["points"]})
    panel.set_xticks(ticks, [str(t) for t in ticks])
    panel.set_yscale("log")
    _plain(panel.yaxis, [p["us_per_token"] for p in grown["points"]])
    panel.grid(alpha=0.3)
    panel.set_xlabel({"seq": "tokens of a text", "batch": "texts of a batch"}[axis])
    panel.set_ylabel("microseconds per token")
    panel.set_title("MiniLM-L6, 1 thread")
    panel.legend(fontsize=7)


def _plain(axis: Any, values: list[float]) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5 and their multiples, written as numbers."""
    steps = [m * 10**e for e in range(-3, 6) for m in (1, 2, 5)]
    ticks = [t for t in steps if min(values) / 2 <= t <= max(values) * 2]
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)


if __name__ == "__main__":
    main()
