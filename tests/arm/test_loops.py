"""The innermost loops: no spills, and cycles close to what the processor's units allow, by LLVM's models of processors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import tvm

from khtst_compile.targets.isa import DOTPROD, I8MM, NEON, Isa
from khtst_compile.targets.kernels import attention, ceiling, gemm_f32, gemm_i8, norm, quantize
from khtst_compile.targets.kernels.attention import Attention, Mask, Operand
from khtst_compile.targets.kernels.ceiling import STEPS, Ceiling
from khtst_compile.targets.kernels.gemm_f32 import GemmF32
from khtst_compile.targets.kernels.gemm_i8 import GemmI8
from khtst_compile.targets.kernels.norm import NormQuantize
from khtst_compile.targets.kernels.quantize import Quantizer, QuantizeRows, Rotation
from khtst_compile.targets.kernels.rows import Lead
from tests.targets import gemm_tools

ROUNDS = 300


def assembly(function: object, isa: Isa) -> str:
    module = tvm.IRModule({"f": function})
    text = str(tvm.tirx.build(module, target=tvm.target.Target(isa.tvm_target())).inspect_source("asm"))
    return "\n".join(
        line for line in text.splitlines() if line.strip() and not line.strip().startswith("//")
    )  # around written-out assembly


def hot_loops(text: str, instruction: str) -> list[list[str]]:
    """Innermost loops that hold an instruction, the longest first."""
    found = gemm_tools.hot_loops(text, f"\t{instruction}\t", r"\t(?:b\.\w+|cbn?z|tbn?z)\t.*?(\.LBB\w+)")
    loops = [[line.partition("//")[0].rstrip() for line in body] for body in found]
    return sorted(loops, key=lambda body: -len(body))


def share_of_bound(loop: list[str], cpu: str) -> float:
    """Cycles that the busiest unit needs over those the loop takes, by llvm-mca's model of a processor."""
    command = ["llvm-mca-19", "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm", f"-iterations={ROUNDS}"]
    text = subprocess.run(command, input="\n".join(loop) + "\n", capture_output=True, text=True, check=True).stdout
    found = {name: float(re.search(name + r":\s+([\d.]+)", text)[1]) for name in ("Total Cycles", "Block RThroughput")}  # type: ignore[index]
    return found["Block RThroughput"] * ROUNDS / found["Total Cycles"]


def macs(loop: list[str]) -> int:
    each = {"sdot": 16, "smmla": 32, "smull": 8, "smlal": 8, "smlal2": 8, "fmla": 4}
    return sum(each.get(line.split()[0], 0) for line in loop)


def check(loop: list[str], wanted: int, least: dict[str, float]) -> None:
    assert macs(loop) == wanted
    assert not [line for line in loop if re.search(r"\bsp\b", line)], "spills"
    shares = {cpu: share_of_bound(loop, cpu) for cpu in least}
    assert all(shares[cpu] >= share for cpu, share in least.items()), shares


INT8 = {
    "neon": (NEON, "smull", 4 * 4 * 4 * 16, {"cortex-a72": 0.98, "cortex-a53": 0.7}),
    "dotprod": (DOTPROD, "sdot", 8 * 8 * 16, {"neoverse-n1": 0.98}),
    "i8mm": (I8MM, "smmla", 8 * 8 * 16, {"neoverse-v1": 0.98}),
}
"""Instruction set, instruction, multiply-adds of a turn (rows x columns x k), and the least shares of the bound."""


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize(("n", "act"), [(384, "none"), (100, "gelu")])
def test_int8_loops(name: str, n: int, act: str, runner: Path) -> None:
    isa, instruction, wanted, least = INT8[name]
    spec = GemmI8(isa, n, 384, Lead(2), act, act == "none")
    check(hot_loops(assembly(gemm_i8.prim_func(spec), isa), instruction)[0], wanted, least)


@pytest.mark.parametrize("name", INT8)
def test_ceilings_hold_the_multiply_adds_that_are_counted(name: str, runner: Path) -> None:
    isa, instruction, _, _ = INT8[name]
    for products, word in (("int8", instruction), ("float32", "fmla")):
        spec = Ceiling(isa, products)
        (loop,) = hot_loops(assembly(ceiling.prim_func(spec), isa), word)
        turns = STEPS * macs(loop) / spec.macs  # of the written loop in one of the machine's
        assert turns >= 1 and turns == int(turns)


def test_float32_loop(runner: Path) -> None:
    spec = GemmF32(NEON, 384, 384, Lead(2))
    loop = hot_loops(assembly(gemm_f32.prim_func(spec), NEON), "fmla")[0]
    assert len(loop) <= 115
    check(loop, 4 * 6 * 16, dict.fromkeys(("cortex-a72", "neoverse-n1", "neoverse-v1"), 0.95))


def test_attention_loops(runner: Path) -> None:
    row = 3 * 384
    spec = Attention(NEON, 12, 32, 32**-0.5, *(Operand(row, at) for at in (0, 384, 768)), mask=Mask())
    loops = [loop for loop in hot_loops(assembly(attention.prim_func(spec), NEON), "fmla") if macs(loop) == 4 * 6 * 16]
    products = [loop for loop in loops if not any("\tfcmgt\t" in line for line in loop)]
    assert len(products) >= 2  # scores and values
    for loop in products:
        assert len(loop) <= 115
        check(loop, 4 * 6 * 16, {"cortex-a72": 0.95, "neoverse-n1": 0.95})


WHOLE = Rotation(128, 128)
ROTATIONS = {
    "plain": lambda: quantize.prim_func(QuantizeRows(NEON, 384, quantizer=Quantizer(False, WHOLE))),
    "smooth": lambda: quantize.prim_func(QuantizeRows(NEON, 384, quantizer=Quantizer(True, WHOLE))),
    "gelu": lambda: quantize.prim_func(QuantizeRows(NEON, 1536, act="gelu", quantizer=Quantizer(True, WHOLE))),
    "norm": lambda: norm.prim_func(NormQuantize(NEON, 384, 1e-12, quantizers=(Quantizer(True, WHOLE),))),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_keep_their_values_in_registers(name: str, runner: Path) -> None:
    """Nothing of a block goes to the stack; a constant, which is loaded where it is used, may be there."""
    loops = [loop for loop in hot_loops(assembly(ROTATIONS[name](), NEON), "rev64") if any("\tfabd\t" in line for line in loop)]
    assert len(loops) == 2  # in parallel, and not
    for loop in loops:
        assert not [line for line in loop if re.match(r"\tst\w+\t.*\bsp\b", line)], "spills"
