"""`khtst-compile perplexity`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from khtst_compile.cli.console import Console, common


@click.command("perplexity")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Texts or token ids, as for calibration.")
@click.option("--reference", type=click.Path(path_type=Path), help="Another model to judge on the same windows.")
@click.option("--limit", type=click.IntRange(min=1), default=64, show_default=True, help="Windows to judge at most.")
@click.option("--max-length", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens of a window.")
@common
def command(console: Console, model: Path, data: Path, reference: Path | None, limit: int, max_length: int) -> None:
    """How well MODEL (an artifact of quantize or lower, or a Hugging Face folder) predicts a text."""
    from khtst_compile.evaluate import perplexity

    mine, other = perplexity(
        model, data, reference=reference, limit=limit, max_length=max_length, seed=console.seed, threads=console.threads
    )
    summary: dict[str, Any] = {"model": str(model), **dataclasses.asdict(mine)}
    lines = [f"{model}: perplexity {mine.value:.4f} over {mine.tokens} tokens"]
    if other is not None:
        rise = mine.value / other.value - 1
        summary["reference"] = {"model": str(reference), **dataclasses.asdict(other)}
        summary["rise"] = rise
        lines += [f"{reference}: perplexity {other.value:.4f}", f"{100 * rise:+.2f} % against the reference"]
    console.emit(summary, "\n".join(lines))
