"""`khtst-compile doctor`."""

from __future__ import annotations

import click

from khtst_compile.cli.console import Console, common, table
from khtst_compile.errors import EnvironmentProblem


@click.command("doctor")
@click.option("--target", metavar="T", help="Also compile, link and run a probe for this target; see `khtst-compile targets`.")
@common
def command(console: Console, target: str | None) -> int:
    """Check versions, known-bad pairs, CPU features, compilers, disk and memory; exit code 4 where something needed is missing."""
    from khtst_compile import doctor

    if target is not None:
        from khtst_compile.targets.table import variants

        variants(target)  # a wrong name is told before anything is looked at
    checks = doctor.examine()
    if target is not None:
        from khtst_compile import doctor_target

        usable = all(c.status != doctor.BAD for c in checks if c.name in doctor.EXACT or c.name.startswith("import "))
        checks += doctor_target.examine(target) if usable else []
    bad = [c for c in checks if c.status == doctor.BAD]
    rows = [(c.status, c.name, c.found) for c in checks]
    lines = [table(("", "what", "found"), rows), *(f"{c.name}: {c.advice}" for c in checks if c.advice)]
    lines.append(f"{len(bad)} to mend" if bad else "all that is needed is there")
    console.emit({"ok": not bad, "checks": [c.to_json() for c in checks]}, "\n".join(lines))
    return EnvironmentProblem.exit_code if bad else 0
