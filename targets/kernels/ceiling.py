"""What a machine can do at best: bare multiply-adds on registers, and bare reads of memory."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import Isa

from .dot import Dot, dot_of
from .vec import fma, i32, small, span, store

CHAINS = 12
"""Independent sums: enough to hide the latency of a multiply-add, few enough for 16 registers."""
STEPS = 2048
"""Multiply-adds of a chain in one run."""
STRIDE = 4
"""Vectors read in one turn of the reading loop."""


@dataclass(frozen=True)
class Ceiling:
    """A loop of nothing but multiply-adds.

    isa:       instruction set.
    products:  "int8" (see Dot) or "float32" (fused multiply-add).
    threads:   pieces of parallel work, each the whole loop.
    name:      of the function.
    """

    isa: Isa
    products: str
    threads: int = 1
    name: str = "ceiling"

    @property
    def dot(self) -> Dot:
        """How products of int8 are summed: as in the GEMM kernels, whose ceiling this is."""
        return dot_of(self.isa)

    @property
    def macs(self) -> int:
        """Multiply-adds of one run, all threads together."""
        return STEPS * CHAINS * (self.dot.chain_macs if self.products == "int8" else self.isa.lanes) * self.threads


def prim_func(spec: Ceiling) -> tirx.PrimFunc:
    """Arguments: out (threads * 12 * lanes,) int32 (float32 for that), read and written; weights (64,) int8."""
    lanes, dot = spec.isa.lanes, spec.dot
    dtype = "int32" if spec.products == "int8" else "float32"
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        out = T.arg("out", T.buffer((spec.threads * CHAINS * lanes,), dtype))
        weights = T.arg("weights", T.buffer((64,), "int8"))
        with T.parallel(T.int64(0), T.int64(spec.threads)) as thread:
            first = T.Bind(thread * (CHAINS * lanes))
            acc = [small(lanes, dtype) for _ in range(CHAINS)]
            for i in range(CHAINS):
                store(acc[i], out[span(first + i * lanes, lanes)], 0)
            factor = T.Bind(out[span(first, lanes)])
            with T.serial(0, STEPS):
                for i in range(CHAINS):
                    old = T.Bind(acc[i][span(0, lanes)])
                    # The sum itself is the other operand, so that nothing can be hoisted or shared.
                    int8 = spec.products == "int8"
                    value = dot.chain(old, weights, spec.isa.emulated) if int8 else fma(factor, old, factor)
                    store(acc[i], value, 0)
            for i in range(CHAINS):
                store(out, acc[i][span(0, lanes)], first + i * lanes)
    return builder.get()


@dataclass(frozen=True)
class Reader:
    """A loop that reads every byte once.

    isa:      instruction set.
    vectors:  vectors of `lanes` int32 each thread reads, a multiple of STRIDE.
    threads:  pieces of parallel work, each with a part of memory of its own.
    name:     of the function.
    """

    isa: Isa
    vectors: int
    threads: int = 1
    name: str = "reader"

    @property
    def bytes(self) -> int:
        """Bytes of one run, all threads together."""
        return self.vectors * self.threads * self.isa.lanes * 4


def read_func(spec: Reader) -> tirx.PrimFunc:
    """Arguments: data (threads * vectors * lanes,) int32; out (threads * lanes,) int32, the sums."""
    lanes = spec.isa.lanes
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        data = T.arg("data", T.buffer((spec.threads * spec.vectors * lanes,), "int32"))
        out = T.arg("out", T.buffer((spec.threads * lanes,), "int32"))
        with T.parallel(T.int64(0), T.int64(spec.threads)) as thread:
            acc = [small(lanes, "int32") for _ in range(STRIDE)]
            for a in acc:
                store(a, i32(0, lanes), 0)
            with T.serial(T.int64(0), T.int64(spec.vectors // STRIDE)) as turn:
                start = T.Bind((thread * spec.vectors + turn * STRIDE) * lanes)
                for i, a in enumerate(acc):
                    store(a, a[span(0, lanes)] + data[span(start + i * lanes, lanes)], 0)
            total = acc[0][span(0, lanes)]
            for a in acc[1:]:
                total = total + a[span(0, lanes)]
            store(out, total, thread * lanes)
    return builder.get()
