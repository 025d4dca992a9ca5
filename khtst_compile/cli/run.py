"""`khtst-compile run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from khtst_compile.artifact import staged_file
from khtst_compile.cli.console import Console, common
from khtst_compile.errors import UsageError


@click.command("run")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--inputs", type=click.Path(path_type=Path), required=True, help="An .npz with one array per input.")
@click.option("--outputs", type=click.Path(path_type=Path), help="The .npz to write.")
@click.option("--codes", type=click.Path(path_type=Path), help="Instead: the file of ids of codebooks to write.")
@click.option("--pack", is_flag=True, help="With --codes: as many bits an id as it needs, instead of 32.")
@click.option("--strict", is_flag=True, help="With --codes: refuse rows without a code (NaN, infinite) instead of counting them.")
@common
def command(
    console: Console, artifact: Path, inputs: Path, outputs: Path | None, codes: Path | None, pack: bool, strict: bool
) -> None:
    """Run ARTIFACT, a folder written by `lower`, `quantize` or `export`, on arrays."""
    from khtst_compile.arrays import read_arrays

    if (outputs is None) == (codes is None):
        raise UsageError("run: needed: either --outputs F.npz, for all outputs, or --codes F, for the ids of codebooks alone")
    if codes is None and (pack or strict):
        raise UsageError("run: --pack and --strict belong to --codes; add --codes F")
    if not inputs.is_file():
        raise UsageError(f"--inputs {inputs}: no such file; needed: an .npz written by numpy.savez")
    arrays = read_arrays(inputs)
    if codes is not None:
        _encode(console, artifact, arrays, codes, pack, strict)
    elif outputs is not None:
        from khtst_compile.coding import open_artifact

        write_outputs(console, open_artifact(artifact, threads=console.threads).run(arrays), outputs)


def _encode(console: Console, artifact: Path, arrays: dict[str, Any], codes: Path, pack: bool, strict: bool) -> None:
    from khtst_compile.coding import encode

    made = encode(artifact, arrays, output=codes, pack=pack, strict=strict, threads=console.threads)
    payload = made.bytes(pack)
    books = [{"site": b.site, "shape": list(b.ids.shape), "bits": list(b.widths), "lost": b.lost} for b in made.books]
    lines = [
        f"{b.site}: {b.ids.shape} ids of {', '.join(map(str, b.widths))} bits, "
        + ("rows without a code not counted" if b.lost is None else f"{b.lost} rows without a code")
        for b in made.books
    ]
    summary = {"codebooks": books, "count": made.count, "bytes": payload, "packed": pack, "lost": made.lost, "file": str(codes)}
    console.emit(summary, "\n".join([*lines, f"{made.count} ids, {payload} bytes of them written to {codes}"]))


def write_outputs(console: Console, results: dict[str, Any], outputs: Path) -> None:
    """Write arrays to an .npz and say what they are."""
    from khtst_compile.arrays import write_arrays

    with staged_file(outputs) as temporary, temporary.open("wb") as stream:
        write_arrays(stream, results)
    shapes = {name: {"dtype": value.dtype.name, "shape": list(value.shape)} for name, value in results.items()}
    lines = [f"{name}: {value.dtype.name} {value.shape}" for name, value in results.items()]
    console.emit({"outputs": shapes, "file": str(outputs)}, "\n".join([*lines, f"written to {outputs}"]))
