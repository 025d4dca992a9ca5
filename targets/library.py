"""Kernels as a C library, for processors that TVM has no runtime for: quantizing rows and int8 layers, on 32-bit ARM."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from khtst_compile import __version__
from khtst_compile.errors import EnvironmentProblem, UsageError
from khtst_compile.runner.libraries import headers
from khtst_compile.targets.isa import ARMV7, Isa

LIBRARIES: dict[str, Isa] = {"armv7-neon": ARMV7}
"""Target -> instruction set; what has a runtime is lowered for instead."""
HERE = Path(__file__).parent / "c"
NAME = "khtst_kernels"
CFLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-fPIC", "-ffunction-sections")
TOOLS = ("gcc", "ar")
MOST = 2**24
"""Largest number of features, output times input: one matrix of 16 MB."""
HWCAPS = {"neon": 1 << 12, "vfpv4": 1 << 16}
"""Feature -> its bit in AT_HWCAP (asm/hwcap.h of 32-bit ARM)."""


def sizes(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """ "1536x384" -> (n, k), each once, in order. Raises UsageError for anything else, and for none."""
    found = []
    for text in texts:
        matched = re.fullmatch(r"([1-9]\d{0,7})x([1-9]\d{0,7})", text)
        if not matched or int(matched[1]) * int(matched[2]) > MOST:
            raise UsageError(f"--linear {text!r}: needed: output by input features, such as 1536x384, of at most {MOST} weights")
        found.append((int(matched[1]), int(matched[2])))
    if not found:
        raise UsageError("--linear is missing; needed: output by input features of each layer, such as --linear 1536x384")
    return tuple(dict.fromkeys(found))


def instructions(name: str) -> Isa:
    """Of a target. Raises UsageError where there are no kernel libraries for it."""
    if name not in LIBRARIES:
        raise UsageError(
            f"target {name!r}: there are kernel libraries for {', '.join(LIBRARIES)}; for the targets of `khtst-compile targets` "
            "lower a model, with --emit-runner where it runs without Python"
        )
    return LIBRARIES[name]


def tools(isa: Isa) -> dict[str, str]:
    """The cross compiler and its archiver. Raises EnvironmentProblem where one is missing."""
    prefix = isa.triple.replace("armv7", "arm")
    found = {tool: shutil.which(f"{prefix}-{tool}") for tool in TOOLS}
    if missing := [f"{prefix}-{tool}" for tool, path in found.items() if path is None]:
        raise EnvironmentProblem(
            f"{', '.join(missing)} not on the path; needed: a cross compiler for {prefix}; "
            f"apt-get install gcc-{prefix} libc6-dev-armhf-cross (Debian, Ubuntu)"
        )
    return {tool: str(path) for tool, path in found.items()}


def functions(isa: Isa, linears: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The kernels by name: one product for each (n, k), one quantizer for each k."""
    from khtst_compile.targets.kernels import gemm_i8, quantize
    from khtst_compile.targets.kernels.rows import Lead

    made: dict[str, Any] = {}
    for n, k in linears:
        spec = gemm_i8.GemmI8(isa, n, k, Lead(1))
        assert spec.panels.vectors == 1 and spec.dot.whole_rows and not spec.needs_compensation, (
            "khtst_pack knows this order alone"
        )
        made[f"khtst_multiply_{n}x{k}"] = gemm_i8.prim_func(spec)
        made[f"khtst_quantize_{k}"] = quantize.prim_func(quantize.QuantizeRows(isa, k, Lead(1), parallel=False))
    return made


def write(name: str, linears: Sequence[tuple[int, int]], folder: Path) -> None:
    """Compile the library of a target into `folder`, with its header, sources and a README.

    Raises UsageError and EnvironmentProblem as `instructions` and `tools` do.
    """
    import tvm

    isa = instructions(name)
    found = tools(isa)
    source = folder / "src"
    source.mkdir()
    shutil.copyfile(HERE / f"{NAME}.h", folder / f"{NAME}.h")
    shutil.copyfile(HERE / f"{NAME}.c", source / f"{NAME}.c")
    (source / "khtst_shapes.h").write_text(_shapes(isa, linears), encoding="ascii")
    for path, file in headers().items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, source / path)
    named = {symbol: func.with_attr("global_symbol", symbol) for symbol, func in functions(isa, linears).items()}
    module = tvm.tirx.build(tvm.IRModule(named), target=tvm.target.Target(isa.tvm_target()))
    with tempfile.TemporaryDirectory() as temporary:
        kernels, calls = Path(temporary) / "kernels.o", Path(temporary) / "calls.o"
        module.write_to_file(str(kernels))
        _run([found["gcc"], *CFLAGS, f"-I{folder}", f"-I{source}", "-c", str(source / f"{NAME}.c"), "-o", str(calls)])
        _run([found["ar"], "rcsD", str(folder / f"lib{NAME}.a"), str(calls), str(kernels)])
    (n, k), *_ = linears
    text = Template((HERE / "README.md.in").read_text(encoding="utf-8")).substitute(
        target=name,
        linears=", ".join(f"{n} x {k}" for n, k in linears),
        version=__version__,
        triple=isa.triple,
        flags=", ".join(isa.cpu_flags),
        n=n,
        k=k,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _shapes(isa: Isa, linears: Sequence[tuple[int, int]]) -> str:
    from khtst_compile.targets.kernels.dot import dot_of

    dot = dot_of(isa)
    lines = [f"#define KHTST_COLUMNS {dot.lanes}", f"#define KHTST_STEP {dot.group}"]
    lines += [f"#define KHTST_HWCAP_{flag.upper()} {HWCAPS[flag]}ul" for flag in isa.cpu_flags]
    lines.append("#define KHTST_LINEARS(LINEAR) " + " ".join(f"LINEAR({n}, {k})" for n, k in linears))
    return "/* The layers that the library has. */\n" + "\n".join(lines) + "\n"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise EnvironmentProblem(f"{command[0]} failed ({said}); needed: one that compiles C for the target; install it again")
