"""`khtst-compile kernels`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.cli.console import Console, common


@click.command("kernels")
@click.option("--target", default="armv7-neon", show_default=True, help="What the library is for.")
@click.option("--linear", "linears", multiple=True, metavar="NxK", help="Output by input features of a layer; repeatable.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@common
def command(console: Console, target: str, linears: tuple[str, ...], output: Path) -> None:
    """Compile int8 layers as a C library, for processors that no whole model can be lowered for."""
    from khtst_compile import api

    made = api.kernels(output, target=target, linears=linears)
    size = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
    layers = list(dict.fromkeys(linears))
    summary = {"folder": str(made), "target": target, "linears": layers, "bytes": size}
    console.emit(summary, f"{made}: {len(layers)} layers for {target}, {size / 1e6:.1f} MB")
