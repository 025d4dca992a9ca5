"""`khtst-compile inspect`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from khtst_compile.cli.console import Console, common, table
from khtst_compile.errors import UsageError

if TYPE_CHECKING:
    from khtst_compile.listing import Listing

REASONS = 6  # of layers left alone, shown on one screen


@click.command("inspect")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Every field of the manifest, layer by layer.")
@click.option("--kernels", is_flag=True, help="List the kernels as executed, with their work and least time on this machine.")
@click.option(
    "--shapes", metavar="AXIS=N,...", help="With --kernels: sizes of dynamic axes.  [default: the golden inputs' sizes]"
)
@click.option(
    "--time", "timed", is_flag=True, help="With --kernels: measure every kernel, too. One thread unless --threads says more."
)
@click.option("--codebooks", is_flag=True, help="List the codebooks: sizes, proofs, use of codes in calibration, dead codes.")
@click.option("--plot", type=click.Path(path_type=Path), help="With --codebooks: draw the use of codes to a .png or .svg, too.")
@common
def command(
    console: Console,
    artifact: Path,
    everything: bool,
    kernels: bool,
    shapes: str | None,
    timed: bool,
    codebooks: bool,
    plot: Path | None,
) -> None:
    """Show what ARTIFACT holds: source, recipe, target, inputs and outputs, what each pass did, files. --json gives everything too."""
    from khtst_compile import api
    from khtst_compile.cli.codebooks import show

    if sum((everything, kernels, codebooks)) > 1:
        raise UsageError("inspect: --all, --kernels and --codebooks show different things; needed: at most one of them")
    if plot is not None and not codebooks:
        raise UsageError("inspect: --plot belongs to --codebooks; add --codebooks")
    if not kernels:
        if shapes is not None or timed:
            raise UsageError("inspect: --shapes and --time belong to --kernels; add --kernels")
        if codebooks:
            show(console, artifact, plot)
            return
        found = api.inspect(artifact)
        console.emit(found, "\n".join(lines(found) if everything else summary(found)))
        return
    from khtst_compile.listing import list_kernels

    listed = list_kernels(artifact, sizes=parse_sizes(shapes), timed=timed, threads=console.threads or 1)
    console.emit(listed.to_json(), listing(listed))


def summary(found: dict[str, Any]) -> list[str]:
    """One screen: what it is, what goes in and out, what each pass did, how accurate it was, how large it is."""
    target, made = found.get("target") or {}, found["made_by"]
    shown = [
        f"{found['path']}: {found['kind']}{' for ' + target['name'] if target else ''}, {found['bytes'] / 1e6:.1f} MB in "
        f"{len(found['files'])} files",
        f"source: {found['source']}",
        f"recipe: {found['recipe'] or '(none: float32)'}",
        "made by: " + ", ".join(f"{k} {made[k]}" for k in ("khtst_compile", "torch", "tvm") if k in made),
    ]
    for variant in target.get("variants", []):
        shown.append(f"{variant['name']}: {variant['library']}, needs {', '.join(variant['cpu_flags']) or 'nothing more'}")
    if target:
        shown.append(f"kernels: {len(found['program'])} calls of {len(found['kernels'])}; --kernels lists them")
    for name in ("inputs", "outputs"):
        shown += [f"{name}: " + ", ".join(f"{e['name']} {e['dtype']} {_plain(e['shape'])}" for e in found[name])]
    shown.append("axes: " + (", ".join(f"{k} {low}..{high}" for k, (low, high) in found["axes"].items()) or "none is dynamic"))
    shown += [f"{what}: {value:.6g}" for what, value in (found["golden"].get("accuracy") or {}).items() if value is not None]
    rows = [(p["pass"], str(p["changed"]), str(len(p["skipped"])), f"{p['seconds']:.1f}") for p in found["passes"]]
    if rows:
        shown += ["", *table(("pass", "changed", "left alone", "s"), rows).splitlines()]
    reasons = Counter((p["pass"], s["reason"].split(": ")[0]) for p in found["passes"] for s in p["skipped"])
    shown += [f"{step} left alone {count}: {reason}" for (step, reason), count in reasons.most_common(REASONS)]
    return [*shown, "", "--all shows every layer and file, --json everything"]


def parse_sizes(text: str | None) -> dict[str, int]:
    """ "batch=1,sequence=128" -> {"batch": 1, "sequence": 128}."""
    sizes = {}
    for part in text.split(",") if text else []:
        name, _, number = part.partition("=")
        if not number.isdecimal() or not name:
            raise UsageError(f"--shapes {part!r}: needed AXIS=N, such as batch=1,sequence=128")
        sizes[name] = int(number)
    return sizes


def listing(found: Listing) -> str:
    """A Listing as a table with totals and the machine's figures below."""
    cells = []
    for row in found.rows:
        given, made = row.shapes[: len(row.shapes) - row.outputs], row.shapes[len(row.shapes) - row.outputs :]
        shapes = f"{_shape(given[0]) if given else ''} -> {', '.join(map(_shape, made))}"
        measured = () if row.measured_s is None or row.share is None else (f"{row.measured_s * 1e6:.1f}", f"{row.share:.0%}")
        work = (f"{row.bytes / 1e3:.1f}", f"{row.macs / 1e6:.2f}", f"{row.expected_s * 1e6:.1f}", row.bound)
        cells.append((_short(row.kernel, 40), _short(row.site, 44), shapes, *work, *measured))
    header = ("kernel", "site", "shapes", "kB", "MMAC", "least us", "bound")
    timed = ("us", "share") if found.run_s is not None else ()
    totals, peak = found.totals, found.peak
    sizes = ", ".join(f"{k} {v}" for k, v in found.sizes.items()) or "fixed sizes"
    parts = f"{found.parts} parts of " if found.parts > 1 else ""
    below = [
        f"{sizes}: {parts}{len(found.rows)} kernels, {totals['bytes'] or 0:,.0f} bytes, {totals['macs'] or 0:,.0f} multiply-adds "
        f"({totals['linear_macs'] or 0:,.0f} in linear layers), least time {(totals['expected_s'] or 0) * 1e3:.3f} ms",
        f"this machine, {peak.isa}, {peak.threads} thread(s): {peak.int8_macs / 1e9:.1f} G int8 and {peak.float32_macs / 1e9:.1f} G "
        f"float32 multiply-adds a second, reads "
        + ", ".join(f"{rate / 1e9:.1f} GB/s from {size >> 10} KiB" for size, rate in peak.reads),
    ]
    if found.run_s is not None and totals["kernels_s"] is not None and totals["linear_share"] is not None:
        below.append(
            f"measured: kernels {totals['kernels_s'] * 1e3:.3f} ms, a whole run {found.run_s * 1e3:.3f} ms; "
            f"linear layers alone at peak would take {totals['linear_share']:.1%} of it"
        )
    return "\n".join([table((*header, *timed), cells), "", *below])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def lines(value: Any, indent: int = 0) -> list[str]:
    """Nested dicts and lists as indented "key: value" lines; short flat lists on one line."""
    pad = "  " * indent
    shown: list[str] = []
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        label = f"{pad}{key}:" if isinstance(value, dict) else f"{pad}-"
        flat = isinstance(entry, list) and all(not isinstance(e, (dict, list)) for e in entry)
        if isinstance(entry, (dict, list)) and entry and not flat:
            small = isinstance(entry, dict) and all(not isinstance(e, dict) for e in entry.values())
            text = ", ".join(f"{k} {_plain(v)}" for k, v in entry.items()) if small and isinstance(entry, dict) else ""
            if small and len(text) <= 110:
                shown.append(f"{label} {text}")
            else:
                shown += [label, *lines(entry, indent + 1)]
        else:
            shown.append(f"{label} {_plain(entry)}")
    return shown


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(_plain(v) for v in value) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
