"""What a pass is, and how passes run.

A pass is a frozen dataclass whose fields are its options. It never writes into the program it is given and says truthfully
what it changed and what it left alone.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from khtst_compile.errors import KhtstError, PassError

if TYPE_CHECKING:
    from khtst_compile.program import Program  # loads torch, which listing passes and recipes has no need of


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skipped:
    """One candidate a pass left alone: its site in the model and the reason."""

    site: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """changed: number of rewrites really made; details: site -> JSON-able facts worth keeping (alpha, error, ...)."""

    program: Program
    changed: int
    skipped: tuple[Skipped, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class Pass(Protocol):
    """See docs: a frozen dataclass with these members."""

    name: ClassVar[str]

    def check_options(self) -> None:
        """Raise UsageError for options that no program could make sense of; asked as soon as a recipe is read."""

    def requires(self, program: Program) -> None:
        """Raise PassError where the pass cannot apply."""

    def run(self, program: Program) -> Outcome:
        """Return a new program and what was done."""

    def ensures(self, before: Program, after: Program) -> None:
        """Raise PassError where what the pass promises does not hold."""


Report = Callable[[str], None]


def run_passes(program: Program, passes: Sequence[Pass], *, dump: Path | None = None, report: Report | None = None) -> Program:
    """Run `passes` in order, checking the graph after each; an error says which pass it was and what had run before.

    dump: a folder for numbered graph listings; report: called with one line per pass.
    """
    from khtst_compile.program import check_program

    done: list[str] = []
    for number, step in enumerate(passes):
        started = time.perf_counter()
        try:
            step.check_options()
            step.requires(program)
            outcome = step.run(program)
            check_program(outcome.program)
            step.ensures(program, outcome.program)
        except KhtstError as error:
            ran = ", ".join(done) or "none"
            raise type(error)(f"pass {step.name!r}: {error} (passes that had run: {ran})") from error
        entry = {
            "pass": step.name,
            "options": options_of(step),
            "changed": outcome.changed,
            "skipped": [dataclasses.asdict(s) for s in outcome.skipped],
            "details": outcome.details,
            "seconds": round(time.perf_counter() - started, 3),
        }
        program = replace(outcome.program, history=(*outcome.program.history, entry))
        done.append(step.name)
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{number:02d}_{step.name}.txt").write_text(str(program.graph) + "\n", encoding="utf-8")
        for candidate in outcome.skipped:
            log.info("%s left alone %s: %s", step.name, candidate.site, candidate.reason)
        if report is not None:
            report(f"{step.name}: {outcome.changed} changed, {len(outcome.skipped)} left alone, {entry['seconds']:.1f} s")
    return program


def options_of(step: Pass) -> dict[str, Any]:
    """The options of a pass, JSON-able."""
    if not dataclasses.is_dataclass(step):
        raise PassError(f"pass {step.name!r} is not a dataclass")
    return {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
