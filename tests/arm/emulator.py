"""Run what was built for ARM on this machine: a C runner under qemu's user emulation, with TVM's ARM runtime."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from khtst_compile import artifact
from khtst_compile.errors import EnvironmentProblem
from khtst_compile.runner.libraries import fetch
from khtst_compile.runner.platforms import PLATFORMS
from khtst_compile.runtime import WEIGHTS
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.link import link

HERE = Path(__file__).parent
ROOT = Path("/usr/aarch64-linux-gnu")
TOOLS = ("qemu-aarch64", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", "llvm-mca-19")
CPUS = {"neon": "cortex-a72", "dotprod": "cortex-a76", "i8mm": "max"}
"""Instruction set -> the least processor that qemu knows and that has it."""
LIMIT_S = 300


def lacking() -> str | None:
    """Why nothing can be run here, in one sentence; None where it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not on the path; scripts/install-system.sh python3 arm"
    try:
        runtime()
    except EnvironmentProblem as error:
        return str(error)
    return None


@cache
def runtime() -> Path:
    """The folder with TVM's ARM runtime, downloaded the first time."""
    return fetch(PLATFORMS["linux/arm64"])


def build_runner(folder: Path) -> Path:
    """Compile the runner into `folder`."""
    made, libraries = folder / "runner", runtime() / "lib"
    link_with = ["-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi", f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined"]
    command = ["aarch64-linux-gnu-gcc", "-O1", "-Wall", "-Werror", f"-I{runtime() / 'include'}", str(HERE / "runner.c")]
    subprocess.run([*command, "-o", str(made), f"-L{libraries}", *link_with], check=True, timeout=LIMIT_S)
    return made


@dataclass(frozen=True)
class Call:
    """One call of a kernel: its name in the library, inputs, and (shape, dtype) of its outputs."""

    name: str
    inputs: Sequence[np.ndarray]
    outputs: Sequence[tuple[tuple[int, ...], str]]


class Job:
    """Commands for the runner, and the files they name, in a folder of its own."""

    def __init__(self, folder: Path, runner: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.runner = folder, runner
        self.lines: list[str] = []
        self._count = 0

    def tensor(self, array: np.ndarray) -> int:
        """Hand an array over; returns its id."""
        (self.folder / f"in{self._count}").write_bytes(np.ascontiguousarray(array).tobytes())
        return self._declare(array.shape, array.dtype.name, str(self.folder / f"in{self._count}"))

    def room(self, shape: tuple[int, ...], dtype: str) -> int:
        """A tensor to write to; returns its id."""
        return self._declare(shape, dtype, "-")

    def _declare(self, shape: tuple[int, ...], dtype: str, path: str) -> int:
        self.lines.append(f"tensor {self._count} {dtype} {'x'.join(map(str, shape)) or '.'} {path}")
        self._count += 1
        return self._count - 1

    def start(self, cpu: str) -> subprocess.CompletedProcess[str]:
        """Run it on a processor of that name, to its end, whatever that is."""
        path = self.folder / "job"
        path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")
        command = ["qemu-aarch64", "-L", str(ROOT), "-cpu", cpu, str(self.runner), str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)

    def run(self, cpu: str) -> None:
        """Run it; a failure is the test's."""
        done = self.start(cpu)
        assert done.returncode == 0, f"the runner on {cpu} ended with {done.returncode}: {done.stderr}"


def build_kernels(functions: dict[str, Any], isa: Isa, path: Path) -> Path:
    """Name -> PrimFunc into one library for ARM."""
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    module = tvm.tirx.build(tvm.IRModule(named), target=tvm.target.Target(isa.tvm_target()))
    link(module, path, isa.triple)
    return path


def run_kernels(library: Path, calls: Sequence[Call], cpu: str, folder: Path, runner: Path) -> list[list[np.ndarray]]:
    """The outputs of each call."""
    job = Job(folder, runner)
    job.lines.append(f"lib {library}")
    made: list[list[tuple[Path, tuple[int, ...], str]]] = []
    for call in calls:
        given = [job.tensor(a) for a in call.inputs]
        rooms = [job.room(*output) for output in call.outputs]
        job.lines.append(f"call {call.name} {' '.join(map(str, [*given, *rooms]))}")
        paths = [folder / f"out{number}" for number in rooms]
        job.lines += [f"save {number} {path}" for number, path in zip(rooms, paths, strict=True)]
        made.append([(path, *output) for path, output in zip(paths, call.outputs, strict=True)])
    job.run(cpu)
    return [[np.fromfile(path, dtype).reshape(shape) for path, shape, dtype in outputs] for outputs in made]


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit where a number; NaN wherever the other is NaN: which NaN a processor makes is its own affair."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    missing = np.isnan(a) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
    there = np.isnan(b) if b.dtype.kind == "f" else missing
    return bool(np.array_equal(missing, there)) and a[~missing].tobytes() == b[~there].tobytes()


def program(folder: artifact.Folder, variant: str, inputs: Sequence[np.ndarray], job: Job) -> dict[str, Any]:
    """Hand over an artifact's library, inputs and arranged weights; returns the variant's entry, and "ids" of inputs and weights."""
    chosen = next(v for v in folder.manifest["target"]["variants"] if v["name"] == variant)
    stored = artifact.map_weights(folder.file(WEIGHTS), folder.manifest["weights"])
    job.lines.append(f"lib {folder.file(chosen['library'])}")
    ids = [job.tensor(a) for a in (*inputs, *artifact.arrange(stored, chosen))]
    return {**chosen, "ids": ids}


def results(prefix: Path, like: Sequence[tuple[tuple[int, ...], str]]) -> list[np.ndarray]:
    """What `vm` or `main` wrote, of these shapes and dtypes."""
    return [np.fromfile(f"{prefix}{i}", dtype).reshape(shape) for i, (shape, dtype) in enumerate(like)]
