"""Failures -> one message on standard error (or one JSON object on standard output) and an exit code."""

from __future__ import annotations

import errno
import json
import logging
import sys
import traceback
from collections.abc import Sequence

import click

from khtst_compile.cli import console
from khtst_compile.errors import KhtstError

BUG, INTERRUPTED, TERMINATED, OUT_OF_RESOURCES, USAGE = 70, 130, 143, 5, 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Terminated(BaseException):
    """The process got SIGTERM."""


def exit_code_of(error: BaseException, arguments: Sequence[str]) -> int:
    """Say what went wrong and return the exit code. arguments: as given, for --json and -v where parsing had not come that far."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    code, kind, message = describe(error)
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in before:
        print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}), flush=True)
    else:
        print(message if code in (INTERRUPTED, TERMINATED) else f"error: {message}", file=sys.stderr)
    if (
        logging.getLogger("khtst_compile").isEnabledFor(logging.INFO)
        and code not in (INTERRUPTED, TERMINATED)
        and not isinstance(error, click.ClickException)
    ):
        traceback.print_exception(error, file=sys.stderr)
    return code


def describe(error: BaseException) -> tuple[int, str, str]:
    """(exit code, kind, message) of an error."""
    if isinstance(error, KhtstError):
        return error.exit_code, type(error).__name__, str(error)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        done = console.done_so_far()
        return INTERRUPTED, "Interrupted", f"interrupted; {done}; no output was written"
    if isinstance(error, Terminated):
        return TERMINATED, "Terminated", f"terminated; {console.done_so_far()}; no output was written"
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return USAGE, "UsageError", error.format_message() + hint
    if isinstance(error, MemoryError) or _torch_out_of_memory(error):
        return OUT_OF_RESOURCES, "ResourceError", "out of memory; use a smaller --limit or --max-length, or a machine with more"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return OUT_OF_RESOURCES, "ResourceError", f"no space left on the disk of {error.filename}; free some or choose another"
    if isinstance(error, PermissionError):
        return USAGE, "UsageError", f"{error.filename}: permission denied; choose a path you may use"
    first = (str(error).strip().splitlines() or [""])[0]
    return BUG, type(error).__name__, f"unexpected {type(error).__name__}: {first} (-v shows where; please report it)"


def _torch_out_of_memory(error: BaseException) -> bool:
    """torch reports failed allocations of its CPU allocator as a RuntimeError."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
