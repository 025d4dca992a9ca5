"""Where a runner can run, and what compiles for there."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from khtst_compile.errors import EnvironmentProblem, UsageError


@dataclass(frozen=True)
class Platform:
    """name: as container images have it; processor: as triples begin and `uname -m` says; wheels: tags of TVM's wheels for it."""

    name: str
    processor: str
    wheels: tuple[str, ...]

    @property
    def triple(self) -> str:
        return f"{self.processor}-linux-gnu"

    @property
    def package(self) -> str:
        """Debian's package with its cross compiler."""
        return f"g++-{self.triple.replace('_', '-')}"

    @property
    def native(self) -> bool:
        """Whether it is this machine's own."""
        return sys.platform == "linux" and platform.machine() == self.processor


def _of(name: str, processor: str) -> Platform:
    return Platform(name, processor, tuple(f"manylinux_2_{minor}_{processor}" for minor in (28, 27, 24, 17)))


PLATFORMS = {p.name: p for p in (_of("linux/arm64", "aarch64"), _of("linux/amd64", "x86_64"))}
ZIG_GLIBC = "2.28"  # the oldest that TVM's wheels run on
STRIP = "--strip-unneeded"


def of_triples(triples: Iterable[str]) -> Platform:
    """The one platform programs of these LLVM triples run on. Raises UsageError where there is none."""
    asked = sorted(set(triples))
    found = {p for p in PLATFORMS.values() if any(t.startswith(f"{p.processor}-") for t in asked)}
    if len(found) != 1 or any(t != next(iter(found)).triple for t in asked):
        raise UsageError(
            f"--emit-runner: built for {', '.join(asked)}; needed: variants for one of {', '.join(PLATFORMS)}, with glibc, for which TVM's "
            "runtime comes as a wheel; choose another target or triple, or leave --emit-runner out (docs/device.md has other systems)"
        )
    return found.pop()


def ziglang(triple: str) -> list[str] | None:
    """A command that compiles C and links for a triple with this Python's ziglang; None where that is not installed."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{triple}.{ZIG_GLIBC}"] if find_spec("ziglang") else None


def compiler(target: Platform) -> list[str]:
    """A command that compiles C for the platform. Raises EnvironmentProblem that names what would bring one."""
    names = [f"{target.triple}-gcc"]
    if target.native:
        names = [*shlex.split(os.environ.get("CC", ""))[:1], "cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name):
            return [found]
    if command := ziglang(target.triple):
        return command
    brings = "apt-get install gcc" if target.native else f"apt-get install {target.package}"
    raise EnvironmentProblem(
        f"--emit-runner: no C compiler for {target.name} (looked for {', '.join(names)}, and for ziglang in this Python); "
        f"needed: one of them; {brings} (Debian, Ubuntu), or pip install ziglang"
    )


def stripper(target: Platform) -> list[str] | None:
    """A command that takes symbols nobody needs out of a library of the platform; None where there is none."""
    found = shutil.which(f"{target.triple}-strip") or (shutil.which("strip") if target.native else None)
    return [found, STRIP] if found else None
