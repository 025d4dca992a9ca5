"""A target that is a CPU: one instruction set, and the kernels that all CPUs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from khtst_compile import cpu
from khtst_compile.targets.contract import KernelRule
from khtst_compile.targets.isa import Isa


@dataclass(frozen=True)
class CpuTarget:
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

    def tuned(self, tiles: Mapping[tuple[object, ...], Any]) -> CpuTarget:
        return replace(self, tiles=tiles)

    def on(self, triple: str) -> CpuTarget:
        return replace(self, isa=self.isa.on(triple))

    def finalize(self, module: Any) -> Any:
        from khtst_compile.targets.schedule import schedule_module

        return schedule_module(module)


def first_that_runs(targets: Sequence[CpuTarget]) -> CpuTarget:
    """The first that this machine runs; the last where it runs none (it can still be built here)."""
    return next((t for t in targets if t.unavailable() is None), targets[-1])
