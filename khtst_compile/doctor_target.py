"""Whether programs for one target can be built here, and tried: compile, link and run a probe of each step `lower` takes."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from khtst_compile.doctor import BAD, NOTE, OK, Check
from khtst_compile.errors import EnvironmentProblem, UsageError
from khtst_compile.runner import libraries, platforms

if TYPE_CHECKING:
    from khtst_compile.targets.contract import Target

PROBE = '#include <stdio.h>\nint main(int n, char** words) { return printf("%d\\n", words ? 4 * n : 0) < 0; }\n'
ANSWER = "4"


def examine(name: str) -> list[Check]:
    """The compiler, a kernel of each variant, a program that runs, and TVM's runtime for a runner. Raises UsageError for no such target."""
    from khtst_compile.targets import table

    made = table.variants(name)
    triple = str(made[0].tvm_target()["mtriple"])
    compiler = _compiler(triple)
    if compiler.status == BAD:
        return [compiler]
    return [compiler, *(_kernel(v) for v in made), _program(triple), _runtime(triple)]


def _compiler(triple: str) -> Check:
    from khtst_compile.targets.link import shared

    what = f"compiler for {triple}"
    try:
        command = _command(triple)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.c"
            source.write_text(PROBE, encoding="utf-8")
            shared(command, Path(folder) / "probe.so", [source])
    except EnvironmentProblem as error:
        return Check(what, BAD, "cannot link", str(error))
    return Check(what, OK, " ".join(command))


def _command(triple: str) -> list[str]:
    from khtst_compile.doctor import compiler
    from khtst_compile.targets.link import cross_compiler

    command = cross_compiler(triple)
    if command is not None:
        return command
    found = compiler()
    if found is None:
        raise EnvironmentProblem(f"no C++ compiler for {triple}; needed: g++ or clang++; apt-get install g++ (Debian, Ubuntu)")
    return [found]


def _kernel(target: Target) -> Check:
    """Build the smallest real kernel for the target and link it."""
    from khtst_compile.targets.cpu_target import CpuTarget
    from khtst_compile.targets.link import link_probe

    assert isinstance(target, CpuTarget)
    with tempfile.TemporaryDirectory() as folder:
        try:
            link_probe(target.isa, Path(folder) / "kernel.so")
        except (EnvironmentProblem, RuntimeError) as error:
            first = (str(error).splitlines() or ["no reason given"])[0]
            return Check(f"build {target.name}", BAD, first, "install apache-tvm again; `khtst-compile doctor` names its version")
    return Check(f"build {target.name}", OK, "a kernel compiles and links")


def _program(triple: str) -> Check:
    """Compile a program and run it: here, or under qemu's user emulation."""
    processor = triple.partition("-")[0]
    what, runs = f"run {processor}", [] if processor == platform.machine() else [f"qemu-{processor}"]
    if runs and shutil.which(runs[0]) is None:
        return Check(
            what, NOTE, f"{runs[0]} is not there", "only to try programs here: apt-get install qemu-user (Debian, Ubuntu)"
        )
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "probe.c", Path(folder) / "probe"
        source.write_text(PROBE, encoding="utf-8")
        # ziglang links statically with musl alone.
        compile_it = [f"{processor}-linux-musl" if word.startswith(f"{triple}.") else word for word in _command(triple)]
        for command in ([*compile_it, "-static", "-o", str(made), str(source)], [*runs, str(made)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                return Check(what, BAD, f"{command[0]}: {said}", "install the compiler and qemu-user again")
    if done.stdout.strip() != ANSWER:
        return Check(what, BAD, f"a probe prints {done.stdout.strip()!r}, not {ANSWER!r}", "install qemu-user again")
    return Check(what, OK, f"a program runs {'under ' + runs[0] if runs else 'here'}")


def _runtime(triple: str) -> Check:
    what = "runner"
    try:
        target = platforms.of_triples([triple])
        libraries.runtime(target)
    except (EnvironmentProblem, UsageError) as error:
        return Check(what, NOTE, "TVM's runtime for a device is not here", f"only for `lower --emit-runner`: {error}")
    return Check(what, OK, f"TVM's runtime for {target.name} is here")
