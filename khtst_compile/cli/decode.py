"""`khtst-compile decode`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.cli.console import Console, common
from khtst_compile.cli.run import write_outputs


@click.command("decode")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("codes", type=click.Path(path_type=Path))
@click.option("--outputs", type=click.Path(path_type=Path), required=True, help="The .npz to write.")
@common
def command(console: Console, artifact: Path, codes: Path, outputs: Path) -> None:
    """Turn CODES, a file written by `run --codes`, into outputs by ARTIFACT, a decoder that `split` made."""
    from khtst_compile.coding import decode

    write_outputs(console, decode(artifact, codes, threads=console.threads), outputs)
