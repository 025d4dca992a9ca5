"""x86-64: AVX2, AVX-VNNI, AVX512 and AVX512-VNNI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from khtst_compile import cpu
from khtst_compile.targets import isa as isas
from khtst_compile.targets.contract import KernelRule
from khtst_compile.targets.isa import Isa


@dataclass(frozen=True)
class X86:
    """A build for one instruction set. name: as on the command line; isa: what its kernels are written for; tiles: choices that were
    measured (see rules.Tiles)."""

    name: str
    isa: Isa
    tiles: Mapping[tuple[object, ...], Any] = field(default_factory=dict)

    def tvm_target(self) -> dict[str, Any]:
        return self.isa.tvm_target()

    def unavailable(self) -> str | None:
        lacking = cpu.missing(self.isa.cpu_flags)
        return f"this CPU lacks {', '.join(lacking)}" if lacking else None

    def kernels(self) -> dict[str, tuple[KernelRule, ...]]:
        from khtst_compile.targets.rules import cpu_kernels  # here, so that listing targets loads no compiler

        return cpu_kernels(self.isa, self.tiles)

    def tuned(self, tiles: Mapping[tuple[object, ...], Any]) -> X86:
        return replace(self, tiles=tiles)

    def finalize(self, module: Any) -> Any:
        from khtst_compile.targets.schedule import schedule_module

        return schedule_module(module)


AVX512VNNI = X86("x86-avx512vnni", isas.AVX512VNNI)
AVX512 = X86("x86-avx512", isas.AVX512)
AVXVNNI = X86("x86-avxvnni", isas.AVXVNNI)
AVX2 = X86("x86-avx2", isas.AVX2)

# The fastest first: "x86" is the first of these that this machine runs.
VARIANTS = (AVX512VNNI, AVX512, AVXVNNI, AVX2)


def best() -> X86:
    """The fastest variant this machine runs; AVX2 where it runs none (it can still be built here)."""
    return next((t for t in VARIANTS if t.unavailable() is None), AVX2)
