"""int8 GEMM: exact sums and the same float bits on every instruction set, at awkward sizes; what the compiler made of it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import ARM_ISAS, AVX2, AVX512, AVX512VNNI, AVXVNNI, I8MM, X86_ISAS, Isa
from khtst_compile.targets.kernels.act import ACTIVATIONS
from khtst_compile.targets.kernels.gemm_i8 import GemmI8, pack, reference, store_codes
from khtst_compile.targets.kernels.rows import Lead
from khtst_compile.targets.kernels.tiles import Tile
from tests.targets.gemm_tools import (
    RUNNABLE,
    assembly,
    codes_and_weights,
    hot_loops,
    isa_id,
    library,
    run,
    same_bits,
    touches_stack,
)

AWKWARD = (1, 7, 8, 9, 31, 33)
PAIRS = [(n, AWKWARD[(i + step) % 6]) for i, n in enumerate(AWKWARD) for step in (0, 2)]
"""(n, k), every size twice as each: a kernel has to be compiled for each pair."""
each_isa = pytest.mark.parametrize("isa", RUNNABLE, ids=isa_id)


def call(spec: GemmI8, codes: np.ndarray, weights: np.ndarray, a_scale: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    w_scale, bias, residual = rest
    stored = store_codes(spec.isa, codes)
    inputs = [stored, a_scale, *pack(spec, weights, w_scale, bias), *([residual] if spec.residual else [])]
    return run(spec, inputs, (*codes.shape[:-1], spec.n), "int32" if spec.output == "acc" else "float32")


def exact(codes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return codes.astype(np.int64) @ weights.astype(np.int64).T


@each_isa
@pytest.mark.parametrize(("n", "k"), PAIRS)
def test_sums_are_exact_at_awkward_sizes(isa: Isa, n: int, k: int) -> None:
    spec = GemmI8(isa, n, k, Lead(1), output="acc")
    for m in (*AWKWARD, 0):
        codes, weights, a_scale, *rest = codes_and_weights(m, n, k)
        assert (call(spec, codes, weights, a_scale, *rest) == exact(codes, weights)).all()


@each_isa
@pytest.mark.parametrize(("m", "n", "k"), [(64, 96, 384), (130, 200, 100), (13, 129, 1536)])
def test_sums_are_exact_over_blocks_and_panels(isa: Isa, m: int, n: int, k: int) -> None:
    codes, weights, a_scale, *rest = codes_and_weights(m, n, k)
    spec = GemmI8(isa, n, k, Lead(1), output="acc")
    assert (call(spec, codes, weights, a_scale, *rest) == exact(codes, weights)).all()


@each_isa
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_extreme_codes_do_not_saturate(isa: Isa, signs: tuple[int, int]) -> None:
    # Pairs of 127 * 127 overflow the int16 of a plain vpmaddubsw; sums of a code and a weight reach 254.
    m, n, k = 5, 17, 4099
    _, _, a_scale, *rest = codes_and_weights(m, n, k)
    codes, weights = np.full((m, k), 127 * signs[0], np.int8), np.full((n, k), 127 * signs[1], np.int8)
    got = call(GemmI8(isa, n, k, Lead(1), output="acc"), codes, weights, a_scale, *rest)
    assert (got == k * 127 * 127 * signs[0] * signs[1]).all()


@each_isa
@pytest.mark.parametrize("fill", [-128, -1, 127])
def test_codes_beyond_k_do_not_count(isa: Isa, fill: int) -> None:
    m, n, k = 9, 8, 33
    codes, weights, a_scale, w_scale, bias, _ = codes_and_weights(m, n, k)
    spec = GemmI8(isa, n, k, Lead(1), output="acc")
    stored = store_codes(isa, codes)
    stored[:, k:] = fill + isa.codes_offset
    got = run(spec, [stored, a_scale, *pack(spec, weights, w_scale, bias)], (m, n), "int32")
    assert (got == exact(codes, weights)).all()


@each_isa
@pytest.mark.parametrize(
    ("n", "residual", "act"),
    [(31, True, act) for act in sorted(ACTIVATIONS)] + [(64, True, "gelu"), (64, True, "none"), (64, False, "none")],
)
def test_floats_equal_the_reference_to_the_bit(isa: Isa, n: int, residual: bool, act: str) -> None:
    m, k = 33, 40
    codes, weights, a_scale, w_scale, bias, added = codes_and_weights(m, n, k)
    spec = GemmI8(isa, n, k, Lead(1), act, residual)
    got = call(spec, codes, weights, a_scale, w_scale, bias, added)
    want = reference(codes, a_scale, weights, w_scale, bias, act, added if residual else None)
    assert same_bits(got, want)


@each_isa
@pytest.mark.parametrize(
    ("lead", "static"), [((5,), False), ((2, 9), False), ((2, 9), True), ((2, 3, 4), False), ((0, 7), False)]
)
def test_leading_dimensions(isa: Isa, lead: tuple[int, ...], static: bool) -> None:
    n, k, m = 24, 20, int(np.prod(lead))
    codes, weights, a_scale, w_scale, bias, added = codes_and_weights(m, n, k)
    spec = GemmI8(isa, n, k, Lead(len(lead), lead if static else ()), "gelu", True)
    shaped = codes.reshape(*lead, k), weights, a_scale.reshape(lead), w_scale, bias, added.reshape(*lead, n)
    got = call(spec, *shaped)
    want = reference(codes, a_scale, weights, w_scale, bias, "gelu", added).reshape(*lead, n)
    assert same_bits(got, want)


@each_isa
@pytest.mark.parametrize(
    "change",
    [
        {"rows": 3, "vectors": 1},
        {"rows": 2, "vectors": 3, "unroll": 1},
        {"unroll": 4, "ahead": 0, "ahead_few": 0},
        {"ahead": 64, "ahead_few": 4096, "panels_first": False, "block": 4096},
    ],
)
def test_no_tile_changes_a_bit(isa: Isa, change: dict[str, int]) -> None:
    n, k = 72, 80
    plain = GemmI8(isa, n, k, Lead(1), "relu", True)
    spec = replace(plain, tile=replace(plain.default_tile, **change))
    assert spec.how != plain.how
    for m in (1, 2, 7, 130):
        codes, weights, a_scale, w_scale, bias, added = codes_and_weights(m, n, k)
        got = call(spec, codes, weights, a_scale, w_scale, bias, added)
        assert same_bits(got, reference(codes, a_scale, weights, w_scale, bias, "relu", added))


@each_isa
@pytest.mark.parametrize(("n", "act"), [(64, "none"), (124, "silu"), (250, "none"), (512, "none")])
def test_one_row_walks_several_panels_at_once(isa: Isa, n: int, act: str) -> None:
    # 4, 8, 16 and 32 panels of 16 columns, 1, 2, 4 and 8 of 64; some end in a ragged one.
    k = 37
    spec = GemmI8(isa, n, k, Lead(1), act, True)
    codes, weights, a_scale, w_scale, bias, added = codes_and_weights(1, n, k)
    got = call(spec, codes, weights, a_scale, w_scale, bias, added)
    assert same_bits(got, reference(codes, a_scale, weights, w_scale, bias, act, added))


@pytest.mark.parametrize(("n", "side"), [(64, 4), (96, 2), (80, 1)])
def test_panels_of_one_row_reach_the_machine_code(n: int, side: int) -> None:
    """As many panels of 16 columns side by side as divide what there are, up to four; those that are side by side are not asked for."""
    plain = GemmI8(AVX2, n, 384, Lead(1))
    spec = replace(plain, tile=replace(plain.how, rows=3))  # so that no other loop has as many products
    loops = [loop for loop in hot_loops(assembly(spec), "vpmaddwd") if sum("vpmaddwd" in i for i in loop) == 2 * side * 2]
    assert {sum("prefetch" in line for line in loop) for loop in loops} >= ({0} if side > 1 else {2})


def test_tiles_reach_the_machine_code() -> None:
    plain = GemmI8(AVX2, 64, 384, Lead(1))

    def full_loops(spec: GemmI8) -> list[tuple[int, int]]:
        """(products, prefetches) of the innermost loops that hold whole turns of 4 rows and 2 vectors."""
        loops = hot_loops(assembly(spec), "vpmaddwd")
        counts = [tuple(sum(word in line for line in loop) for word in ("vpmaddwd", "prefetch")) for loop in loops]
        return [(products, asked) for products, asked in counts if products == 8 * spec.how.unroll]

    assert (16, 2) in full_loops(plain)
    assert (32, 4) in full_loops(replace(plain, tile=replace(plain.how, unroll=4)))
    assert {asked for _, asked in full_loops(replace(plain, tile=replace(plain.how, ahead=0)))} == {0}


def test_no_bias_is_zero_bias() -> None:
    codes, weights, a_scale, w_scale, _, added = codes_and_weights(4, 9, 12)
    spec = GemmI8(AVX2, 9, 12, Lead(1))
    inputs = [store_codes(AVX2, codes), a_scale, *pack(spec, weights, w_scale)]
    assert same_bits(run(spec, inputs, (4, 9)), reference(codes, a_scale, weights, w_scale))
    assert not same_bits(run(spec, inputs, (4, 9)), reference(codes, a_scale, weights, w_scale, added[0]))


@pytest.mark.parametrize(
    ("isa", "instruction"),
    [
        (AVX2, r"vpmaddwd\t.*%ymm"),
        (AVXVNNI, r"\{vex\}\s+vpdpbusd\t.*%ymm"),
        (AVX512, r"vpmaddwd\t.*%zmm"),
        (AVX512VNNI, r"vpdpbusd\t.*%zmm"),
    ],
    ids=lambda v: v.name if isinstance(v, Isa) else "",
)
@pytest.mark.parametrize(("n", "act"), [(384, "none"), (100, "gelu")])
def test_assembly(isa: Isa, instruction: str, n: int, act: str) -> None:
    spec = GemmI8(isa, n, 384, Lead(2), act, act == "none")
    text = assembly(spec)
    loops = hot_loops(text, instruction.partition("\\t")[0].rpartition("+")[2])
    full = spec.how.rows * spec.how.vectors
    assert max(sum(bool(re.search(instruction, line)) for line in loop) for loop in loops) >= full
    asked = set()
    for loop in loops:
        assert not touches_stack(text, loop)
        if full == sum(bool(re.search(instruction, line)) for line in loop) // spec.how.unroll:
            asked.add(sum("prefetch" in line for line in loop))
    assert (spec.how.unroll if spec.how.ahead else 0) in asked
    # "pairs" keeps one term a row in a workspace; accumulators never.
    assert len(re.findall(r"call\w*\t.*TVMBackendAllocWorkspace", text)) <= (1 if spec.dot.kind == "pairs" else 0)


@pytest.mark.parametrize("isa", X86_ISAS, ids=isa_id)
def test_emulation_keeps_layout(isa: Isa) -> None:
    real, emulated = GemmI8(isa, 100, 50), GemmI8(isa.emulate(), 100, 50)
    _, weights, _, w_scale, bias, _ = codes_and_weights(1, 100, 50)
    assert real.panels == emulated.panels
    for a, b in zip(pack(real, weights, w_scale, bias), pack(emulated, weights, w_scale, bias), strict=True):
        assert same_bits(a, b)


def test_kernels_share_a_module() -> None:
    spec = GemmI8(AVX2, 16, 16, Lead(1), name="first")
    assert library(spec).implements_function("first")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "needed at least"),
        ({"k": 140_000}, "split the layer"),
        ({"output": "int8"}, "'acc'"),
        ({"output": "acc", "act": "gelu"}, "no activation"),
        ({"act": "swish"}, "swish"),
        ({"tile": Tile(8, 2)}, "fewer rows"),
        ({"tile": Tile(0, 2)}, "at least 1"),
        ({"tile": Tile(4, 2, unroll=3)}, "divisor"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        GemmI8(**{"isa": AVX2, "n": 4, "k": 4, **options})  # type: ignore[arg-type]


def test_pack_refuses_what_does_not_fit() -> None:
    spec = GemmI8(AVX2, 4, 6)
    with pytest.raises(LoweringError, match=r"\(6, 4\)"):
        pack(spec, np.zeros((6, 4), np.int8), np.ones(4, np.float32))
    with pytest.raises(LoweringError, match="-128"):
        pack(spec, np.full((4, 6), -128, np.int8), np.ones(4, np.float32))


@pytest.mark.parametrize("isa", ARM_ISAS, ids=isa_id)
def test_arm_instructions_mean_what_is_written_beside_them(isa: Isa) -> None:
    # One size: without its instructions this code is slow to compile. tests/arm runs the instructions themselves.
    m, n, k = 3, 9, 33
    codes, weights, a_scale, *rest = codes_and_weights(m, n, k)
    codes[0], weights[0] = 127, -127
    spec = GemmI8(isa.emulate(), n, k, Lead(1), output="acc")
    assert (call(spec, codes, weights, a_scale, *rest) == exact(codes, weights)).all()


def test_pairs_of_rows_are_even() -> None:
    with pytest.raises(LoweringError, match="even number"):
        GemmI8(I8MM, 8, 16, tile=Tile(3, 1))
