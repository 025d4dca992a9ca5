"""A quantized program into the files of a "library" artifact, every kernel having been compared with torch."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from khtst_compile import artifact, cpu
from khtst_compile.lower.build import build, export_library
from khtst_compile.lower.digest import digest
from khtst_compile.lower.relax import Graph, Lowered, kernel_graph, to_relax
from khtst_compile.lower.replay import replay
from khtst_compile.lower.tune import Record, tiles, tune
from khtst_compile.parity import ParityReport
from khtst_compile.program import Program
from khtst_compile.progress import Progress
from khtst_compile.runtime import LIBRARY, WEIGHTS, Engine, logical
from khtst_compile.targets import table
from khtst_compile.targets.contract import Target

Array = npt.NDArray[Any]


def compile_program(
    program: Program,
    source: artifact.Folder,
    folder: Path,
    name: str,
    say: Callable[[str], None],
    bar: Progress,
    tuning: Sequence[Record] = (),
    tune_s: float = 0.0,
) -> tuple[dict[str, Any], ParityReport]:
    """Write library, weights and golden values into `folder`; returns the manifest's fields and the kernel-by-kernel report.

    tuning: choices of tiles already measured; tune_s: seconds to measure more in.
    Raises OverBudget where a kernel does not compute what its operator means.
    """
    target = table.target(name)
    graph = kernel_graph(program)
    bar.advance(note="fused")
    records = tune(graph.program, target, tune_s, tuning, say) if tune_s else list(tuning)
    target = target.tuned(tiles(records))
    started = time.perf_counter()
    lowered = _library(graph, target, folder / LIBRARY)
    weights = lowered.weights
    built_s = time.perf_counter() - started
    bar.advance(note="compiled")
    entries = artifact.write_weights(folder / WEIGHTS, weights)
    say(f"built {target.name} in {built_s:.1f} s: {', '.join(f'{k} {v}' for k, v in graph.fused.items() if v)}")
    golden = source.arrays(artifact.GOLDEN)
    inputs = {k.removeprefix("in/"): v for k, v in golden.items() if k.startswith("in/")}
    runner, results = _golden_run(graph, target, folder, weights, [inputs[s.name] for s in program.inputs])
    bar.advance(note="run")
    outputs, taps = results[: len(program.outputs)], results[len(program.outputs) :]
    report = ParityReport(tuple(replay(graph, outputs, taps, {k: torch.from_numpy(v) for k, v in inputs.items()})))
    report.require(f"lower for {target.name}")
    golden |= {f"lowered/{s.name}": v for s, v in zip(program.outputs, outputs, strict=True)}
    np.savez(folder / artifact.GOLDEN, **golden)  # type: ignore[arg-type]
    bar.advance(note="compared")
    say(f"compared {len(report.rows)} kernel outputs with torch on {runner}: all within budget")
    kept = ("source", "recipe", "passes", "inputs", "outputs", "axes", "ranges", "meta")
    manifest = {k: source.manifest[k] for k in kept}
    return {
        "kind": "library",
        **manifest,
        "target": _describe(target),
        "weights": entries,
        "taps": [{**dataclasses.asdict(t), "sha256": digest(v)} for t, v in zip(graph.taps, taps, strict=True)],
        "kernels": lowered.macs,
        "tuning": [r.to_json() for r in records],
        "program": [dataclasses.asdict(c) for c in lowered.calls],
        "golden": {**source.manifest["golden"], "run_on": runner},
    }, report


def _library(graph: Graph, target: Target, path: Path) -> Lowered:
    lowered = to_relax(graph, target)
    export_library(build(lowered.module, target), path)
    return lowered


def _golden_run(graph: Graph, target: Target, folder: Path, weights: list[Array], inputs: list[Array]) -> tuple[str, list[Array]]:
    """What `taps` returns on the golden inputs, codes as int8; from another variant where this machine cannot run the target."""
    if target.unavailable() is None:
        return target.name, _run(graph, target, folder / LIBRARY, weights, inputs)
    stand_in = table.target("x86")
    with tempfile.TemporaryDirectory() as temporary:
        library = Path(temporary) / LIBRARY
        weights = _library(graph, stand_in, library).weights
        return stand_in.name, _run(graph, stand_in, library, weights, inputs)


def _run(graph: Graph, target: Target, library: Path, weights: list[Array], inputs: list[Array]) -> list[Array]:
    results = Engine(library, [np.array(w) for w in weights], cpu.usable_cores()).call("taps", inputs)
    count = len(graph.program.outputs)
    offset = target.isa.codes_offset
    taps = [logical(t.kind, t.features, r, offset) for t, r in zip(graph.taps, results[count:], strict=True)]
    return [*results[:count], *taps]


def _describe(target: Target) -> dict[str, Any]:
    chip = target.tvm_target()
    return {
        "name": target.name,
        "isa": target.isa.name,
        "triple": chip["mtriple"],
        "mcpu": chip["mcpu"],
        "mattr": chip.get("mattr", []),
        "cpu_flags": list(target.isa.cpu_flags),
        "codes_dtype": target.isa.codes_dtype,
        "codes_offset": target.isa.codes_offset,
    }
