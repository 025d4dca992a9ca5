"""Progress on stderr: one redrawn line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, TextIO

BAR = 24
REDRAW_S = 0.1
PLAIN_S = 5.0


class Progress(Protocol):
    """What long work reports to."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """`n` more steps are done; `note` says what is being worked on."""


class NullProgress:
    """Reports nothing: the default of the Python API."""

    def advance(self, n: int = 1, note: str = "") -> None:
        return


class LineProgress:
    """See `progress`. Times are those of time.monotonic."""

    def __init__(self, total: int, label: str, stream: TextIO, quiet: bool):
        self._total, self._label, self._stream, self._quiet = max(total, 0), label, stream, quiet
        self._terminal = stream.isatty()
        self._done, self._note, self._width = 0, "", 0
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> LineProgress:
        self._started = self._shown = time.monotonic()
        if self._terminal:
            self._draw(self._started)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        seconds = time.monotonic() - self._started
        if self._done >= self._total and kind is None:
            text = f"{self._label}: {self._done} in {duration(seconds)}"
        else:
            text = f"{self._label}: stopped at {self._done} of {self._total} after {duration(seconds)}"
        self._write(text, last=True)

    def advance(self, n: int = 1, note: str = "") -> None:
        self._done += n
        self._note = note or self._note
        now = time.monotonic()
        if now - self._shown >= (REDRAW_S if self._terminal else PLAIN_S):
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._shown = now
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        left = (now - self._started) / share * (1 - share) if share > 0 else None
        eta = f"{duration(left)} left" if left is not None else "-- left"
        filled = round(BAR * share)
        bar = f"[{'#' * filled}{'.' * (BAR - filled)}] " if self._terminal else ""
        self._write(f"{self._label}: {bar}{share:4.0%} {self._done}/{self._total}, {eta} {self._note}".rstrip())

    def _write(self, text: str, last: bool = False) -> None:
        if self._quiet:
            return
        if not self._terminal:
            self._stream.write(text + "\n")
        else:
            # Blanks wipe what a longer line left behind.
            self._stream.write("\r" + text.ljust(self._width) + ("\n" if last else ""))
            self._width = len(text)
        self._stream.flush()


def progress(total: int, label: str, stream: TextIO | None = None, quiet: bool = False) -> LineProgress:
    """A context manager with `advance`: `with progress(192, "calibrate") as p: p.advance()`.

    stream: standard error by default, never standard output, which belongs to data. quiet: count, but write nothing.
    """
    return LineProgress(total, label, sys.stderr if stream is None else stream, quiet)


def duration(seconds: float) -> str:
    """3.4 -> "3.4 s", 75 -> "1 min 15 s", 7320 -> "2 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
