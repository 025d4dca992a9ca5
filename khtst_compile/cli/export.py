"""`khtst-compile export`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.cli.console import Console, common


@click.command("export")
@click.argument("quantized", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="File (ending in .onnx) or artifact folder to write."
)
@click.option("--format", "form", type=click.Choice(["onnx"]), default="onnx", show_default=True)
@click.option("--opset", type=int, default=20, show_default=True, help="ONNX operator set, 18 to 23.")
@click.option(
    "--rotation",
    type=click.Choice(["matmul", "exact"]),
    default="matmul",
    show_default=True,
    help="Rotations as products (fast; codes within one step) or as the additions of the quantizer (the same bits).",
)
@common
def command(console: Console, quantized: Path, output: Path, form: str, opset: int, rotation: str) -> None:
    """Write QUANTIZED, a folder written by `quantize`, as ONNX."""
    from khtst_compile import api

    result = api.export(quantized, output, format=form, opset=opset, rotation=rotation, report=console.note)
    summary = {
        "output": str(result.folder),
        "format": form,
        "opset": opset,
        "rotation": rotation,
        "seconds": round(result.seconds, 3),
    }
    console.emit(summary, f"{result.folder}: exported to ONNX opset {opset} in {result.seconds:.1f} s")
