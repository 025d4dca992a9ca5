"""`khtst-compile lower`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.cli.console import Console, common


@click.command("lower")
@click.argument("quantized", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--target", default="x86", show_default=True, help="Where it will run; see `khtst-compile targets`.")
@click.option(
    "--tune", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Measure tiles of matrix products here."
)
@click.option("--tuned", type=click.Path(path_type=Path), help="Take up what was measured for this artifact.")
@click.option("--triple", help="The system it will run on, such as aarch64-linux-musl.  [default: Linux with glibc]")
@click.option("--emit-runner", is_flag=True, help="Also write what runs it on a device without Python.")
@common
def command(
    console: Console,
    quantized: Path,
    output: Path,
    target: str,
    tune: float,
    tuned: Path | None,
    triple: str | None,
    emit_runner: bool,
) -> None:
    """Compile QUANTIZED, a folder written by `quantize`, for a target."""
    from khtst_compile import api

    result = api.lower(
        quantized,
        output,
        target=target,
        threads=console.threads,
        tune=tune,
        tuned=tuned,
        emit_runner=emit_runner,
        triple=triple,
        report=console.note,
        progress=console.progress,
    )
    chosen = result.manifest["target"]
    size = sum(int(f["bytes"]) for f in result.manifest["files"].values())
    summary = {
        "artifact": str(result.folder),
        "target": chosen["name"],
        "variants": [{k: v[k] for k in ("name", "cpu_flags", "library", "build_s")} for v in chosen["variants"]],
        "bytes": size,
        "tuning": result.manifest["tuning"],
        "runner": result.manifest.get("runner"),
        "seconds": round(result.seconds, 3),
    }
    built = ", ".join(v["name"] for v in chosen["variants"])
    text = f"{result.folder}: compiled for {built} in {result.seconds:.1f} s, {size / 1e6:.1f} MB"
    console.emit(summary, text)
