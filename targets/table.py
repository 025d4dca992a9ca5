"""The table of targets: name -> where it is defined. Strings, so that listing them imports no compiler."""

from __future__ import annotations

import difflib
import importlib

from khtst_compile.errors import UsageError
from khtst_compile.targets.contract import Target

# name -> (module:attribute, one line for `khtst-compile targets`)
TARGETS: dict[str, tuple[str, str]] = {
    "x86": ("khtst_compile.targets.x86:best", "all x86 variants in one artifact; the best one runs"),
    "x86-avx512vnni": ("khtst_compile.targets.x86:AVX512VNNI", "AVX512 with VNNI (Ice Lake, Zen 4 and later)"),
    "x86-avx512": ("khtst_compile.targets.x86:AVX512", "AVX512 without VNNI (Skylake-X)"),
    "x86-avxvnni": ("khtst_compile.targets.x86:AVXVNNI", "AVX2 with AVX-VNNI (Alder Lake and later)"),
    "x86-avx2": ("khtst_compile.targets.x86:AVX2", "AVX2 and FMA (every x86-64-v3 machine)"),
    "arm": ("khtst_compile.targets.arm_neon:best", "all arm variants in one artifact; the best one runs"),
    "arm-i8mm": ("khtst_compile.targets.arm_neon:I8MM", "int8 matrix products (Neoverse V1, Cortex-A510 and later)"),
    "arm-dotprod": ("khtst_compile.targets.arm_neon:DOTPROD", "dot products (Cortex-A55, A76, Neoverse N1 and later)"),
    "arm-neon": ("khtst_compile.targets.arm_neon:NEON", "every 64-bit ARM"),
}


KERNELS_ONLY = ("armv7-neon",)
"""Targets of targets/library.py."""

# name -> the targets an artifact for it holds, where they are several: the fastest first
FAMILIES = {
    "x86": ("x86-avx512vnni", "x86-avx512", "x86-avxvnni", "x86-avx2"),
    "arm": ("arm-i8mm", "arm-dotprod", "arm-neon"),
}


def variants(name: str, triple: str | None = None) -> tuple[Target, ...]:
    """What an artifact for that target is built for, on the system of a triple. Raises UsageError as `target` and `Target.on` do."""
    found = tuple(target(n) for n in FAMILIES.get(name, (name,)))
    return found if triple is None else tuple(t.on(triple) for t in found)


def target(name: str) -> Target:
    """The target of that name; of a family, the one that runs here. Raises UsageError naming the nearest one."""
    if name in KERNELS_ONLY:
        raise UsageError(
            f"{name} has kernels, and no runtime that a whole model needs; use `khtst-compile kernels --target {name}`"
        )
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"no target is called {name!r}; {hint}known: {', '.join(TARGETS)}")
    module, _, attribute = TARGETS[name][0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    made: Target = found() if callable(found) else found
    return made
