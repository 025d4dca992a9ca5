"""Checks of what a caller of the Python interface passes, so that a wrong type is one sentence and no traceback from below."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from khtst_compile.errors import ResourceError, UsageError


def as_path(value: Any, what: str) -> Path:
    """`value` as a path. Raises UsageError where it is no text or path, or empty."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes) or not os.fspath(value):
        raise UsageError(f"{what} is {_shown(value)}; needed: a path, as text or pathlib.Path")
    return Path(value)


def check_type(value: Any, what: str, kinds: type | tuple[type, ...], needed: str) -> None:
    """Raise UsageError where `value` is none of `kinds`. A bool counts as a number only where bool is named."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UsageError(f"{what} is {_shown(value)}; needed: {needed}")


def check_count(value: Any, what: str) -> None:
    """Raise UsageError where `value` is no whole number of at least 1."""
    check_type(value, what, int, "a whole number of at least 1")
    if value < 1:
        raise UsageError(f"{what} is {value}; needed: at least 1")


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise ResourceError where the disk of `folder` has fewer than `needed` bytes free: LLVM's and torch's writers end the process
    when they fail."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder}: {free / 1e6:.0f} MB free, {what} needs about {needed / 1e6:.0f} MB; free some or choose another disk"
        )


def _shown(value: Any) -> str:
    """`value` where it is short, else its type."""
    text = repr(value)
    return f"{text} ({type(value).__name__})" if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
