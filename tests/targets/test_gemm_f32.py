"""float32 GEMM and batched product: the order of additions is the reference's, so every instruction set agrees bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import AVX2, X86_ISAS, Isa
from khtst_compile.targets.kernels import gemm_f32, matmul_f32
from khtst_compile.targets.kernels.gemm_f32 import GemmF32
from khtst_compile.targets.kernels.matmul_f32 import MatmulF32
from khtst_compile.targets.kernels.rows import Lead
from tests.targets.gemm_tools import RUNNABLE, assembly, hot_loops, isa_id, run, same_bits, touches_stack

AWKWARD = (1, 7, 8, 9, 31, 33)
each_isa = pytest.mark.parametrize("isa", RUNNABLE, ids=isa_id)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@each_isa
@pytest.mark.parametrize("n", [*AWKWARD, 100])
def test_gemm_equals_the_reference_to_the_bit(isa: Isa, n: int) -> None:
    # n = k would hide a transposed panel; k has to be compiled in, so two of them.
    for k in (9, 32) if n % 2 else (7, 33):
        spec = GemmF32(isa, n, k, Lead(1))
        weights, bias = normal(n, k, seed=1), normal(n, seed=2)
        packed = gemm_f32.pack(spec, weights, bias)
        for m in (*AWKWARD, 0):
            a = normal(m, k)
            assert same_bits(run(spec, [a, *packed], (m, n)), gemm_f32.reference(a, weights, bias))


@each_isa
@pytest.mark.parametrize(("act", "n"), [("relu", 48), ("gelu", 33), ("silu", 64)])
def test_epilogue(isa: Isa, act: str, n: int) -> None:
    spec = GemmF32(isa, n, 20, Lead(2), act, residual=True)
    a, weights, residual = normal(2, 9, 20), normal(n, 20, seed=1), normal(2, 9, n, seed=2)
    got = run(spec, [a, *gemm_f32.pack(spec, weights), residual], (2, 9, n))
    assert same_bits(got, gemm_f32.reference(a, weights, None, act, residual))


@each_isa
@pytest.mark.parametrize(("n", "act"), [(128, "none"), (384, "relu"), (190, "none")])
def test_few_rows_side_by_side(isa: Isa, n: int, act: str) -> None:
    spec = GemmF32(isa, n, 24, Lead(1), act, residual=True)
    weights, bias = normal(n, 24, seed=1), normal(n, seed=2)
    packed = gemm_f32.pack(spec, weights, bias)
    for m in range(8):
        a, residual = normal(m, 24), normal(m, n, seed=3)
        assert same_bits(run(spec, [a, *packed, residual], (m, n)), gemm_f32.reference(a, weights, bias, act, residual))


def test_one_row_keeps_eight_sums_going() -> None:
    # With the two of one panel every multiply-add would wait for the one before: a quarter of the speed.
    loops = hot_loops(assembly(GemmF32(AVX2, 512, 384, Lead(1))), "vfmadd")
    sums = [[sum(word in line for line in loop) for word in ("vfmadd", "vbroadcastss")] for loop in loops]
    assert max(fma / broadcast for fma, broadcast in sums) == 8


@each_isa
@pytest.mark.parametrize(
    "change",
    [{"rows": 3, "vectors": 1}, {"rows": 2, "vectors": 4, "unroll": 2}, {"ahead": 640, "ahead_few": 64, "panels_first": False}],
)
def test_no_tile_changes_a_bit(isa: Isa, change: dict[str, int]) -> None:
    n, k = 96, 20
    plain = GemmF32(isa, n, k, Lead(1))
    spec = replace(plain, tile=replace(plain.default_tile, **change))
    assert spec.how != plain.how
    weights, bias = normal(n, k, seed=1), normal(n, seed=2)
    packed = gemm_f32.pack(spec, weights, bias)
    for m in (1, 2, 7, 130):
        a = normal(m, k)
        assert same_bits(run(spec, [a, *packed], (m, n)), gemm_f32.reference(a, weights, bias))


@each_isa
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m", [0, 1, 7, 33])
def test_matmul_equals_the_reference_to_the_bit(isa: Isa, transposed: bool, m: int) -> None:
    spec = MatmulF32(isa, Lead(2), transposed)
    for n in (1, 8, 31, 70):
        for k in (1, 9, 33):
            a, b = normal(2, 3, m, k), normal(2, 3, *((n, k) if transposed else (k, n)), seed=1)
            assert same_bits(run(spec, [a, b], (2, 3, m, n)), matmul_f32.reference(a, b, transposed))


def test_matmul_of_nothing() -> None:
    spec = MatmulF32(AVX2)
    assert run(spec, [normal(0, 3, 4), normal(0, 4, 5)], (0, 3, 5)).size == 0
    assert run(spec, [normal(2, 3, 4), normal(2, 4, 0)], (2, 3, 0)).size == 0
    assert (run(spec, [normal(2, 3, 0), normal(2, 0, 5)], (2, 3, 5)) == 0).all()


def test_matmul_static_sizes() -> None:
    spec = MatmulF32(AVX2, Lead(1, (2,)), m=5, n=3, k=4)
    a, b = normal(2, 5, 4), normal(2, 4, 3, seed=1)
    assert same_bits(run(spec, [a, b], (2, 5, 3)), matmul_f32.reference(a, b))


@pytest.mark.parametrize("isa", X86_ISAS, ids=isa_id)
@pytest.mark.parametrize("n", [384, 100])
def test_assembly(isa: Isa, n: int) -> None:
    spec = GemmF32(isa, n, 384, Lead(2))
    text = assembly(spec)
    register = "%zmm" if isa.vector_bits == 512 else "%ymm"
    loops = hot_loops(text, "vfmadd")
    full = spec.panels.rows * spec.panels.vectors
    assert max(sum("vfmadd" in line and register in line for line in loop) for loop in loops) >= full
    for loop in loops:
        assert not touches_stack(text, loop)
    assert "TVMBackendAllocWorkspace" not in text


def test_refusals() -> None:
    with pytest.raises(LoweringError, match="needed at least"):
        GemmF32(AVX2, 0, 3)
    with pytest.raises(LoweringError, match="swish"):
        GemmF32(AVX2, 3, 3, act="swish")
    with pytest.raises(LoweringError, match=r"\(3, 2\)"):
        gemm_f32.pack(GemmF32(AVX2, 2, 3), np.zeros((3, 2), np.float32))
