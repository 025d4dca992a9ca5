"""64-bit ARM: NEON alone, with dot products, and with int8 matrix products."""

from __future__ import annotations

from khtst_compile.targets import isa
from khtst_compile.targets.cpu_target import CpuTarget, first_that_runs

I8MM = CpuTarget("arm-i8mm", isa.I8MM)
DOTPROD = CpuTarget("arm-dotprod", isa.DOTPROD)
NEON = CpuTarget("arm-neon", isa.NEON)

# The fastest first: "arm" is the first of these that this machine runs.
VARIANTS = (I8MM, DOTPROD, NEON)


def best() -> CpuTarget:
    """The fastest variant this machine runs; NEON where it runs none."""
    return first_that_runs(VARIANTS)
