"""The codebook kernel under emulation: torch's ids and values on every instruction set of ARM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from khtst_compile.layout import Packed
from khtst_compile.targets.isa import ARM_ISAS, Isa
from khtst_compile.targets.kernels import codebook
from tests.arm.emulator import CPUS, Call, build_kernels, run_kernels, same_numbers
from tests.targets.test_codebook import CASES, spec_of


@pytest.mark.parametrize("isa", ARM_ISAS, ids=lambda isa: isa.name)
def test_ids_and_values_are_torchs(isa: Isa, runner: Path, tmp_path: Path) -> None:
    functions, calls, wants = {}, [], []
    for number, case in enumerate(CASES.values()):
        for int8 in (True, False) if isa is ARM_ISAS[-1] else (True,):  # float32 is the same on all
            name = f"codebook{number}{'i' if int8 else 'f'}"
            spec = replace(spec_of(case, isa, int8), name=name)
            functions[name] = codebook.prim_func(spec)
            packed = codebook.pack(spec, case.codes, case.bias, case.values)
            constants = [a.packed if isinstance(a, Packed) else a for a in packed]
            lead = case.z.shape[:-1]
            rooms = [((*lead, spec.value_features), "float32"), ((*lead, spec.levels), "int32")]
            calls.append(Call(name, [case.z, *constants], rooms))
            wants.append(case.wanted())
    library = build_kernels(functions, isa, tmp_path / "codebook.so")
    for call, got, want in zip(calls, run_kernels(library, calls, CPUS[isa.name], tmp_path, runner), wants, strict=True):
        assert (got[1] == want[1]).all(), call.name
        assert same_numbers(got[0], want[0]), call.name
