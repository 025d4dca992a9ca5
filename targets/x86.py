"""x86-64: AVX2, AVX-VNNI, AVX512 and AVX512-VNNI."""

from __future__ import annotations

from khtst_compile.targets import isa
from khtst_compile.targets.cpu_target import CpuTarget, first_that_runs

AVX512VNNI = CpuTarget("x86-avx512vnni", isa.AVX512VNNI)
AVX512 = CpuTarget("x86-avx512", isa.AVX512)
AVXVNNI = CpuTarget("x86-avxvnni", isa.AVXVNNI)
AVX2 = CpuTarget("x86-avx2", isa.AVX2)

# The fastest first: "x86" is the first of these that this machine runs.
VARIANTS = (AVX512VNNI, AVX512, AVXVNNI, AVX2)


def best() -> CpuTarget:
    """The fastest variant this machine runs; AVX2 where it runs none."""
    return first_that_runs(VARIANTS)
