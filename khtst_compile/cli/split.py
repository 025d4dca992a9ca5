"""`khtst-compile split`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.cli.console import Console, common


@click.command("split")
@click.argument("quantized", type=click.Path(path_type=Path))
@click.option("--encoder", type=click.Path(path_type=Path), required=True, help="Folder to write: inputs to ids.")
@click.option("--decoder", type=click.Path(path_type=Path), required=True, help="Folder to write: ids to outputs.")
@common
def command(console: Console, quantized: Path, encoder: Path, decoder: Path) -> None:
    """Cut QUANTIZED, a folder written by `quantize`, at its codebooks into two that talk in ids."""
    from khtst_compile import api

    results = api.split(quantized, encoder=encoder, decoder=decoder, report=console.note)
    shown, lines = {}, []
    for result in results:
        m = result.manifest
        part = m["meta"]["split"]
        size = sum(int(f["bytes"]) for f in m["files"].values())
        names = {side: [s["name"] for s in m[side]] for side in ("inputs", "outputs")}
        shown[part["part"]] = {"artifact": str(result.folder), **names, "bytes": size}
        lines.append(
            f"{result.folder}: {part['part']}, {', '.join(names['inputs'])} -> {', '.join(names['outputs'])}, {size / 1e6:.1f} MB"
        )
    left_out = results[0].manifest["meta"]["split"]["left_out"]
    if left_out:
        lines.append(f"outputs that hold ids alone are left out: {', '.join(left_out)}")
    console.emit({**shown, "left_out": left_out, "seconds": round(results[0].seconds, 3)}, "\n".join(lines))
