"""The experts kernel under emulation: the bits of torch's operator on every instruction set of ARM."""

from __future__ import annotations

from pathlib import Path

import pytest

from khtst_compile.targets.isa import ARM_ISAS, Isa
from khtst_compile.targets.kernels import experts
from tests.arm.emulator import CPUS, Call, build_kernels, run_kernels, same_numbers
from tests.targets.mixtures import MIXTURES, tokens, wanted

ROUTINGS = ((0, "any"), (1, "any"), (2, "holes"), (7, "one"), (33, "holes"), (200, "any"))


@pytest.mark.parametrize("isa", ARM_ISAS, ids=lambda isa: isa.name)
def test_the_bits_are_torchs(isa: Isa, runner: Path, tmp_path: Path) -> None:
    functions, calls, wants = {}, [], []
    for number, mixture in enumerate(MIXTURES.values()):
        spec = mixture.spec(isa, name=f"experts{number}")
        functions[spec.name] = experts.prim_func(spec)
        constants = mixture.constants(spec)
        for n, kind in ROUTINGS:
            rows = tokens(mixture, n, kind)
            calls.append(Call(spec.name, rows.inputs(spec, constants), [((n, mixture.outputs), "float32")]))
            wants.append(wanted(mixture, rows))
    library = build_kernels(functions, isa, tmp_path / "experts.so")
    for call, (got,), want in zip(calls, run_kernels(library, calls, CPUS[isa.name], tmp_path, runner), wants, strict=True):
        assert same_numbers(got, want), (call.name, got.shape)
