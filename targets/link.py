"""What links libraries for a processor: this machine's compiler for its own, a cross compiler for another."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from khtst_compile.doctor import compiler
from khtst_compile.errors import EnvironmentProblem
from khtst_compile.runner.platforms import ziglang
from khtst_compile.targets.isa import Isa

INSTALL = {"aarch64": "apt-get install g++-aarch64-linux-gnu"}
"""Processor -> the command that brings its cross compiler."""
BARE = ("-nostdlib", "-Wl,--hash-style=both", "-Wl,-z,noexecstack", "-Wl,--no-as-needed")
NEEDED = {"android": ("libc.so",)}
"""System -> libraries that a model's library has to name, beyond those it is linked with."""


def cross_compiler(triple: str) -> list[str] | None:
    """A command that compiles C and links for a triple: GCC's cross compiler, else ziglang of this Python; None where this machine's own
    compiler serves. Raises EnvironmentProblem where there is none."""
    processor = triple.partition("-")[0]
    if processor == platform.machine():
        return None
    name = f"{triple}-g++"
    if found := shutil.which(name):
        return [found]
    if command := ziglang(triple):
        return command
    raise EnvironmentProblem(
        f"linking for {triple}: this machine is {platform.machine()}, {name} is not on the path and ziglang not in this Python; "
        f"needed: one of the two; {INSTALL.get(processor, 'install a cross compiler')} (Debian, Ubuntu), or pip install ziglang"
    )


def linker(triple: str) -> list[str] | None:
    """A command that links a model's library for a triple; None where TVM's own way serves. Raises EnvironmentProblem where there is none.

    A model's library takes nothing from its system but memset, memcpy and memmove, so on a system other than glibc's it is linked with no
    library at all, by any linker for the processor: no sysroot and no NDK is needed.
    """
    processor, _, system = triple.partition("-linux-")
    command = cross_compiler(f"{processor}-linux-gnu")
    own = compiler() if command is None else None
    if command is None and own is None:
        raise EnvironmentProblem(f"no C++ compiler for {triple}; needed: g++ or clang++; apt-get install g++ (Debian, Ubuntu)")
    if system == "gnu":
        return command
    return [*(command or [str(own)]), *BARE]


def shared(command: Sequence[str], output: str | Path, files: Sequence[str | Path]) -> None:
    """Link objects, or compile and link C sources, as a shared library. Raises EnvironmentProblem with the compiler's last words."""
    done = subprocess.run(
        [*command, "-shared", "-fPIC", "-o", str(output), *map(str, files)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EnvironmentProblem(f"{' '.join(command)} cannot link ({said}); needed: one that links C; install it again")


def link(module: Any, path: Path, triple: str) -> None:
    """Write what TVM compiled for `triple` as a shared library. Raises EnvironmentProblem where there is no linker for it."""
    command = linker(triple)
    if command is None:
        module.export_library(str(path))
        return

    def fcompile(output: str, objects: list[str], options: object = None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shared(command, output, [*objects, *_stand_ins(command, triple, Path(folder))])

    module.export_library(str(path), fcompile=fcompile)


def _stand_ins(command: Sequence[str], triple: str, folder: Path) -> list[Path]:
    """Empty libraries of the names that have to be among those a library needs: Android's loader looks into no others, musl's into all."""
    made = []
    for name in NEEDED.get(triple.partition("-linux-")[2], ()):
        source, library = folder / "empty.c", folder / name
        source.write_text("", encoding="ascii")
        shared([*command, f"-Wl,-soname,{name}"], library, [source])
        made.append(library)
    return made


def link_probe(isa: Isa, path: Path) -> None:
    """Build the smallest real kernel for an instruction set and link it at `path`. Raises as `link` does, and RuntimeError where TVM cannot
    compile it."""
    import tvm

    from khtst_compile.targets.kernels.softmax import Softmax, prim_func

    module = tvm.IRModule({"probe": prim_func(Softmax(isa, 33)).with_attr("global_symbol", "probe")})
    link(tvm.tirx.build(module, target=tvm.target.Target(isa.tvm_target())), path, isa.triple)
