"""What links libraries for a processor: this machine's compiler for its own, a cross compiler for another."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

from khtst_compile.errors import EnvironmentProblem

INSTALL = {"aarch64": "apt-get install g++-aarch64-linux-gnu"}
"""Processor -> the command that brings its cross compiler."""


def cross_compiler(triple: str) -> str | None:
    """The path of the cross compiler for a triple; None where this machine's own serves. Raises EnvironmentProblem where there is none."""
    processor = triple.partition("-")[0]
    if processor == platform.machine():
        return None
    name = f"{triple}-g++"
    found = shutil.which(name)
    if found is None:
        raise EnvironmentProblem(
            f"linking for {triple}: this machine is {platform.machine()} and {name} is not on the path; "
            f"needed: a cross compiler of that name; {INSTALL.get(processor, 'install one')}"
        )
    return found


def link(module: Any, path: Path, triple: str) -> None:
    """Write what TVM compiled for `triple` as a shared library. Raises EnvironmentProblem where there is no linker for it."""
    compiler = cross_compiler(triple)
    if compiler is None:
        module.export_library(str(path))
        return
    from tvm.support import cc

    module.export_library(str(path), fcompile=cc.cross_compiler(compiler))
