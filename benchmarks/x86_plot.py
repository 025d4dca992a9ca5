"""x86.json -> x86.png: bars of each engine's time over ours, a panel for each number of threads. Needs matplotlib alone.

python x86_plot.py results/x86.json results/x86.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    counts = sorted({r["threads"] for r in result["rows"]})
    figure, panels = plt.subplots(1, len(counts), figsize=(7 * len(counts), 5), squeeze=False, sharey=True)
    for panel, threads in zip(panels[0], counts, strict=True):
        rows = [r for r in result["rows"] if r["threads"] == threads and r.get("ratio")]
        names, shapes = list(dict.fromkeys(r["engine"] for r in rows)), list(dict.fromkeys(r["shape"] for r in rows))
        height = 0.8 / max(1, len(shapes))
        for i, shape in enumerate(shapes):
            values = {r["engine"]: 1 / r["ratio"] for r in rows if r["shape"] == shape}
            places = [n + (i - (len(shapes) - 1) / 2) * height for n in range(len(names))]
            panel.barh(places, [values.get(n, 0.0) for n in names], height, label=shape)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_yticks(range(len(names)), names)
        panel.set_xlabel("time over khtst int8")
        panel.set_title(f"{threads} thread(s)")
        panel.legend(title="batch x tokens")
    panels[0][0].invert_yaxis()  # the panels share it
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=120)


if __name__ == "__main__":
    main()
