"""What `bench` times: artifacts, and baselines made from the model an artifact came from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact as artifacts
from khtst_compile.api import ONNX_MODEL
from khtst_compile.errors import UsageError
from khtst_compile.quiet import quiet

if TYPE_CHECKING:
    from khtst_compile.program import Program

Array = npt.NDArray[Any]
Run = Callable[[dict[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Engine:
    """name: as in the table; run: name -> array to name -> array; reference: its outputs are what errors are measured against."""

    name: str
    run: Run
    reference: bool = False


def open_engine(path: Path, threads: int) -> Engine:
    """An artifact of kind "library" (TVM) or "onnx" (run by onnxruntime)."""
    folder = artifacts.read(path, kind=("library", "onnx"))
    if folder.kind == "onnx":
        return Engine("khtst onnx (ort)", ort_run(folder.file(ONNX_MODEL), threads))
    from khtst_compile import runtime

    loaded = runtime.load(path, threads=threads)
    return Engine(f"khtst {loaded.variant}", loaded.run)


def baseline_engines(
    manifest: dict[str, Any], baselines: Sequence[str], threads: int, scratch: Path, say: Callable[[str], None]
) -> list[Engine]:
    """The engines of `baselines`. Raises UsageError where the recorded model source cannot be found."""
    if not baselines:
        return []
    program = recapture(manifest)
    engines = []
    if "torch" in baselines:
        engines.append(Engine("torch float32", torch_run(program, threads), reference=True))
    if "ort" in baselines:
        started = time.perf_counter()
        plain, int8 = ort_models(program, scratch)
        engines.append(Engine("onnxruntime float32", ort_run(plain, threads)))
        engines.append(Engine("onnxruntime dynamic int8", ort_run(int8, threads)))
        say(f"baselines: exported and quantized for onnxruntime in {time.perf_counter() - started:.1f} s")
    if manifest["meta"].get("cache", {}).get("dtype", "float32") != "float32":
        engines = [replace(e, run=_on_floats(e.run)) for e in engines]
    return engines


def _on_floats(run: Run) -> Run:
    """A program that keeps keys and values in float32, given those of one that keeps codes."""
    import torch

    from khtst_compile.windows import decoded

    return lambda inputs: run({n: t.numpy() for n, t in decoded({n: torch.from_numpy(a) for n, a in inputs.items()}).items()})


def recapture(manifest: dict[str, Any]) -> Program:
    """The float32 program the artifact was made from, captured again from where the manifest says it came."""
    from khtst_compile.capture import capture
    from khtst_compile.capture.tasks import known_task

    meta = manifest["meta"]
    if "split" in meta:
        raise UsageError(
            f"bench: the artifact is the {meta['split']['part']} of a model that was split; bench it without baselines"
        )
    try:
        return capture(meta["source"], task=known_task(meta), shapes=meta.get("shapes"), seed=int(meta["seed"]))
    except UsageError as error:
        raise UsageError(
            f"bench: the model this artifact was made from cannot be read ({error}); put it back, or bench without baselines"
        ) from error


def torch_run(program: Program, threads: int) -> Run:
    """The captured graph as torch code, run eagerly in float32."""
    import torch

    torch.set_num_threads(threads)
    module, bound, public = program.ep.graph_module, program.tensors(), program.user_inputs()
    order = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    names = {graph: spec.name for graph, spec in zip(public, program.inputs, strict=True)}

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            given = {g: torch.from_numpy(inputs[n]) for g, n in names.items()}
            results = module(*(given[n] if n in given else bound[n] for n in order))
        return {s.name: r.numpy() for s, r in zip(program.outputs, results, strict=True)}

    return run


def ort_models(program: Program, scratch: Path) -> tuple[Path, Path]:
    """The program exported in float32, and onnxruntime's own dynamic quantization of that file (int8 weights, uint8 activations)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from khtst_compile.lower.onnx import export_onnx

    plain, int8 = scratch / "plain.onnx", scratch / "int8.onnx"
    export_onnx(program, plain)
    with quiet("root"):  # onnxruntime advises preprocessing, which fails on models with symbolic shapes
        quantize_dynamic(plain, int8, weight_type=QuantType.QInt8)
    return plain, int8


def ort_run(model: Path, threads: int) -> Run:
    """An onnxruntime session on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        found = session.run(names, inputs)
        return {n: np.asarray(v) for n, v in zip(names, found, strict=True)}

    return run
