"""GEMM kernels of this machine's instruction set against the multiply-add ceiling and onnxruntime, one thread.

    TVM_NUM_THREADS=1 taskset -c 0 python benchmarks/gemm.py [--isa avx2] [--rounds 15]

Each figure is the median over rounds in which all contenders run one after the other (A B C A B C), in thread CPU time, so
that other work on the machine disturbs all of them alike. "ceiling" is a loop of nothing but vpmaddwd and vpaddd (or
vpdpbusd, or FMA) on registers, itself built by TVM.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import tvm
from onnx import TensorProto, helper
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import ALL_ISAS, Isa
from khtst_compile.targets.kernels import gemm_f32, gemm_i8
from khtst_compile.targets.kernels.dot import Dot, dot_of
from khtst_compile.targets.kernels.rows import Lead
from khtst_compile.targets.kernels.vec import fma, small, span, store

SHAPES = [(m, k, n) for m in (16, 128, 1024) for k, n in ((384, 1152), (384, 384), (384, 1536), (1536, 384))]
SHAPES += [(16, 768, 3072), (1, 384, 1536), (4, 384, 1536), (1, 2048, 2048)]
STEPS = 2048
"""Loop turns of the ceiling kernels."""
Run = Callable[[], object]


def build(function: tvm.tirx.PrimFunc, isa: Isa) -> tvm.runtime.Module:
    """Compile one function."""
    module = tvm.IRModule({"f": function.with_attr("global_symbol", "f")})
    return tvm.tirx.build(module, target=tvm.target.Target(isa.tvm_target()))


def tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    """numpy to TVM."""
    return tvm.runtime.tensor(np.ascontiguousarray(array))


def ceiling(isa: Isa, kind: str) -> tuple[Run, float]:
    """A loop of multiply-adds on registers: ("int8" or "float32") -> (run, operations of one run)."""
    lanes, chains = isa.lanes, 12
    dot = dot_of(isa)
    if dot.kind == "pairs":
        dot = Dot("maddwd", lanes, 2, 1, 6, dot.intrinsic)
    dtype = "int32" if kind == "int8" else "float32"
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("f")
        T.func_attr({"global_symbol": "f", "tirx.noalias": True})
        out = T.arg("out", T.buffer((chains * lanes,), dtype))
        weights = T.arg("weights", T.buffer((64,), "int8"))
        acc = [small(lanes, dtype) for _ in range(chains)]
        for i in range(chains):
            store(acc[i], out[span(i * lanes, lanes)], 0)
        w = dot.weights(weights, 0)
        factor = T.Bind(out[span(0, lanes)])
        operand = ("uint8" if dot.kind == "dpbusd" else "int16") + f"x{dot.group * lanes}"
        with T.serial(0, STEPS):
            for i in range(chains):
                old = T.Bind(acc[i][span(0, lanes)])
                # The accumulator itself is the other operand: nothing can be hoisted or shared, and 12 chains hide it.
                if kind == "int8":
                    store(acc[i], dot.accumulate([old], [T.reinterpret(operand, old)] * len(w), [w], False)[0], 0)
                else:
                    store(acc[i], fma(factor, old, factor), 0)
        for i in range(chains):
            store(out, acc[i][span(0, lanes)], i * lanes)
    function = build(builder.get(), isa)["f"]
    args = [tensor(np.zeros(chains * lanes, dtype)), tensor(np.ones(64, np.int8))]
    per_lane = 2 * dot.group if kind == "int8" else 2
    return lambda: function(*args), STEPS * chains * lanes * per_lane


def ours_i8(isa: Isa, m: int, k: int, n: int, act: str = "none") -> Run:
    """Our int8 GEMM with dequantization and bias."""
    rng = np.random.default_rng(0)
    spec = gemm_i8.GemmI8(isa, n, k, Lead(1), act)
    weights = rng.integers(-127, 128, (n, k), dtype=np.int8)
    packed = gemm_i8.pack(spec, weights, np.ones(n, np.float32), np.zeros(n, np.float32))
    codes = gemm_i8.store_codes(isa, rng.integers(-127, 128, (m, k), dtype=np.int8))
    arrays = [codes, np.full(m, 1e-4, np.float32), *packed, np.zeros((m, n), np.float32)]
    args, function = [tensor(a) for a in arrays], build(gemm_i8.prim_func(spec), isa)["f"]
    return lambda: function(*args)


def ours_f32(isa: Isa, m: int, k: int, n: int) -> Run:
    """Our float32 GEMM with bias."""
    rng = np.random.default_rng(0)
    spec = gemm_f32.GemmF32(isa, n, k, Lead(1))
    packed = gemm_f32.pack(spec, rng.standard_normal((n, k), np.float32))
    arrays = [rng.standard_normal((m, k), np.float32), *packed, np.zeros((m, n), np.float32)]
    args, function = [tensor(a) for a in arrays], build(gemm_f32.prim_func(spec), isa)["f"]
    return lambda: function(*args)


def onnx_matmul(op: str, m: int, k: int, n: int) -> Run:
    """onnxruntime on one thread: "MatMulInteger", "DynamicQuantizeMatMul" or "MatMul" (float32)."""
    rng = np.random.default_rng(0)
    float_in = op != "MatMulInteger"
    x_type = TensorProto.FLOAT if float_in else TensorProto.UINT8
    domain = "com.microsoft" if op == "DynamicQuantizeMatMul" else ""
    weights = rng.integers(-127, 128, (k, n), dtype=np.int8)
    inits = [onnx.numpy_helper.from_array(weights.astype(np.float32) if op == "MatMul" else weights, "w")]
    names = ["x", "w"]
    if op == "DynamicQuantizeMatMul":
        inits.append(onnx.numpy_helper.from_array(np.ones(n, np.float32), "s"))
        names.append("s")
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT if float_in else TensorProto.INT32, [m, n])
    x = helper.make_tensor_value_info("x", x_type, [m, k])
    graph = helper.make_graph([helper.make_node(op, names, ["y"], domain=domain)], "g", [x], [y], inits)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    value = rng.standard_normal((m, k), np.float32) if float_in else rng.integers(0, 256, (m, k), dtype=np.uint8)
    return lambda: session.run(None, {"x": value})


def rate(run: Run, operations: float) -> float:
    """Giga-operations per second of CPU time, over about 2 ms."""
    repeats = max(1, int(2e8 / operations))
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return operations * repeats / (time.thread_time() - start) / 1e9


def this_machine() -> Isa:
    """The best instruction set /proc/cpuinfo lists."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    return next(isa for isa in ALL_ISAS if flags.issuperset(isa.cpu_flags))


def table(title: str, contenders: dict[str, Callable[[int, int, int], Run]], top: tuple[Run, float], rounds: int) -> None:
    """Print one row a shape: the ceiling, then each contender's rate and its share of the ceiling of the same round."""
    print(title)
    print(f"{'M,K,N':>15} {'ceiling':>8} " + " ".join(f"{name:>22}" for name in contenders))
    for m, k, n in SHAPES:
        runs = {name: make(m, k, n) for name, make in contenders.items()}
        found: dict[str, list[float]] = {name: [] for name in ("ceiling", *runs)}
        for run in runs.values():
            run()
        for _ in range(rounds):
            found["ceiling"].append(rate(*top))
            for name, run in runs.items():
                found[name].append(rate(run, 2.0 * m * k * n))
        cells = []
        for name in runs:
            share = statistics.median(a / b for a, b in zip(found[name], found["ceiling"], strict=True))
            cells.append(f"{statistics.median(found[name]):13.0f} ({share:5.1%})")
        print(f"{f'{m},{k},{n}':>15} {statistics.median(found['ceiling']):8.0f} " + " ".join(f"{c:>22}" for c in cells))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=[i.name for i in ALL_ISAS])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    isa = next((i for i in ALL_ISAS if i.name == args.isa), None) or this_machine()
    int8: dict[str, Callable[[int, int, int], Run]] = {
        "ours": lambda *s: ours_i8(isa, *s),
        "ours + gelu": lambda *s: ours_i8(isa, *s, act="gelu"),
        "ort MatMulInteger": lambda *s: onnx_matmul("MatMulInteger", *s),
        "ort DynQuantMatMul": lambda *s: onnx_matmul("DynamicQuantizeMatMul", *s),
    }
    table(f"int8, {isa.name}, GOPS", int8, ceiling(isa, "int8"), args.rounds)
    float32: dict[str, Callable[[int, int, int], Run]] = {
        "ours": lambda *s: ours_f32(isa, *s),
        "ort MatMul": lambda *s: onnx_matmul("MatMul", *s),
    }
    table(f"float32, {isa.name}, GFLOPS", float32, ceiling(isa, "float32"), args.rounds)


if __name__ == "__main__":
    main()
