"""What every verb shares: its common options, and where it writes."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from khtst_compile.progress import LineProgress, progress

_done: list[str] = []
_STARTED = time.monotonic()


@dataclass(frozen=True)
class Console:
    """json: results as JSON; quiet: no progress and no notes; verbose: 0, 1 (log and tracebacks) or 2 (debug log); threads: worker
    threads or None for every usable core; seed: for everything drawn."""

    json: bool
    quiet: bool
    verbose: int
    threads: int | None
    seed: int

    def emit(self, data: Any, text: str) -> None:
        """The result, on standard output: `data` as JSON with --json, else `text`."""
        print(json.dumps(_finite(data), indent=1, allow_nan=False) if self.json else text, flush=True)

    def note(self, line: str) -> None:
        """One line about what was just done, on standard error."""
        _done.append(line.split(":", 1)[0])
        if not self.quiet:
            print(f"[{time.monotonic() - _STARTED:6.1f} s] {line}" if self.verbose else line, file=sys.stderr, flush=True)

    def complain(self, line: str) -> None:
        """One line on standard error that --quiet does not hide."""
        print(line, file=sys.stderr, flush=True)

    def progress(self, total: int, label: str) -> LineProgress:
        """A progress line on standard error."""
        return progress(total, label, quiet=self.quiet)


def done_so_far() -> str:
    """The steps that were reported, for the message after an interrupt."""
    return f"done so far: {', '.join(dict.fromkeys(_done))}" if _done else "nothing was finished"


class _Seconds(click.FloatRange):
    """A time that ends: NaN lies in every range, and infinity above every minimum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return found


SECONDS = _Seconds(min=0.01)


def common_of(*, threads: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`common`, for a verb that uses as many threads as the text says unless it is told otherwise."""
    return functools.partial(_common, default_threads=threads)


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json, -q, -v, --threads and --seed; the function gets them as its first argument, a Console."""
    return _common(function, default_threads="every usable core")


def _common(function: Callable[..., Any], *, default_threads: str) -> Callable[..., Any]:
    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    @click.option("-q", "--quiet", is_flag=True, help="Errors only: no progress, notes or warnings.")
    @click.option("-v", "--verbose", count=True, help="Times, every layer left alone, tracebacks of errors. Twice: debugging.")
    @click.option("--threads", type=click.IntRange(min=1), help=f"Worker threads.  [default: {default_threads}]")
    @click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="For everything drawn.")
    @functools.wraps(function)
    def wrapped(*, as_json: bool, quiet: bool, verbose: int, threads: int | None, seed: int, **options: Any) -> Any:
        level = logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
        logging.basicConfig(stream=sys.stderr, format="%(levelname)s: %(message)s", force=True)
        logging.getLogger("khtst_compile").setLevel(level)
        if verbose == 0:
            warnings.simplefilter("ignore")  # of packages below us, about their own future: nothing a user could act on
        if threads is not None:
            # Read once, when torch and TVM load, which is after this.
            os.environ.update(OMP_NUM_THREADS=str(threads), TVM_NUM_THREADS=str(threads))
        return function(Console(as_json, quiet, verbose, threads, seed), **options)

    return wrapped


def _finite(data: Any) -> Any:
    """Infinities and NaN as text: JSON has no such numbers."""
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(v) for v in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their content; those after the first are right-aligned where every entry starts like a number."""
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(header))]
    numeric = [bool(rows) and all(r[i][:1] in "-0123456789" for r in rows if r[i]) for i in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(tuple("-" * w for w in widths)), *(line(r) for r in rows)])
