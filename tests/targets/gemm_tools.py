"""What the GEMM tests share: building a kernel, running it on numpy arrays, reading its assembly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import tvm

from khtst_compile.targets.isa import AVX2, AVX512, AVX512VNNI, AVXVNNI, Isa
from khtst_compile.targets.kernels import gemm_f32, gemm_i8, matmul_f32

RUNNABLE = (AVX2, AVXVNNI.emulate(), AVX512.emulate(), AVX512VNNI.emulate())
"""Every variant, in the form that any AVX2 machine runs."""
Spec = gemm_i8.GemmI8 | gemm_f32.GemmF32 | matmul_f32.MatmulF32
GUARD = 64


@cache
def library(spec: Spec) -> tvm.runtime.Module:
    """Compile a kernel with TVM's default pipeline."""
    generator = {gemm_i8.GemmI8: gemm_i8, gemm_f32.GemmF32: gemm_f32, matmul_f32.MatmulF32: matmul_f32}[type(spec)]
    module = tvm.IRModule({spec.name: generator.prim_func(spec)})  # type: ignore[attr-defined]
    return tvm.tirx.build(module, target=tvm.target.Target(spec.isa.tvm_target()))


def run(spec: Spec, inputs: Sequence[np.ndarray], shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Run a kernel into a fresh output. The output lies inside guard elements, which have to survive."""
    size = int(np.prod(shape))
    backing = tvm.runtime.tensor(np.full(GUARD + size + GUARD, 77, dtype))
    # A TVM tensor is aligned to 64 bytes, and so is its element 64.
    view = np.from_dlpack(backing)
    part = view[GUARD : GUARD + size].reshape(shape)
    # numpy's strides of an empty array are not the compact ones that TVM checks for.
    out = tvm.runtime.from_dlpack(part) if size else tvm.runtime.tensor(np.empty(shape, dtype))
    library(spec)[spec.name](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in inputs], out)
    assert (view[:GUARD] == 77).all() and (view[GUARD + size :] == 77).all(), "wrote outside C"
    return part.copy()


def assembly(spec: Spec) -> str:
    """The assembly of a kernel."""
    return str(library(spec).inspect_source("asm"))


def hot_loops(text: str, instruction: str, jump_line: str = r"\tj\w+\t(\.LBB\w+)") -> list[list[str]]:
    """Innermost loops (lines from a label to the jump back to it) that hold an instruction. jump_line: a jump, as a pattern whose group is
    its label; the default is x86's."""
    lines, labels, loops = text.splitlines(), {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = number
        jump = re.match(jump_line, line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] : number + 1]
            if not any(re.match(r"\.LBB\w+:", inner) for inner in body[1:]) and any(instruction in i for i in body):
                loops.append(body)
    return loops


def touches_stack(text: str, loop: list[str]) -> list[str]:
    """Lines of a loop that read or write the stack, or call. Without a frame pointer %rbp is a register like others."""
    frame = "movq\t%rsp, %rbp" in text
    return [line for line in loop if "%rsp" in line or (frame and "%rbp" in line) or "\tcall" in line]


def codes_and_weights(m: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Random codes (m, k), weights (n, k), a_scale (m,), w_scale (n,), bias (n,), residual (m, n)."""
    rng = np.random.default_rng(seed)
    return (
        rng.integers(-127, 128, (m, k), dtype=np.int8),
        rng.integers(-127, 128, (n, k), dtype=np.int8),
        rng.uniform(1e-3, 1e-2, m).astype(np.float32),
        rng.uniform(1e-3, 1e-2, n).astype(np.float32),
        rng.standard_normal(n).astype(np.float32),
        rng.standard_normal((m, n)).astype(np.float32),
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def isa_id(isa: Isa) -> str:
    """Name for pytest."""
    return isa.name
