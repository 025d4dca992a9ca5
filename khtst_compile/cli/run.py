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
    import numpy as np

    from khtst_compile import runtime

    if not inputs.is_file():
        raise UsageError(f"--inputs {inputs}: no such file; needed: an .npz written by numpy.savez")
    try:
        with np.load(inputs, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, AttributeError) as error:
        raise UsageError(f"--inputs {inputs}: not a plain .npz ({error}); write it with numpy.savez") from error
    loaded = runtime.load(artifact, threads=console.threads)
    results = loaded.run(arrays)
    with staged_file(outputs) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **results)  # type: ignore[arg-type]
    shapes = {name: {"dtype": value.dtype.name, "shape": list(value.shape)} for name, value in results.items()}
    lines = [f"{name}: {value.dtype.name} {value.shape}" for name, value in results.items()]
    console.emit({"outputs": shapes, "file": str(outputs)}, "\n".join([*lines, f"written to {outputs}"]))
