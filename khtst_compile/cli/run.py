"""`khtst-compile run`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.artifact import staged_file
from khtst_compile.cli.console import Console, common
from khtst_compile.errors import UsageError


@click.command("run")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--inputs", type=click.Path(path_type=Path), required=True, help="An .npz with one array per input.")
@click.option("--outputs", type=click.Path(path_type=Path), required=True, help="The .npz to write.")
@common
def command(console: Console, artifact: Path, inputs: Path, outputs: Path) -> None:
    """Run ARTIFACT, a folder written by `lower`, on arrays."""
    from khtst_compile import runtime
    from khtst_compile.arrays import read_arrays, write_arrays

    if not inputs.is_file():
        raise UsageError(f"--inputs {inputs}: no such file; needed: an .npz written by numpy.savez")
    arrays = read_arrays(inputs)
    loaded = runtime.load(artifact, threads=console.threads)
    results = loaded.run(arrays)
    with staged_file(outputs) as temporary, temporary.open("wb") as stream:
        write_arrays(stream, results)
    shapes = {name: {"dtype": value.dtype.name, "shape": list(value.shape)} for name, value in results.items()}
    lines = [f"{name}: {value.dtype.name} {value.shape}" for name, value in results.items()]
    console.emit({"outputs": shapes, "file": str(outputs)}, "\n".join([*lines, f"written to {outputs}"]))
