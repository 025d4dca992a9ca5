"""`khtst-compile verify`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.artifact import staged_file
from khtst_compile.cli.console import Console, common
from khtst_compile.errors import OverBudget


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--reference", help="The quantized folder or the original model.  [default: as recorded in the artifact]")
@click.option("--variant", help="The target to run, of an artifact for several.  [default: the best for this CPU]")
@click.option("--junit", type=click.Path(path_type=Path), help="Also write the rows as a JUnit XML file.")
@click.option("--rows", type=click.IntRange(min=0), help="Print at most so many rows of the table.  [default: all]")
@common
def command(
    console: Console, artifact: Path, reference: str | None, variant: str | None, junit: Path | None, rows: int | None
) -> int:
    """Compare ARTIFACT with what it was made from; exit code 1 and the first layer over budget where they differ too much."""
    from khtst_compile import api

    report = api.verify(artifact, reference=reference, threads=console.threads, variant=variant, report=console.note)
    if junit is not None:
        with staged_file(junit) as temporary:
            temporary.write_text(report.junit(), encoding="utf-8")
    console.emit(report.to_json(), report.table(limit=rows))
    first = report.first_over
    if first is None:
        console.note(f"{len(report.rows)} comparisons, all within budget")
        return 0
    console.complain(
        f"over budget: {first.site}: {first.what}: {first.metric} is {first.value:.6g}, the budget is {first.budget:.6g} ({first.reason})"
    )
    return OverBudget.exit_code
