"""`khtst-compile inspect`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from khtst_compile.cli.console import Console, common, table

REASONS = 6  # of layers left alone, shown on one screen


@click.command("inspect")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Every field of the manifest, layer by layer.")
@common
def command(console: Console, artifact: Path, everything: bool) -> None:
    """Show what ARTIFACT holds: source, recipe, target, inputs and outputs, what each pass did, files. --json gives everything too."""
    from khtst_compile import api

    found = api.inspect(artifact)
    console.emit(found, "\n".join(lines(found) if everything else summary(found)))


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
    if target:
        shown.append(f"needs: {', '.join(target['cpu_flags']) or 'any x86'}; {len(found['kernels'])} kernels")
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
