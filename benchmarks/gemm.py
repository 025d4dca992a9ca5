"""GEMM kernels of this machine's instruction set against the multiply-add ceiling and onnxruntime, one thread.

    TVM_NUM_THREADS=1 taskset -c 0 python benchmarks/gemm.py [--isa avx2] [--rounds 15]

Each figure is the median over rounds in which all contenders run one after the other (A B C A B C), in thread CPU time, so
that other work on the machine disturbs all of them alike. "ceiling" is a loop of nothing but the multiply-adds of the GEMM
kernels on registers (targets/kernels/ceiling.py).
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
from onnx import TensorProto, helper

from khtst_compile.targets.isa import X86_ISAS, Isa
from khtst_compile.targets.kernels import ceiling, gemm_f32, gemm_i8
from khtst_compile.targets.kernels.rows import Lead
from khtst_compile.targets.single import Run, bind, compile_alone

SHAPES = [(m, k, n) for m in (16, 128, 1024) for k, n in ((384, 1152), (384, 384), (384, 1536), (1536, 384))]
SHAPES += [(16, 768, 3072), (1, 384, 1536), (4, 384, 1536), (1, 2048, 2048)]


def peak(isa: Isa, products: str) -> tuple[Run, float]:
    """A loop of multiply-adds on registers: ("int8" or "float32") -> (run, operations of one run)."""
    spec = ceiling.Ceiling(isa, products)
    function = compile_alone({spec.name: ceiling.prim_func(spec)}, isa)[spec.name]
    out = np.zeros(ceiling.CHAINS * isa.lanes, np.int32 if products == "int8" else np.float32)
    return bind(function, [out, np.ones(64, np.int8)]), 2.0 * spec.macs


def ours_i8(isa: Isa, m: int, k: int, n: int, act: str = "none") -> Run:
    """Our int8 GEMM with dequantization and bias."""
    rng = np.random.default_rng(0)
    spec = gemm_i8.GemmI8(isa, n, k, Lead(1), act)
    weights = rng.integers(-127, 128, (n, k), dtype=np.int8)
    packed = gemm_i8.pack(spec, weights, np.ones(n, np.float32), np.zeros(n, np.float32))
    codes = gemm_i8.store_codes(isa, rng.integers(-127, 128, (m, k), dtype=np.int8))
    arrays = [codes, np.full(m, 1e-4, np.float32), *packed, np.zeros((m, n), np.float32)]
    return bind(compile_alone({"f": gemm_i8.prim_func(spec)}, isa)["f"], arrays)


def ours_f32(isa: Isa, m: int, k: int, n: int) -> Run:
    """Our float32 GEMM with bias."""
    rng = np.random.default_rng(0)
    spec = gemm_f32.GemmF32(isa, n, k, Lead(1))
    packed = gemm_f32.pack(spec, rng.standard_normal((n, k), np.float32))
    arrays = [rng.standard_normal((m, k), np.float32), *packed, np.zeros((m, n), np.float32)]
    return bind(compile_alone({"f": gemm_f32.prim_func(spec)}, isa)["f"], arrays)


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
    return next(isa for isa in X86_ISAS if flags.issuperset(isa.cpu_flags))


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
    parser.add_argument("--isa", choices=[i.name for i in X86_ISAS])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    isa = next((i for i in X86_ISAS if i.name == args.isa), None) or this_machine()
    int8: dict[str, Callable[[int, int, int], Run]] = {
        "ours": lambda *s: ours_i8(isa, *s),
        "ours + gelu": lambda *s: ours_i8(isa, *s, act="gelu"),
        "ort MatMulInteger": lambda *s: onnx_matmul("MatMulInteger", *s),
        "ort DynQuantMatMul": lambda *s: onnx_matmul("DynamicQuantizeMatMul", *s),
    }
    table(f"int8, {isa.name}, GOPS", int8, peak(isa, "int8"), args.rounds)
    float32: dict[str, Callable[[int, int, int], Run]] = {
        "ours": lambda *s: ours_f32(isa, *s),
        "ort MatMul": lambda *s: onnx_matmul("MatMul", *s),
    }
    table(f"float32, {isa.name}, GFLOPS", float32, peak(isa, "float32"), args.rounds)


if __name__ == "__main__":
    main()
