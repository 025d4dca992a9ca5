"""Write a runner into an artifact's folder: program, sources, TVM's runtime with its licences, and what to do with them on the board."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from khtst_compile.checks import require_space
from khtst_compile.errors import EnvironmentProblem
from khtst_compile.runner import libraries, platforms
from khtst_compile.runner.libraries import LIBRARIES, Runtime
from khtst_compile.runner.platforms import Platform

FOLDER = "runner"
PROGRAM = "khtst-run"
HERE = Path(__file__).parent
SOURCES, BOARD = HERE / "c", HERE / "board"
NEEDED_BYTES = 16_000_000  # of disk; a runner has 6 MB
CFLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra")
LINK = ("-ldl", "-lpthread")


@dataclass(frozen=True)
class Emitter:
    """All that is needed to write a runner, found before anything slow begins. compiler: a command that compiles C for `platform`."""

    platform: Platform
    compiler: tuple[str, ...]
    runtime: Runtime

    def write(self, folder: Path, variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Write FOLDER in `folder`, an artifact being made, and take out of its libraries what only a debugger reads.

        variants: those of its manifest. Returns the manifest's entry about the runner.
        """
        require_space(folder, NEEDED_BYTES, "a runner")
        made = folder / FOLDER
        write_sources(made, self.runtime)
        shipped = [made / "lib" / name for name in LIBRARIES]
        for library in (*shipped, *(folder / v["library"] for v in variants)):
            _strip(library, self.platform)
        build(made, self.compiler)
        needs = glibc_of([made / PROGRAM, *shipped])
        _describe(made, self.platform, variants, needs)
        size = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
        return {"platform": self.platform.name, "glibc": needs, "bytes": size}


def prepare(triples: Iterable[str]) -> Emitter:
    """What a runner for programs of these LLVM triples takes. Raises EnvironmentProblem where a compiler or TVM's runtime is missing,
    UsageError where there are no runners for them."""
    platform = platforms.of_triples(list(triples))
    return Emitter(platform, tuple(platforms.compiler(platform)), libraries.runtime(platform))


def write_sources(made: Path, runtime: Runtime) -> None:
    """Everything but what is compiled or depends on the artifact."""
    shutil.copytree(SOURCES, made / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (made / "src" / "version.h").write_text(_version_header(), encoding="ascii")
    for name, file in runtime.files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, made / name)
    for name in ("CMakeLists.txt", "run.sh", "embed.c"):
        shutil.copyfile(BOARD / name, made / name)
    (made / "run.sh").chmod(0o755)


def _version_header() -> str:
    tvm, ffi = libraries.versions()
    return f'/* The versions this runner is made for. */\n#define KHTST_TVM "{tvm}"\n#define KHTST_TVM_FFI "{ffi}"\n'


def build(made: Path, compiler: Sequence[str], flags: Sequence[str] = ("-s",)) -> None:
    """Compile the program from the sources in `made`. flags: more for the compiler."""
    sources = sorted(str(p) for p in (made / "src").glob("*.c"))
    command = [*compiler, *CFLAGS, *flags, f"-I{made / 'include'}", *sources, "-o", str(made / PROGRAM), *LINK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem(f"--emit-runner: {compiler[0]} cannot compile the runner: {done.stderr.strip()[-800:]}")


def _strip(library: Path, platform: Platform) -> None:
    """Take out symbols nobody needs, where there is a tool for it. The file is replaced: this process may have the old one mapped."""
    tool, made = platforms.stripper(platform), library.with_suffix(".stripped")
    if (
        tool is not None
        and subprocess.run([*tool, "-o", str(made), str(library)], capture_output=True, check=False).returncode == 0
    ):
        made.replace(library)
    made.unlink(missing_ok=True)


def glibc_of(files: Iterable[Path]) -> str:
    """The least version of glibc these programs and libraries need: the newest their symbols name."""
    found = {m for f in files for m in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\0])", f.read_bytes())}
    newest = max((int(major), int(minor)) for major, minor in found)
    return f"{newest[0]}.{newest[1]}"


def _describe(made: Path, platform: Platform, variants: Sequence[dict[str, Any]], glibc: str) -> None:
    lines = [f"| {v['name']} | {', '.join(v['cpu_flags']) or 'nothing more'} |" for v in variants]
    text = Template((BOARD / "README.md.in").read_text(encoding="utf-8")).substitute(
        platform=platform.name, processor=platform.processor, variants="\n".join(lines), glibc=glibc, tvm=libraries.versions()[0]
    )
    (made / "README.md").write_text(text, encoding="utf-8")
