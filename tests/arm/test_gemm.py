"""Matrix products under emulation: exact sums, the reference's bits, at awkward sizes; and what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from khtst_compile.targets.isa import ARM_ISAS, AVX2, DOTPROD, I8MM, NEON, Isa
from khtst_compile.targets.kernels import gemm_f32, gemm_i8
from khtst_compile.targets.kernels.act import ACTIVATIONS, activation
from khtst_compile.targets.kernels.gemm_f32 import GemmF32
from khtst_compile.targets.kernels.gemm_i8 import GemmI8, pack, store_codes
from khtst_compile.targets.kernels.rows import Lead
from tests.arm.emulator import CPUS, Call, Job, build_kernels, run_kernels, same_numbers
from tests.targets.gemm_tools import codes_and_weights, run, same_bits

AWKWARD = (1, 7, 8, 9, 31, 33)
SUMS = (*zip(AWKWARD, (33, 9, 31, 8, 7, 1), strict=True), (129, 100))
"""(n, k)."""
each_isa = pytest.mark.parametrize("isa", ARM_ISAS, ids=lambda i: i.name)


def int8_call(name: str, spec: GemmI8, codes: np.ndarray, weights: np.ndarray, *rest: np.ndarray) -> Call:
    a_scale, w_scale, bias, residual = rest
    inputs = [store_codes(spec.isa, codes), a_scale, *pack(spec, weights, w_scale, bias)]
    shape = (*codes.shape[:-1], spec.n)
    output = (shape, "int32" if spec.output == "acc" else "float32")
    return Call(name, [*inputs, residual] if spec.residual else inputs, [output])


@each_isa
def test_sums_are_exact(isa: Isa, runner: Path, tmp_path: Path) -> None:
    specs = {(n, k): GemmI8(isa, n, k, Lead(1), output="acc") for n, k in SUMS}
    library = build_kernels({f"g{n}_{k}": gemm_i8.prim_func(s) for (n, k), s in specs.items()}, isa, tmp_path / "g.so")
    calls, wants = [], []
    for (n, k), spec in specs.items():
        for m in (*AWKWARD, 0, 70):
            codes, weights, *rest = codes_and_weights(m, n, k)
            calls.append(int8_call(f"g{n}_{k}", spec, codes, weights, *rest))
            wants.append(codes.astype(np.int64) @ weights.astype(np.int64).T)
    for got, want in zip(run_kernels(library, calls, CPUS[isa.name], tmp_path, runner), wants, strict=True):
        assert (got[0] == want).all()


@each_isa
def test_sums_are_exact_where_steps_go_in_pairs(isa: Isa, runner: Path, tmp_path: Path) -> None:
    # Weights as a model has them; steps of 1 to 13, so that pairs come alone, in twos, and with a step left over.
    rng = np.random.default_rng(7)
    specs = {k: GemmI8(isa, 20, k, Lead(1), output="acc") for k in (16, 40, 48, 64, 100, 128, 200)}
    library = build_kernels({f"g{k}": gemm_i8.prim_func(s) for k, s in specs.items()}, isa, tmp_path / "g.so")
    calls, wants = [], []
    for k, spec in specs.items():
        weights = np.clip(rng.normal(0, 35, (20, k)).round(), -127, 127).astype(np.int8)
        for m in (1, 2, 3, 4, 11):
            # The largest codes, of the sign that makes every sum as large as it can be.
            codes = np.where(rng.random((m, 1)) < 0.5, 127, -127) * np.where(weights[m] < 0, -1, 1)
            codes, *rest = codes.astype(np.int8), *codes_and_weights(m, 20, k)[2:]
            calls.append(int8_call(f"g{k}", spec, codes, weights, *rest))
            wants.append(codes.astype(np.int64) @ weights.astype(np.int64).T)
    for got, want in zip(run_kernels(library, calls, CPUS[isa.name], tmp_path, runner), wants, strict=True):
        assert (got[0] == want).all()


@each_isa
def test_extreme_codes_and_what_lies_beyond_k(isa: Isa, runner: Path, tmp_path: Path) -> None:
    m, n, k = 5, 17, 4099
    spec, short = GemmI8(isa, n, k, Lead(1), output="acc"), GemmI8(isa, n, 33, Lead(1), output="acc")
    functions = {"long": gemm_i8.prim_func(spec), "short": gemm_i8.prim_func(short)}
    library = build_kernels(functions, isa, tmp_path / "g.so")
    _, _, *rest = codes_and_weights(m, n, k)
    calls, wants = [], []
    for x, y in ((127, 127), (127, -127), (-127, 127), (-127, -127)):
        # Two products of 127 * 127 are the most that int16 holds.
        full = np.full((m, k), x, np.int8), np.full((n, k), y, np.int8)
        calls.append(int8_call("long", spec, *full, *rest))
        wants.append(np.full((m, n), x * y * k))
    codes, weights, *rest = codes_and_weights(m, n, 33)
    for fill in (-128, -1, 127):
        call = int8_call("short", short, codes, weights, *rest)
        call.inputs[0][:, 33:] = fill
        calls.append(call)
        wants.append(codes.astype(np.int64) @ weights.astype(np.int64).T)
    for got, want in zip(run_kernels(library, calls, CPUS[isa.name], tmp_path, runner), wants, strict=True):
        assert (got[0] == want).all()


@each_isa
def test_floats_have_the_bits_of_the_reference_whatever_the_tile(isa: Isa, runner: Path, tmp_path: Path) -> None:
    plain = GemmI8(isa, 72, 80, Lead(1), "relu", True)
    changes = {
        "few": {"rows": 2, "vectors": 3},
        "single": {"unroll": 1},  # of sdot, the form without lanes
        "asking": {"ahead": 64, "ahead_few": 4096, "panels_first": False, "block": 4096},
    }
    specs = {
        "ragged": GemmI8(isa, 31, 40, Lead(1), "gelu", True),
        "direct": GemmI8(isa, 64, 40, Lead(1)),
        "leading": GemmI8(isa, 24, 20, Lead(3, (2, 3, 4)), "silu", True),
        **{name: replace(plain, tile=replace(plain.default_tile, **change)) for name, change in changes.items()},
    }
    assert all(specs[name].how != plain.how for name in changes if not (name == "single" and plain.how.unroll == 1))
    library = build_kernels({name: gemm_i8.prim_func(s) for name, s in specs.items()}, isa, tmp_path / "g.so")
    calls, wants = [], []
    for name, spec in specs.items():
        for m in (24,) if name == "leading" else (1, 2, 7, 33, 130):
            codes, weights, a_scale, w_scale, bias, added = codes_and_weights(m, spec.n, spec.k)
            lead = (2, 3, 4) if name == "leading" else (m,)
            given = codes.reshape(*lead, -1), weights, a_scale.reshape(lead), w_scale, bias, added.reshape(*lead, -1)
            calls.append(int8_call(name, spec, *given))
            want = gemm_i8.reference(codes, a_scale, weights, w_scale, bias, spec.act, added if spec.residual else None)
            wants.append(want.reshape(*lead, -1))
    for call, got, want in zip(calls, run_kernels(library, calls, CPUS[isa.name], tmp_path, runner), wants, strict=True):
        assert same_bits(got[0], want), call.name


SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38, 88.73, -87.4, -88.1, 5.4, -5.4, 7.9, 0.5, 1.5, 2.5],
    np.float32,
)


def test_activations_have_the_bits_of_x86(runner: Path, tmp_path: Path) -> None:
    # One feature with weight 1 and no bias: what goes in is what the activation gets.
    x = np.concatenate([SPECIAL, np.linspace(-100, 100, 4001, dtype=np.float32)])[:, None]
    specs = {act: GemmF32(NEON, 16, 1, Lead(1), act) for act in ACTIVATIONS}
    library = build_kernels({act: gemm_f32.prim_func(s) for act, s in specs.items()}, NEON, tmp_path / "g.so")
    ones = np.ones((16, 1), np.float32)
    calls = [Call(act, [x, *gemm_f32.pack(s, ones)], [((len(x), 16), "float32")]) for act, s in specs.items()]
    for call, (got,) in zip(calls, run_kernels(library, calls, CPUS["neon"], tmp_path, runner), strict=True):
        spec = replace(specs[call.name], isa=AVX2)
        on_x86 = run(spec, [x, *gemm_f32.pack(spec, ones)], (len(x), 16))
        assert same_numbers(got, on_x86), call.name
        with np.errstate(all="ignore"):
            assert same_numbers(got[:, :1], activation(call.name).reference(x + np.float32(0))), call.name


def test_float32_products_have_the_bits_of_the_reference(runner: Path, tmp_path: Path) -> None:
    sizes = (*zip(AWKWARD, (33, 9, 31, 8, 7, 1), strict=True), (100, 50))
    specs = {f"f{n}_{k}": GemmF32(NEON, n, k, Lead(1), "gelu" if n == 31 else "none", n == 33) for n, k in sizes}
    library = build_kernels({name: gemm_f32.prim_func(s) for name, s in specs.items()}, NEON, tmp_path / "g.so")
    calls, wants = [], []
    for name, spec in specs.items():
        for m in (*AWKWARD, 0):
            rng = np.random.default_rng(m)
            a, w, bias, added = (
                rng.standard_normal(s).astype(np.float32) for s in ((m, spec.k), (spec.n, spec.k), spec.n, (m, spec.n))
            )
            inputs = [a, *gemm_f32.pack(spec, w, bias), *([added] if spec.residual else [])]
            calls.append(Call(name, inputs, [((m, spec.n), "float32")]))
            wants.append(gemm_f32.reference(a, w, bias, spec.act, added if spec.residual else None))
    for call, (got,), want in zip(calls, run_kernels(library, calls, CPUS["neon"], tmp_path, runner), wants, strict=True):
        assert same_bits(got, want), call.name


def disassembly(library: Path) -> list[str]:
    """Instructions, one a line: "address:\\tmnemonic\\toperands"."""
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in text.splitlines() if re.match(r"\s*[0-9a-f]+:\t", line)]


BEYOND = {"dotprod": ("sdot", "udot"), "i8mm": ("smmla", "ummla", "usmmla", "usdot", "sudot")}


def test_each_build_holds_its_instructions_and_none_of_the_others(runner: Path, tmp_path: Path) -> None:
    words = {}
    for isa in ARM_ISAS:
        library = build_kernels({"g": gemm_i8.prim_func(GemmI8(isa, 64, 64, Lead(1)))}, isa, tmp_path / f"{isa.name}.so")
        words[isa.name] = {line.split("\t")[1].split()[0] for line in disassembly(library)}
    assert {"smull", "smlal2", "sadalp"} <= words["neon"]
    assert not words["neon"].intersection(BEYOND["dotprod"] + BEYOND["i8mm"])
    assert "sdot" in words["dotprod"] and not words["dotprod"].intersection(BEYOND["i8mm"])
    assert "smmla" in words["i8mm"]


@pytest.mark.parametrize(("isa", "cpu"), [(DOTPROD, "cortex-a72"), (I8MM, "cortex-a76")], ids=lambda v: getattr(v, "name", v))
def test_a_build_dies_where_its_instructions_lack(isa: Isa, cpu: str, runner: Path, tmp_path: Path) -> None:
    # The reason why flags are compared before a library is mapped; and emulation leaves nothing in that hardware would not do.
    spec = GemmI8(isa, 8, 16, Lead(1), output="acc")
    library = build_kernels({"g": gemm_i8.prim_func(spec)}, isa, tmp_path / "g.so")
    codes, weights, *rest = codes_and_weights(4, 8, 16)
    call = int8_call("g", spec, codes, weights, *rest)
    job = Job(tmp_path / "job", runner)
    ids = [*(job.tensor(a) for a in call.inputs), *(job.room(*o) for o in call.outputs)]
    job.lines += [f"lib {library}", f"call g {' '.join(map(str, ids))}"]
    assert job.start(cpu).returncode in (-4, 132)  # SIGILL
    assert job.start(CPUS[isa.name]).returncode == 0
