"""`khtst-compile targets`."""

from __future__ import annotations

import click

from khtst_compile.cli.console import Console, common, table


@click.command("targets")
@common
def command(console: Console) -> None:
    """List targets, what each is for, and whether its programs can run on this machine."""
    from khtst_compile.targets.table import TARGETS, target

    found = []
    for name, (_, line) in TARGETS.items():
        made = target(name)
        found.append(
            {
                "name": name,
                "is": made.name,
                "summary": line,
                "cpu_flags": list(made.isa.cpu_flags),
                "unavailable": made.unavailable(),
            }
        )
    rows = [
        (
            str(e["name"]),
            f"{e['summary']}{'' if e['is'] == e['name'] else ' (here: ' + str(e['is']) + ')'}",
            str(e["unavailable"] or "yes"),
        )
        for e in found
    ]
    console.emit(found, table(("target", "for", "runs here"), rows))
