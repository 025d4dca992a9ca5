"""`khtst-compile bench`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from khtst_compile.cli.console import SECONDS, Console, common_of, table
from khtst_compile.errors import UsageError

if TYPE_CHECKING:
    from khtst_compile.benchmark import BenchRow


@click.command("bench")
@click.argument("artifacts", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--baseline", default="torch,ort", show_default=True, help="What to compare with, by commas; 'none' for nothing.")
@click.option("--shape", "shapes", multiple=True, metavar="1x128", help="Sizes of the dynamic axes; repeatable.")
@click.option("--seconds", type=SECONDS, default=2.0, show_default=True, help="Per engine and shape.")
@common_of(threads="1")
def command(console: Console, artifacts: tuple[Path, ...], baseline: str, shapes: tuple[str, ...], seconds: float) -> None:
    """Time the first of ARTIFACTS beside the others and the baselines, in turns."""
    from khtst_compile import benchmark

    rows = benchmark.bench(
        artifacts[0],
        also=artifacts[1:],
        baselines=[b for b in baseline.split(",") if b and b != "none"],
        shapes=[parse_shape(s) for s in shapes] or None,
        threads=console.threads or 1,
        seconds=seconds,
        report=console.note,
    )
    console.emit([r.to_json() for r in rows], text(rows))


def parse_shape(text: str) -> tuple[int, ...]:
    """ "8x128" -> (8, 128)."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise UsageError(f"--shape {text!r}: needed sizes joined by x, such as 8x128")
    return tuple(int(n) for n in text.split("x"))


def text(rows: list[BenchRow]) -> str:
    """The rows as a table. "ratio" is the artifact's time over the engine's."""
    from khtst_compile.benchmark import shape_text

    cells = [
        (
            shape_text(r.shape),
            r.engine,
            f"{r.median_ms:.3f}",
            f"{r.ratio:.3f}",
            "" if r.error_db is None else f"{r.error_db:.1f}",
            "" if r.worst_cosine is None else f"{r.worst_cosine:.5f}",
        )
        for r in rows
    ]
    return table(("shape", "engine", "ms", "ratio", "error dB", "worst cosine"), cells)
