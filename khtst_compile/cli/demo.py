"""`khtst-compile demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from khtst_compile.cli import bench as bench_verb
from khtst_compile.cli.console import SECONDS, Console, common_of, table
from khtst_compile.errors import OverBudget

if TYPE_CHECKING:
    from khtst_compile.demo import DemoReport


@click.command("demo")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="out/demo", show_default=True, help="Folder to write to."
)
@click.option("--model", type=click.Path(path_type=Path), help="Another sentence-embedding model.  [default: MiniLM-L6]")
@click.option("--data", type=click.Path(path_type=Path), help="Texts to calibrate and judge on.  [default: WordNet glosses]")
@click.option("--recipe", default="w8a8-rotated", show_default=True)
@click.option("--shape", "shapes", multiple=True, metavar="1x128", help="Sizes to time at; repeatable.")
@click.option("--texts", type=click.IntRange(min=1), help="Judge on so many queries at most.  [default: all]")
@click.option("--seconds", type=SECONDS, default=2.0, show_default=True, help="Timing per engine and shape.")
@common_of(threads="1")
def command(
    console: Console,
    output: Path,
    model: Path | None,
    data: Path | None,
    recipe: str,
    shapes: tuple[str, ...],
    texts: int | None,
    seconds: float,
) -> int:
    """Quantize MiniLM-L6, compile it for this machine, export it, verify it, judge it on retrieval and time it."""
    from khtst_compile import demo

    report = demo.demo(
        output,
        model=model,
        data=data,
        recipe=recipe,
        threads=console.threads or 1,
        seconds=seconds,
        texts=texts,
        shapes=[bench_verb.parse_shape(s) for s in shapes] or demo.SHAPES,
        seed=console.seed,
        progress=console.progress,
        report=console.note,
    )
    console.emit({**report.to_json(), "output": str(output.absolute())}, f"{text(report)}\n{_where(output)}")
    return 0 if report.ok else OverBudget.exit_code


def _where(output: Path) -> str:
    """The artifacts that are left and what to do with them."""
    folder = output.absolute()
    return f"Artifacts: {folder}/quantized, {folder}/x86 (khtst-compile run, inspect, bench) and {folder}/onnx/model.onnx"


def text(report: DemoReport) -> str:
    """Everything in tables."""
    quality = [
        (
            q.engine,
            "" if q.error_db is None else f"{q.error_db:.1f}",
            "" if q.worst_cosine is None else f"{q.worst_cosine:.5f}",
            "" if q.agreement is None else f"{q.agreement:.3f}",
            f"{q.correct:.3f}",
        )
        for q in report.quality
    ]
    steps = [*report.seconds.items(), ("all", sum(report.seconds.values()))]
    lines = ["", "Retrieval, on text the model was not calibrated on"]
    lines.append(table(("engine", "error dB", "worst cosine", "same top 1", "right top 1"), quality))
    lines += ["", "Latency; ratio is the time of the first row over the row's own", bench_verb.text(list(report.speed)), ""]
    lines.append("Size, MB: " + ", ".join(f"{k} {v:.1f}" for k, v in report.megabytes.items()))
    lines.append("Time, s: " + ", ".join(f"{k} {v:.1f}" for k, v in steps))
    for name, parity in report.verified.items():
        over = parity.first_over
        state = "all within budget" if over is None else f"OVER BUDGET at {over.site} ({over.what})"
        lines.append(f"Verified {name}: {len(parity.rows)} comparisons, {state}")
    return "\n".join(lines)
