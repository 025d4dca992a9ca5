"""`khtst-compile inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from khtst_compile.cli.console import Console, common


@click.command("inspect")
@click.argument("artifact", type=click.Path(path_type=Path))
@common
def command(console: Console, artifact: Path) -> None:
    """Show what ARTIFACT holds: source, recipe, target, inputs and outputs, what each pass did, files."""
    from khtst_compile import api

    found = api.inspect(artifact)
    console.emit(found, "\n".join(lines(found)))


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
