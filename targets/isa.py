"""The instruction sets kernels are written for: compiler flags, CPU features needed, activation-code storage.

Everything a kernel generator has to know about a processor is in `Isa`; generators read its fields, never its name.
`Isa.emulate()` keeps the structure of a kernel (tiles, packing, storage of codes) and replaces the instructions this
set has beyond AVX2 by their executable meaning, so that every variant's layout and arithmetic can be tested on any
AVX2 machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from khtst_compile.errors import UsageError

_AVX2_FLAGS = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe")
_AVX512_FLAGS = (*_AVX2_FLAGS, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


SYSTEMS = {"x86_64": ("gnu", "musl"), "aarch64": ("gnu", "musl", "android")}
"""Processor -> the C libraries of Linux systems that programs for it are linked for."""


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    name:           how targets and tests call it.
    triple:         LLVM's name of processor and system.
    mcpu, mattr:    LLVM baseline and extra features; never the name of a host CPU, so a build is the same anywhere.
    cpu_flags:      features a machine needs, as /proc/cpuinfo spells them (`flags`, or `Features` on ARM).
    codes_dtype:    storage of int8 activation codes: "int16" (widened once by the producer, for multiply-add of int16
                    pairs), "uint8" (code + 128, for the unsigned operand of vpdpbusd) or "int8" (as it is: ARM).
    codes_offset:   what storage adds to a code (0 or 128).
    vector_bits:    width of a register: 128, 256 or 512.
    registers:      number of vector registers.
    dot:            how products are summed, a key of kernels/dot.py: "pairs" (vpmaddwd on sums of int16), "maddwd"
                    (vpmaddwd + vpaddd on int16 pairs), "dpbusd" (vpdpbusd on uint8 x int8 quadruples), "smull", "sdot" or
                    "smmla" (ARM).
    options:        of LLVM itself, as its command line has them.
    by_lane:        a fused multiply-add takes one lane of a register as a factor of all lanes, so that four steps over k of a row are one
                    load.
    rounds:         whether it converts float to the nearest integer in one instruction.
    fence:          an LLVM intrinsic of one int32 that does nothing, and that no load is moved across; "" where registers suffice anyway.
    sign_bits:      an LLVM intrinsic that gathers the sign bits of 8 floats in an int32; "" where there is none.
    max_keeps_nan:  whether the larger of two floats is NaN where one of them is, in one instruction.
    emulated:       instructions beyond AVX2 are replaced by plain vector code and the build is for AVX2.
    """

    name: str
    mcpu: str
    mattr: tuple[str, ...]
    cpu_flags: tuple[str, ...]
    codes_dtype: str
    codes_offset: int
    vector_bits: int
    registers: int
    dot: str
    triple: str = "x86_64-linux-gnu"
    options: tuple[str, ...] = ()
    rounds: bool = True
    fence: str = ""
    sign_bits: str = ""
    max_keeps_nan: bool = False
    by_lane: bool = False
    emulated: bool = False

    @property
    def lanes(self) -> int:
        """32-bit lanes of one register: 4, 8 or 16."""
        return self.vector_bits // 32

    def tvm_target(self) -> dict[str, Any]:
        """The target description given to `tvm.target.Target`."""
        target: dict[str, Any] = {"kind": "llvm", "mtriple": self.triple, "mcpu": self.mcpu}
        if self.mattr:
            target["mattr"] = list(self.mattr)
        if self.options:
            target["cl-opt"] = list(self.options)
        if self.triple.endswith("hf"):
            target["mfloat-abi"] = "hard"
        return target

    def on(self, triple: str) -> Isa:
        """The same instructions on another system. Raises UsageError where nothing is linked for it."""
        processor = self.triple.partition("-")[0]
        known = [f"{processor}-linux-{system}" for system in SYSTEMS[processor]]
        if triple not in known:
            raise UsageError(f"triple {triple!r}: {self.name} is built for {', '.join(known)}; choose one of these")
        return replace(self, triple=triple)

    def emulate(self) -> Isa:
        """The same kernels, built for plain AVX2."""
        kept = ("triple", "mcpu", "mattr", "cpu_flags", "options", "fence")
        machine = {name: getattr(AVX2, name) for name in kept}
        return replace(self, name=f"{self.name}-emulated", emulated=True, **machine)


_SIGNS = "llvm.x86.avx.movmsk.ps.256"


def _x86(
    name: str, mcpu: str, mattr: tuple[str, ...], cpu_flags: tuple[str, ...], codes: tuple[str, int], bits: int, dot: str
) -> Isa:
    return Isa(name, mcpu, mattr, cpu_flags, *codes, bits, 32 if bits == 512 else 16, dot, sign_bits=_SIGNS)


_WIDE, _BYTES = ("int16", 0), ("uint8", 128)
AVX2 = _x86("avx2", "x86-64-v3", (), _AVX2_FLAGS, _WIDE, 256, "pairs")
AVXVNNI = _x86("avxvnni", "x86-64-v3", ("+avxvnni",), (*_AVX2_FLAGS, "avx_vnni"), _BYTES, 256, "dpbusd")
AVX512 = _x86("avx512", "x86-64-v4", (), _AVX512_FLAGS, _WIDE, 512, "maddwd")
AVX512VNNI = _x86("avx512vnni", "x86-64-v4", ("+avx512vnni",), (*_AVX512_FLAGS, "avx512_vnni"), _BYTES, 512, "dpbusd")


# On ARM, LLVM vectorizes the products of a sum apart from it and no longer fuses the two, as it does on x86. What kernels do is written
# in vectors, and what has no kernel is vectorized by TVM.
_ARM_OPTIONS = ("-vectorize-loops:bool=0", "-vectorize-slp:bool=0")


def _arm(name: str, mattr: tuple[str, ...], cpu_flags: tuple[str, ...], dot: str) -> Isa:
    return Isa(
        name,
        "generic",
        mattr,
        cpu_flags,
        "int8",
        0,
        128,
        32,
        dot,
        "aarch64-linux-gnu",
        _ARM_OPTIONS,
        fence="llvm.aarch64.hint",
        max_keeps_nan=True,
        by_lane=True,
    )


NEON = _arm("neon", ("+neon",), ("asimd",), "smull")
DOTPROD = _arm("dotprod", ("+neon", "+dotprod"), ("asimd", "asimddp"), "sdot")
I8MM = _arm("i8mm", ("+neon", "+dotprod", "+i8mm"), ("asimd", "asimddp", "i8mm"), "smmla")

ARMV7 = Isa(
    "armv7",
    "generic",
    ("+neon", "+vfp4"),
    ("neon", "vfpv4"),
    "int8",
    0,
    128,
    16,
    "vmull",
    "armv7-linux-gnueabihf",
    _ARM_OPTIONS,
    False,
)
"""32-bit ARM with NEON and fused multiply-add (Cortex-A5, A7, A15 and later); for targets/library.py alone."""

X86_ISAS = (AVX512VNNI, AVX512, AVXVNNI, AVX2)
"""Those of x86-64, the fastest first."""
ARM_ISAS = (I8MM, DOTPROD, NEON)
"""Those of 64-bit ARM, the fastest first."""
ALL_ISAS = (*X86_ISAS, *ARM_ISAS)
