"""Codebooks on ARM under emulation: the ids and the bits of torch's operators, which are those of x86 and of onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.program import Program
from tests.arm.emulator import CPUS, Job, results
from tests.arm.emulator import program as hand_over
from tests.targets.lookups import BOOKS, GRIDS, check, names, program, rows, wanted


@pytest.fixture(scope="module")
def made() -> Program:
    return program(BOOKS, GRIDS)


@pytest.fixture(scope="module")
def lowered(made: Program, runner: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookups")
    kc.quantize(made, folder / "q", recipe="fp32", random=True)
    kc.lower(folder / "q", folder / "arm", target="arm")
    return folder / "arm"


@pytest.mark.parametrize("variant", ["arm-i8mm", "arm-dotprod", "arm-neon"])
def test_arm(variant: str, made: Program, lowered: Path, runner: Path, tmp_path: Path) -> None:
    z = rows(BOOKS, GRIDS)
    for number, some in enumerate((z, z[60:61])):
        inputs = [np.ascontiguousarray(some.numpy())]
        job = Job(tmp_path / f"job{number}", runner)
        ids = hand_over(artifact.read(lowered, kind="library"), variant, inputs, job)["ids"]
        place = tmp_path / f"result{number}_"
        job.lines.append(f"main {place} {len(inputs)} {' '.join(map(str, ids))}")
        job.run(CPUS[variant.removeprefix("arm-")])
        want = wanted(made, some)
        got = results(place, [(w.shape, w.dtype.name) for w in want])
        check(f"{variant}, {len(some)} rows", got, want, names(BOOKS, GRIDS))
