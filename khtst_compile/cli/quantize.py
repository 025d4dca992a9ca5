"""`khtst-compile quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from khtst_compile.cli.console import Console, common, table
from khtst_compile.errors import UsageError

SHOWN = 12  # layers left alone that the summary names


@click.command("quantize")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--calib", type=click.Path(path_type=Path), help="Calibration data: .txt, .jsonl, .json, .npz or .npy.")
@click.option("--random", is_flag=True, help="Calibrate on random inputs instead (ranges will be wrong; to try things out).")
@click.option("--recipe", default="w8a8-rotated", show_default=True, help="Name or text of a recipe; see `khtst-compile passes`.")
@click.option("--keep-fp32", multiple=True, metavar="GLOB", help="Leave layers whose name fits in float32; repeatable.")
@click.option(
    "--kv-cache",
    type=click.Choice(("float32", "int8")),
    default="float32",
    show_default=True,
    help="What a language model keeps its keys and values as.",
)
@click.option("--retract", is_flag=True, help="Project codebooks that have lost orthonormality; their ids and values move.")
@click.option("--prune-dead", is_flag=True, help="Leave out codes that no calibration vector chose; ids are renumbered.")
@click.option("--strict", is_flag=True, help="Refuse calibration vectors that no code can be given to (NaN).")
@click.option("--task", help="What the model is for, where its architecture does not say.")
@click.option("--shapes", multiple=True, metavar="NAME=MIN..MAX", help="Bounds of a dynamic axis; repeatable.")
@click.option("--limit", type=click.IntRange(min=1), default=256, show_default=True, help="Calibration samples to use at most.")
@click.option(
    "--max-length", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to cut calibration texts at."
)
@click.option("--dump", type=click.Path(path_type=Path, file_okay=False), help="Folder for the graph after every pass.")
@common
def command(
    console: Console,
    model: str,
    output: Path,
    calib: Path | None,
    random: bool,
    recipe: str,
    keep_fp32: tuple[str, ...],
    kv_cache: str,
    retract: bool,
    prune_dead: bool,
    strict: bool,
    task: str | None,
    shapes: tuple[str, ...],
    limit: int,
    max_length: int,
    dump: Path | None,
) -> None:
    """Quantize MODEL: a Hugging Face folder, package.module:factory, or a .pt2 file."""
    if calib is None and not random and (_reads_data(recipe) or kv_cache != "float32"):
        raise UsageError("no calibration data: name a file with --calib, or ask for --random to try things out")
    if calib is not None and random:
        raise UsageError("--calib and --random exclude each other; give one of them")
    from khtst_compile import api
    from khtst_compile.capture.shapes import parse_shapes

    result = api.quantize(
        model,
        output,
        calib=calib,
        recipe=recipe,
        keep_fp32=keep_fp32,
        kv_cache=kv_cache,
        retract=retract,
        prune_dead=prune_dead,
        strict=strict,
        task=task,
        shapes=parse_shapes(shapes) or None,
        random=random,
        limit=limit,
        max_length=max_length,
        seed=console.seed,
        dump=dump,
        progress=console.progress,
        report=console.note,
    )
    summary = summarize(result.folder, result.manifest, result.seconds)
    console.emit(summary, _text(summary))


def _reads_data(recipe: str) -> bool:
    from khtst_compile.recipe import RECIPES

    return bool(RECIPES.get(recipe.strip(), recipe).strip())


_CODEBOOK = ("site", "source", "codes", "features", "vectors", "differ", "near_ties", "lost")


def summarize(folder: Path, manifest: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What `quantize` did, JSON-able."""
    return {
        "artifact": str(folder),
        "source": manifest["source"],
        "recipe": manifest["recipe"],
        "passes": [
            {"pass": p["pass"], "changed": p["changed"], "skipped": p["skipped"], "seconds": p["seconds"]}
            for p in manifest["passes"]
        ],
        "codebooks": [{name: entry[name] for name in _CODEBOOK} for entry in manifest["meta"].get("codebooks", [])],
        "seconds": round(seconds, 3),
    }


def _text(summary: dict[str, Any]) -> str:
    rows = [(p["pass"], str(p["changed"]), str(len(p["skipped"])), f"{p['seconds']:.1f}") for p in summary["passes"]]
    lines = [table(("pass", "changed", "left alone", "s"), rows)]
    for book in summary["codebooks"]:
        sizes = ", ".join(map(str, book["codes"]))
        lines.append(
            f"codebook {book['site']} ({book['source']}): {sizes} codes of {book['features']} features; of {book['vectors']} calibration "
            f"vectors {book['differ']} have another id than in the model, {book['near_ties']} are near ties, {book['lost']} have no code"
        )
    left = [f"{p['pass']} left alone {s['site']}: {s['reason']}" for p in summary["passes"] for s in p["skipped"]]
    lines += left[:SHOWN]
    if len(left) > SHOWN:
        lines.append(f"... and {len(left) - SHOWN} more, which -v and --json name")
    lines.append(f"{summary['artifact']}: quantized by {summary['recipe']!r} in {summary['seconds']:.1f} s")
    return "\n".join(lines)
