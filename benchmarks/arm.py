"""Instructions and innermost loops of ARM builds, beside onnxruntime and XNNPACK, without an ARM machine.

    python benchmarks/arm.py --cache ~/.cache/khtst-arm [--quantized ART] [--only minilm,shapes] [--peers ~/.cache/khtst-peers]

Writes arm.json and arm.md to benchmarks/results (arm_report.py). Every program runs under qemu's user emulation with a plugin that counts
instructions between marks around each call (arm_count.c); llvm-mca-19 then models the loop in which each kernel spends most of them. What
such figures say, and what they do not, is in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: see khtst_compile/cli
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.typing as npt

from benchmarks import arm_counts, arm_loops, arm_report, arm_tools
from benchmarks.arm_tools import CPUS, Cpu, Tools
from benchmarks.x86_peers import ROOT, environments, say, start
from khtst_compile import api, artifact, cpu
from khtst_compile.benchmark import golden_inputs, make_inputs
from khtst_compile.demo import minilm, retrieval_data
from khtst_compile.parity import relative_error_db
from khtst_compile.signature import TensorSpec

PARTS = ("minilm", "shapes")
SHAPE = (1, 128)
"""Of MiniLM: batch, tokens."""
LINEARS = ((64, 192, 256), (128, 384, 384), (128, 384, 1536))
"""Rows, input and output features of linear layers alone."""
CALLS = 5
"""Of each engine."""
OURS, OURS_FP32 = arm_report.OURS, arm_report.OURS_FP32
ORT, ORT_FP32, XNNPACK = arm_report.ORT, arm_report.ORT_FP32, arm_report.XNNPACK
MODELED = {"arm-neon": ("cortex-a53", "cortex-a72", "neoverse-n1", "neoverse-v1"), "arm-dotprod": ("neoverse-n1", "neoverse-v1")}
"""Variant -> the processors whose models its loops go through; of others the one they were counted on."""
XNNPACK_WORKER = "executorch xnnpack int8"
Inputs = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Task:
    """A model to call. name: of the files about it; ours, ours_fp32: artifacts; onnx, onnx_int8, nothing: ONNX files; program: of
    ExecuTorch, or why there is none; macs: multiply-adds of its linear layers."""

    name: str
    inputs: Inputs
    ours: Path
    ours_fp32: Path
    onnx: Path
    onnx_int8: Path
    program: Path | str
    macs: int


def main() -> None:
    options = _options()
    tools = arm_tools.prepare(options.cache.absolute() / "arm", say)
    bench = Bench(options, tools)
    result: dict[str, Any] = {
        "shape": "x".join(map(str, SHAPE)),
        "packages": [*arm_tools.PACKAGES, arm_tools.EXECUTORCH],
        "rows": [],
    }
    for part in options.only.split(",") if options.only else PARTS:
        tasks = [bench.minilm()] if part == "minilm" else [bench.linear(*sizes) for sizes in LINEARS]
        for name in options.cpus.split(","):
            tools.pretend(CPUS[name])
            with ThreadPoolExecutor(cpu.usable_cores()) as pool:  # counts do not depend on what else runs
                for row in pool.map(lambda job, n=name: bench.measure(n, *job), [(t, e) for t in tasks for e in bench.engines]):
                    result["rows"].append(row)
            say(f"{part}: counted on {name}")
    bench.compare(result["rows"])
    options.output.mkdir(parents=True, exist_ok=True)
    result["rows"] = _kept(options.output / "arm.json", result) + result["rows"]
    (options.output / "arm.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.output / "arm.md").write_text(arm_report.render(result), encoding="utf-8")
    print(arm_report.render(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder for the ARM system, the peers' wheels and the prepared models"
    )
    parser.add_argument(
        "--peers", type=Path, help="that of x86.py, whose ExecuTorch makes XNNPACK's programs; default: in --cache"
    )
    parser.add_argument("--quantized", type=Path, help="a quantized MiniLM artifact to lower instead of quantizing here")
    parser.add_argument("--keep", action="store_true", help="take the artifacts of the last run instead of lowering again")
    parser.add_argument("--only", default="", help=f"parts to run, by commas, of {', '.join(PARTS)}; default: all")
    parser.add_argument("--cpus", default=",".join(CPUS), help=f"by commas, of {', '.join(CPUS)}; default: all")
    parser.add_argument("--engines", default="", help="by commas, beginnings of names; default: all")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for name, known in (("only", PARTS), ("cpus", CPUS)):
        if unknown := [w for w in getattr(options, name).split(",") if w and w not in known]:
            parser.error(f"--{name}: {unknown[0]!r} is not known; known: {', '.join(known)}")
    if options.quantized is not None and not options.quantized.is_dir():
        parser.error(f"--quantized: {options.quantized} is no folder")
    return options


def _kept(file: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run about what was not measured now: unlike times, counts of two runs can stand side by side."""
    if not file.exists():
        return []
    before, now = json.loads(file.read_text(encoding="utf-8")), {(r["task"], r["cpu"], r["engine"]) for r in result["rows"]}
    same = before["packages"] == result["packages"]
    return [r for r in before["rows"] if same and (r["task"], r["cpu"], r["engine"]) not in now]


class Bench:
    """Prepared models, and how an engine is measured on one of them."""

    def __init__(self, options: argparse.Namespace, tools: Tools):
        self.options, self.tools = options, tools
        self.work = options.cache.absolute() / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        known: dict[str, Callable[[Cpu, Task, Path], dict[str, Any]]] = {
            OURS: self._ours,
            OURS_FP32: self._ours_fp32,
            ORT: self._ort,
            ORT_FP32: self._ort_fp32,
            XNNPACK: self._xnnpack,
        }
        begins = tuple(options.engines.split(","))
        self.engines = {name: run for name, run in known.items() if not options.engines or name.startswith(begins)}
        self.pythons, self.reasons = {}, {"executorch": "not among --engines"}
        if XNNPACK in self.engines:
            self.pythons, self.reasons = environments(
                (options.peers or options.cache / "peers").absolute(), {"executorch"}, False
            )

    # What is measured.

    def minilm(self) -> Task:
        """MiniLM-L6 on text, without padding."""
        work, model, data = self.work, minilm(), retrieval_data(None)
        quantized, fp32 = self.options.quantized or work / "minilm", work / "minilm_fp32"
        for folder, recipe in ((quantized, None), (fp32, "fp32")):
            if not folder.exists():
                api.quantize(model, folder, calib=data, recipe=recipe, report=say)
        ours, ours_fp32 = self._lowered(quantized, "arm"), self._lowered(fp32, "arm-neon")
        onnx = self._onnx(fp32)
        folder = artifact.read(ours)
        specs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
        golden = golden_inputs(folder)
        ids = np.resize(golden["input_ids"][golden["attention_mask"].astype(bool)], (1, SHAPE[1]))
        long = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        inputs = make_inputs(specs, dict(zip(folder.manifest["axes"], SHAPE, strict=True)), long)
        np.savez(work / "minilm.npz", **inputs)  # type: ignore[arg-type]
        link = work / "model"
        link.unlink(missing_ok=True)
        link.symlink_to(model.absolute())
        macs = SHAPE[0] * SHAPE[1] * sum(w.size for w in _int8_weights(quantized))
        return Task("minilm", inputs, ours, ours_fp32, onnx, _dynamic(onnx), self._minilm_program(), macs)

    def linear(self, rows: int, k: int, n: int) -> Task:
        """A linear layer alone, from float32 to float32: with quantizing its input, as every engine has to. Its weights are normal, as
        those of trained layers nearly are: which products fit int16 depends on them."""
        import torch

        name = f"linear_{rows}x{k}x{n}"
        work, rng = self.work, np.random.default_rng(0)
        torch.manual_seed(0)
        layer = torch.nn.Linear(k, n).eval()
        torch.nn.init.normal_(layer.weight, std=k**-0.5)
        source = work / f"{name}.pt2"
        batch = torch.export.Dim("batch", min=1, max=4096)
        torch.export.save(torch.export.export(layer, (torch.randn(rows, k),), dynamic_shapes=({0: batch},)), source)
        quantized, fp32 = work / name, work / f"{name}_fp32"
        for folder, recipe in ((quantized, "w8a8"), (fp32, "fp32")):
            if not folder.exists():
                api.quantize(source, folder, random=True, recipe=recipe, report=say)
        ours, onnx = self._lowered(quantized, "arm"), self._onnx(fp32)
        (entry,) = artifact.read(ours).manifest["inputs"]
        inputs = {entry["name"]: rng.standard_normal((rows, k), np.float32)}
        np.savez(work / f"{name}.npz", **inputs)  # type: ignore[arg-type]
        weights = work / f"{name}_weights.npz"
        np.savez(weights, **{k: v.detach().numpy() for k, v in layer.state_dict().items()})
        program = work / f"{name}.pte"
        made: Path | str = program
        if not program.exists():
            made = self._exported(["arm_export.py", str(weights), str(rows), str(program)]) or program
        fp32_library = self._lowered(fp32, "arm-neon")
        return Task(name, inputs, ours, fp32_library, onnx, _dynamic(onnx), made, rows * k * n)

    def _lowered(self, quantized: Path, target: str) -> Path:
        library = self.work / f"{quantized.name}-{target}"
        if not (self.options.keep and library.exists()):
            api.lower(quantized, library, target=target, report=say)
        return library

    def _onnx(self, fp32: Path) -> Path:
        file = fp32.with_suffix(".onnx")
        if not file.exists():
            api.export(fp32, file, report=say)
        return file

    def _minilm_program(self) -> Path | str:
        program = self.work / f"executorch_{SHAPE[0]}x{SHAPE[1]}.pte"
        if not program.exists():
            engine = start(XNNPACK_WORKER, self.pythons, self.reasons, self.work, 1)
            engine.ask({"inputs": str(self.work / "minilm.npz")})
            engine.ask({"output": str(self.work / "minilm_xnnpack.npy")})
            engine.close()
            if engine.failed is not None:
                return engine.failed
        return program

    def _exported(self, command: Sequence[str]) -> str | None:
        """Run a script of this folder in ExecuTorch's environment; returns why it failed."""
        import subprocess

        if "executorch" not in self.pythons:
            return self.reasons["executorch"]
        script = [str(self.pythons["executorch"]), str(Path(__file__).with_name(command[0])), *command[1:]]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else None

    # How it is measured.

    def measure(self, cpu_name: str, task: Task, engine: str) -> dict[str, Any]:
        """One engine on one task and processor: what is known of it, or why it failed."""
        known = {"task": task.name, "cpu": cpu_name, "engine": engine, "macs": task.macs}
        place = self.work / f"{task.name}-{cpu_name}-{engine.replace(' ', '_')}"
        place.mkdir(exist_ok=True)
        try:
            return {**known, **self.engines[engine](CPUS[cpu_name], task, place)}
        except (RuntimeError, ValueError) as error:
            return {**known, "failed": str(error)}

    def _ours(self, processor: Cpu, task: Task, place: Path) -> dict[str, Any]:
        return self._library(processor, task.ours, processor.variant, task, place)

    def _ours_fp32(self, processor: Cpu, task: Task, place: Path) -> dict[str, Any]:
        return self._library(processor, task.ours_fp32, "arm-neon", task, place)

    def _library(self, processor: Cpu, library: Path, variant: str, task: Task, place: Path) -> dict[str, Any]:
        folder = artifact.read(library)
        output, maps = place / "output", place / "maps"
        given = [text for _, text in _raw(task.inputs, place)]
        command = [self.tools.call, library, self.tools.libraries, variant, str(CALLS), output, maps, *given]
        counts = arm_counts.parse(self.tools.count(processor, command, place / "counts"))
        file = folder.file(next(v for v in folder.manifest["target"]["variants"] if v["name"] == variant)["library"])
        mapped = arm_counts.mappings(maps.read_text(encoding="utf-8"))
        np.save(place / "output.npy", np.fromfile(output, np.float32))
        code = arm_counts.symbols(file)
        times = arm_counts.executed(counts.blocks, mapped, file, code)
        cpus = MODELED.get(variant, ("neoverse-v1",))
        return {
            "variant": variant,
            "instructions": arm_counts.least(arm_counts.of_calls(counts.intervals)),
            "kinds": arm_counts.kinds(counts.blocks),
            "kernels": _kernels(file, arm_counts.by_function(times, code), times, code, cpus),
        }

    def _ort(self, processor: Cpu, task: Task, place: Path) -> dict[str, Any]:
        return self._onnxruntime(processor, task.onnx_int8, task, place)

    def _ort_fp32(self, processor: Cpu, task: Task, place: Path) -> dict[str, Any]:
        return self._onnxruntime(processor, task.onnx, task, place)

    def _onnxruntime(self, processor: Cpu, model: Path, task: Task, place: Path) -> dict[str, Any]:
        for name in ("python", "onnxruntime"):
            if name in self.tools.lacking:
                raise RuntimeError(self.tools.lacking[name])
        tools, nothing = self.tools, place / "nothing.onnx"
        _nothing(model, nothing)
        worker = ROOT / "benchmarks" / "arm_worker.py"
        command = [
            tools.python(),
            worker,
            tools.mark,
            nothing,
            model,
            self.work / f"{task.name}.npz",
            place / "output.npy",
            str(CALLS),
        ]
        python = (f"PYTHONPATH={tools.site}", f"PYTHONHOME={tools.root / 'usr'}", "PYTHONDONTWRITEBYTECODE=1")
        counts = arm_counts.parse(tools.count(processor, command, place / "counts", python))
        calls = arm_counts.of_calls(counts.intervals)
        around = min(calls[1:CALLS])  # some ten thousand: what they differ by does not show in a model
        return {
            "instructions": arm_counts.least(calls[CALLS:]) - around,
            "around": around,
            "kinds": arm_counts.kinds(counts.blocks),
        }

    def _xnnpack(self, processor: Cpu, task: Task, place: Path) -> dict[str, Any]:
        if self.tools.xnnpack is None:
            raise RuntimeError(self.tools.lacking["xnnpack"])
        if isinstance(task.program, str):
            raise RuntimeError(task.program)
        given = [f"{'f' if dtype == 'float32' else 'l'}:{text}" for dtype, text in _raw(task.inputs, place)]
        command = [self.tools.xnnpack, task.program, str(CALLS), place / "output", *given]
        counts = arm_counts.parse(self.tools.count(processor, command, place / "counts"))
        np.save(place / "output.npy", np.fromfile(place / "output", np.float32))
        return {
            "instructions": arm_counts.least(arm_counts.of_calls(counts.intervals)),
            "kinds": arm_counts.kinds(counts.blocks),
        }

    def compare(self, rows: list[dict[str, Any]]) -> None:
        """Note how far each output is from onnxruntime's float32, in dB, and that ours are the same bytes on every processor."""
        ours: dict[tuple[str, str], bytes] = {}
        for row in rows:
            if "failed" in row:
                continue
            output = self._output(row)
            reference = next((r for r in rows if (r["task"], r["engine"]) == (row["task"], ORT_FP32) and "failed" not in r), None)
            if reference is not None and row["engine"] != ORT_FP32:
                row["error_db"] = relative_error_db(output, self._output(reference))
            if row["engine"] in (OURS, OURS_FP32):
                first = ours.setdefault((row["task"], row["engine"]), output.tobytes())
                if first != output.tobytes():
                    raise SystemExit(
                        f"{row['task']}: {row['engine']} gives other bytes on {row['cpu']}; needed: the same on every processor"
                    )

    def _output(self, row: dict[str, Any]) -> npt.NDArray[np.float32]:
        place = self.work / f"{row['task']}-{row['cpu']}-{row['engine'].replace(' ', '_')}"
        return np.asarray(np.load(place / "output.npy"), np.float32).reshape(-1)


def _kernels(
    file: Path, found: dict[str, int], times: Any, code: arm_counts.Library, cpus: Sequence[str]
) -> list[dict[str, Any]]:
    """Name, instructions and hottest loop of each function that took a thousandth or more of all instructions."""
    listed, total = arm_loops.instructions(arm_loops.disassemble(file)), sum(found.values())
    rows = []
    for name, count in found.items():
        if count < 1e-3 * total:
            continue
        own = {a: text for a, text in listed.items() if code.function(a) == name}
        loops = [loop for loop in arm_loops.innermost(own, times) if loop.turns]
        row: dict[str, Any] = {"name": name.removeprefix("__tvm_ffi_").removesuffix("_compute_"), "instructions": count}
        if loops:
            loop = loops[0]
            models = {cpu: arm_loops.model(loop.body, cpu) for cpu in cpus}
            row["loop"] = {
                "instructions": len(loop.body),
                "share": loop.instructions / count,
                "macs": loop.macs,
                "spills": loop.spills,
                "models": {cpu: {"cycles": m.cycles, "bound": m.bound, "share": m.share} for cpu, m in models.items()},
            }
        rows.append(row)
    return rows


def _raw(inputs: Inputs, place: Path) -> list[tuple[str, str]]:
    """Write arrays as raw data: (dtype, SHAPE=FILE) of each."""
    found = []
    for name, array in inputs.items():
        (place / name).write_bytes(np.ascontiguousarray(array).tobytes())
        found.append((array.dtype.name, f"{'x'.join(map(str, array.shape))}={place / name}"))
    return found


def _dynamic(onnx: Path) -> Path:
    """onnxruntime's own dynamic quantization of a float32 file: int8 weights, uint8 activations."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = onnx.with_name(f"{onnx.stem}_int8.onnx")
    if not target.exists():
        logging.getLogger().setLevel(logging.ERROR)
        partial = target.with_suffix(".partial")
        quantize_dynamic(onnx, partial, weight_type=QuantType.QInt8)
        partial.replace(target)
    return target


def _nothing(model: Path, target: Path) -> None:
    """A model with the same inputs that computes nothing of them."""
    import onnx
    from onnx import TensorProto, helper

    inputs = onnx.load(model, load_external_data=False).graph.input
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
    node = helper.make_node("Constant", [], ["y"], value=value)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    made = helper.make_model(
        helper.make_graph([node], "nothing", list(inputs), [output]), opset_imports=[helper.make_opsetid("", 17)]
    )
    made.ir_version = 9
    onnx.save(made, target)


def _int8_weights(quantized: Path) -> list[Any]:
    import torch

    tensors = api.load_program(artifact.read(quantized, kind="quantized")).tensors()
    return [np.empty(tuple(t.shape), np.int8) for t in tensors.values() if t.dtype == torch.int8 and t.ndim == 2]


if __name__ == "__main__":
    main()
