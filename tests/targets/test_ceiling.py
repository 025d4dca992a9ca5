"""The kernels that measure a machine do the work they are counted for."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from khtst_compile.exact import fma_reference
from khtst_compile.roofline import LEVELS, Roofline, measure
from khtst_compile.targets.isa import AVX2, X86_ISAS, Isa
from khtst_compile.targets.kernels.ceiling import CHAINS, STEPS, Ceiling, Reader, prim_func, read_func
from khtst_compile.targets.single import compile_alone, tensors
from tests.targets.gemm_tools import RUNNABLE, hot_loops, isa_id


@pytest.mark.parametrize("isa", RUNNABLE, ids=isa_id)
@pytest.mark.parametrize("threads", [1, 3])
def test_reads_everything_once(isa: Isa, threads: int) -> None:
    spec = Reader(isa, 40, threads)
    data = np.random.default_rng(0).integers(-1000, 1000, spec.bytes // 4, dtype=np.int32)
    given = tensors([data, np.zeros(threads * isa.lanes, np.int32)])
    compile_alone({"reader": read_func(spec)}, isa)["reader"](*given)
    want = data.reshape(threads, 40, isa.lanes).sum(1).reshape(-1)
    assert np.array_equal(given[1].numpy(), want)


def test_every_chain_multiplies_and_adds_at_every_step() -> None:
    spec = Ceiling(AVX2, "float32")
    start = np.linspace(0.5, 0.9, CHAINS * AVX2.lanes).astype(np.float32)
    out, weights = tensors([start, np.ones(64, np.int8)])
    compile_alone({"ceiling": prim_func(spec)}, AVX2)["ceiling"](out, weights)
    factor, want = np.tile(start[: AVX2.lanes], CHAINS), start
    for _ in range(STEPS):
        want = fma_reference(factor, want, factor)
    assert np.array_equal(out.numpy(), want)


@pytest.mark.parametrize("isa", X86_ISAS, ids=isa_id)
@pytest.mark.parametrize("products", ["int8", "float32"])
def test_the_loop_holds_the_instructions_that_are_counted(isa: Isa, products: str) -> None:
    spec = Ceiling(isa, products)
    module = tvm.IRModule({"ceiling": prim_func(spec)})
    text = str(tvm.tirx.build(module, target=tvm.target.Target(isa.tvm_target())).inspect_source("asm"))
    word = "vfmadd" if products == "float32" else ("vpdpbusd" if spec.dot.kind == "dpbusd" else "vpmaddwd")
    (loop,) = hot_loops(text, word)
    unrolled = sum(word in line for line in loop) / CHAINS
    assert unrolled >= 1 and unrolled == int(unrolled)
    assert not [line for line in loop if "%rsp" in line]
    per_lane = {"dpbusd": 4, "pairs": 4, "maddwd": 2}[spec.dot.kind] if products == "int8" else 1
    assert spec.macs == STEPS * CHAINS * isa.lanes * per_lane


def test_measured_figures_are_possible() -> None:
    found = measure(AVX2, 1)
    # AVX2 cores run at 1 to 6 GHz, do at most two FMA of 8 lanes and 64 products of int8 in a cycle.
    assert 1e9 < found.float32_macs < 6e9 * 16 and 1e9 < found.int8_macs < 6e9 * 64
    assert [size for size, _ in found.reads] == list(LEVELS)
    assert all(1e8 < rate < 6e9 * 64 for _, rate in found.reads)


def test_least_time_takes_the_rate_of_what_is_walked_through() -> None:
    peak = Roofline("avx2", 1, 100.0, 10.0, ((8, 4.0), (64, 2.0)))
    assert (peak.macs("int8"), peak.macs("float32")) == (100.0, 10.0)
    assert [peak.read_rate(n) for n in (0, 8, 9, 64, 65)] == [4.0, 4.0, 2.0, 2.0, 2.0]
