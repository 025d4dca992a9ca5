"""The kernel library for 32-bit ARM under emulation: the bytes of the reference, which every other target has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from khtst_compile import api
from khtst_compile.errors import EnvironmentProblem, UsageError
from khtst_compile.targets import library, table
from khtst_compile.targets.isa import ARMV7
from khtst_compile.targets.kernels import gemm_i8, quantize
from khtst_compile.targets.kernels.quantize import Quantizer
from tests.arm.emulator import LIMIT_S, same_numbers
from tests.cli.conftest import run_cli
from tests.requirements import need

HERE = Path(__file__).parent
CROSS, EMULATOR = "arm-linux-gnueabihf-gcc", "qemu-arm"
LEAST, BEFORE = "cortex-a7", "cortex-a9"
"""Processors that have fused multiply-add in NEON, and that do not yet."""
LINEARS = ((1, 1), (33, 31), (9, 100), (100, 31), (64, 384))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library."""
    missing = [tool for tool in (CROSS, EMULATOR) if shutil.which(tool) is None]
    need("arm", f"{', '.join(missing)} not on the path; scripts/install-system.sh python3 arm" if missing else None)
    return api.kernels(tmp_path_factory.mktemp("library") / "a", linears=[f"{n}x{k}" for n, k in LINEARS])


@pytest.fixture(scope="module")
def program(made: Path) -> Path:
    """library.c, linked with it."""
    to = made.parent / "program"
    flags = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-static", f"-I{made}")
    subprocess.run(
        [CROSS, *flags, str(HERE / "library.c"), str(made / "libkhtst_kernels.a"), "-o", str(to)], check=True, timeout=LIMIT_S
    )
    return to


def run(program: Path, cpu: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [EMULATOR, "-cpu", cpu, str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def rows_of(count: int, k: int) -> np.ndarray:
    """Ordinary rows, ties, and rows of zeros, the smallest and the largest numbers, infinities and NaN."""
    rng = np.random.default_rng(count * k)
    x = rng.standard_normal((count, k)).astype(np.float32)
    special = (0.0, -0.0, 1e-40, 1.2e-38, 1e-31, 3e38, np.inf, -np.inf, np.nan)
    for row, value in zip(x[1:], special, strict=False):
        row[rng.integers(k)] = value
    x[len(special) + 1 : len(special) + 3] *= 0
    x[len(special) + 3 : len(special) + 4] = np.arange(k) % 255 * 0.5 - 63.5  # codes halfway between two
    return x


@pytest.mark.parametrize(("n", "k"), LINEARS)
@pytest.mark.parametrize("count", [1, 2, 3, 33])
def test_the_bytes_of_the_reference(program: Path, n: int, k: int, count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(n)
    x, weights = rows_of(count, k), rng.integers(-127, 128, (n, k), dtype=np.int8)
    w_scale, bias = rng.uniform(0.001, 0.1, n).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    for name, array in (("x", x), ("weights", weights), ("w_scale", w_scale), ("bias", bias)):
        (tmp_path / name).write_bytes(array.tobytes())
    done = run(program, LEAST, n, k, count, tmp_path)
    assert done.returncode == 0, (done.returncode, done.stderr)
    codes, scale = quantize.reference_codes(Quantizer(), x)
    stored = np.fromfile(tmp_path / "codes", np.int8).reshape(count, -1)
    assert (stored[:, :k] == codes).all()
    assert same_numbers(np.fromfile(tmp_path / "scale", np.float32), scale)
    with np.errstate(invalid="ignore"):
        want = gemm_i8.reference(codes.astype(np.int8), scale, weights, w_scale, bias)
    assert same_numbers(np.fromfile(tmp_path / "out", np.float32).reshape(count, n), want)


def test_a_processor_without_fused_multiply_add(program: Path) -> None:
    done = run(program, BEFORE)
    assert (done.returncode, done.stderr) == (4, "vfpv4\n")


def test_what_is_in_the_folder(made: Path) -> None:
    text = (made / "README.md").read_text()
    assert "$" not in text and "armv7-linux-gnueabihf" in text and "64 x 384" in text and "neon, vfpv4" in text
    listed = subprocess.run(
        ["readelf", "-A", str(made / "libkhtst_kernels.a")], capture_output=True, text=True, check=True
    ).stdout
    assert "Tag_ABI_VFP_args: VFP registers" in listed and "NEONv1 with Fused-MAC" in listed
    (made.parent / "a.cc").write_text('#include "khtst_kernels.h"\nint main() { return *khtst_lacking(); }\n')
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", f"-I{made}"]
    subprocess.run([*command, str(made.parent / "a.cc")], check=True)
    listed = subprocess.run(["nm", str(made / "libkhtst_kernels.a")], capture_output=True, text=True, check=False)
    assert "khtst_multiply" in listed.stdout


def test_the_command_line(made: Path, tmp_path: Path) -> None:
    done = run_cli("kernels", "--linear", "8x16", "--linear", "8x16", "-o", tmp_path / "a")
    assert "1 layers for armv7-neon" in done.stdout and (tmp_path / "a" / "libkhtst_kernels.a").is_file()
    done = run_cli("kernels", "--linear", "8x16", "-o", tmp_path / "a", code=2)
    assert "exists and is not an artifact" in done.stderr


@pytest.mark.parametrize("linear", ["", "8", "8x", "0x8", "8x0", "8x-8", "8x8x8", "65536x65536", " 8x8"])
def test_sizes_that_are_none(linear: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--linear '{linear}': needed: output by input features"):
        api.kernels(tmp_path / "a", linears=[linear])
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--linear is missing"):
        api.kernels(tmp_path / "a", linears=[])
    with pytest.raises(UsageError, match="target 'arm-neon': there are kernel libraries for armv7-neon"):
        api.kernels(tmp_path / "a", linears=["8x8"], target="arm-neon")
    with pytest.raises(UsageError, match="use `khtst-compile kernels --target armv7-neon`"):
        table.variants("armv7-neon")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match=r"arm-linux-gnueabihf-gcc.*apt-get install gcc-arm-linux-gnueabihf") as refused:
        api.kernels(tmp_path / "a", linears=["8x8"])
    assert refused.value.exit_code == 4 and list(tmp_path.iterdir()) == []


def test_sums_are_those_of_the_instructions_meaning() -> None:
    """What the test above runs is made of vmull and vpadal: checked where the instructions are named."""
    import tvm

    spec = gemm_i8.GemmI8(ARMV7, 64, 64)
    text = str(
        tvm.tirx.build(tvm.IRModule({"f": gemm_i8.prim_func(spec)}), target=tvm.target.Target(ARMV7.tvm_target())).inspect_source(
            "asm"
        )
    )
    words = {line.split()[0] for line in text.splitlines() if line.startswith("\t")}
    assert (
        {"vmull.s8", "vmlal.s8", "vpadal.s16"} <= words
        and "__aeabi_fmul" not in text
        and library.LIBRARIES["armv7-neon"] is ARMV7
    )
