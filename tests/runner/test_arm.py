"""The runner for ARM under emulation: the golden bits on every instruction set, and a refusal where the CPU lacks one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.runner import emit
from khtst_compile.targets import table
from tests.requirements import need
from tests.runner.conftest import QEMU, Made, call

CPUS = {"arm-neon": "cortex-a53", "arm-dotprod": "cortex-a76", "arm-i8mm": "max"}
"""Variant -> a processor that has no more than it needs, or everything."""
BUDGET_BYTES = 8_000_000  # of all but weights


@pytest.fixture(scope="module")
def arm(made: Made, arm_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for all ARM variants, with its runner."""
    need("arm", None if "arm" in table.FAMILIES else "there are no ARM targets")
    folder = tmp_path_factory.mktemp("arm") / "arm"
    kc.lower(made.quantized, folder, target="arm", emit_runner=True)
    return folder


def run(folder: Path, cpu: str, verb: str, *words: object, code: int = 0) -> str:
    """Both outputs of the program on a processor of that name."""
    done = call(*QEMU, "-cpu", cpu, folder / emit.FOLDER / emit.PROGRAM, verb, folder, *words, code=code)
    return done.stdout + done.stderr


@pytest.mark.parametrize("variant", CPUS)
def test_the_golden_bits(arm: Path, variant: str) -> None:
    assert f"1 outputs as {variant}: all the same bits" in run(arm, CPUS[variant], "verify")
    assert "as arm-neon: all the same bits" in run(arm, CPUS[variant], "verify", "--variant", "arm-neon", "--threads", 2)


def test_run_gives_the_bytes_of_x86(arm: Path, made: Made, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((37, 32), dtype=np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    run(arm, "cortex-a76", "run", tmp_path / "in.npz", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        assert found["output"].tobytes() == kc.load(made.library).run({"x": x})["output"].tobytes()


def test_a_cpu_without_dot_products_is_refused(arm: Path) -> None:
    said = run(arm, "cortex-a53", "verify", "--variant", "arm-dotprod", code=4)
    assert "arm-dotprod needs the CPU features asimd, asimddp; this CPU lacks asimddp;" in said
    said = run(arm, "cortex-a76", "verify", "--variant", "arm-i8mm", code=4)
    assert "this CPU lacks i8mm;" in said


def test_all_but_weights_is_small(arm: Path) -> None:
    manifest = json.loads((arm / artifact.MANIFEST).read_text())
    assert manifest["runner"]["platform"] == "linux/arm64"
    whole = sum(f["bytes"] for name, f in manifest["files"].items() if name != "weights.bin")
    assert whole <= BUDGET_BYTES


def test_this_machine_says_what_it_is_for(arm: Path, made: Made) -> None:
    said = made.run("verify", folder=arm, code=4).stderr
    assert "(aarch64-linux-gnu); this is x86_64" in said
