"""A tiny model with its runner, made once; the runner's parts as a program; and where ARM programs can run."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import khtst_compile as kc
from khtst_compile.errors import KhtstError
from khtst_compile.runner import emit, libraries
from khtst_compile.runner.platforms import PLATFORMS
from tests.requirements import need

HERE = Path(__file__).parent
STRICT = ("-Werror", "-g", "-O1")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
CROSS = "aarch64-linux-gnu-gcc"
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
LIMIT_S = 300
PARTS = ("base", "cpu", "inflate", "json", "layout", "npy", "npz", "sha256")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def call(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program and check its exit code."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done


def compile_c(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], to: Path) -> Path:
    """A program of our own sources and others, any warning being an error."""
    command = [*compiler, *emit.CFLAGS, *STRICT, *flags, f"-I{emit.SOURCES}", *map(str, sources), "-o", str(to), *emit.LINK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to


def lacking() -> str | None:
    """Why ARM programs cannot be built and run here, in one sentence; None where they can."""
    missing = [tool for tool in (CROSS, QEMU[0]) if shutil.which(tool) is None]
    return f"{', '.join(missing)} not on the path; scripts/install-system.sh python3 arm" if missing else None


@pytest.fixture(scope="session")
def arm_runtime() -> Path:
    """The cache's folder with TVM's runtime for ARM."""
    need("arm", lacking())
    try:
        return libraries.fetch(PLATFORMS["linux/arm64"])
    except KhtstError as error:
        need("arm", str(error))
        raise


@pytest.fixture(scope="session", params=["native, sanitized", "arm64"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """parts.c, as a function of its words."""
    sources = [HERE / "parts.c", *(emit.SOURCES / f"{name}.c" for name in PARTS)]
    to = tmp_path_factory.mktemp("parts") / "parts"
    if request.param == "arm64":
        need("arm", lacking())
        program = compile_c([CROSS], (), sources, to)
        return lambda *words, code=0: call(*QEMU, program, *words, code=code)
    program = compile_c(["cc"], SANITIZERS, sources, to)
    return lambda *words, code=0: call(program, *words, code=code)


@dataclass(frozen=True)
class Made:
    """quantized, library: artifacts; the latter with its runner."""

    quantized: Path
    library: Path

    @property
    def runner(self) -> Path:
        return self.library / emit.FOLDER

    def run(self, verb: str, *words: object, folder: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        """The program on an artifact (default: its own)."""
        return call(self.runner / emit.PROGRAM, verb, folder or self.library, *words, code=code)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`tests.tiny:mlp` quantized, and lowered for this machine with a runner."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        need("x86", f"this is {sys.platform} on {platform.machine()}")
    folder = tmp_path_factory.mktemp("made")
    kc.quantize("tests.tiny:mlp", folder / "q", random=True, recipe="smooth{alpha=0.5} | w8a8")
    kc.lower(folder / "q", folder / "x86", target="x86-avx2", emit_runner=True)
    return Made(folder / "q", folder / "x86")
