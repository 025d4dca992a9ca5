"""A quantized program into the files of a "library" artifact, every kernel having been compared with torch."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from khtst_compile import artifact, cpu
from khtst_compile.arrays import write_arrays
from khtst_compile.checks import require_space
from khtst_compile.errors import EnvironmentProblem, OverBudget
from khtst_compile.lower.digest import digest
from khtst_compile.lower.independent import independent_axis
from khtst_compile.lower.relax import Graph, kernel_graph
from khtst_compile.lower.replay import replay
from khtst_compile.lower.variants import Helpers, build_variant, library_name, merge
from khtst_compile.parity import ParityReport, Row
from khtst_compile.program import Program
from khtst_compile.progress import Progress
from khtst_compile.runtime import WEIGHTS, Engine, logical
from khtst_compile.targets import table
from khtst_compile.targets.contract import Target

Array = npt.NDArray[Any]
CODE_BYTES = 16_000_000  # object files and a library; those of a transformer take a tenth of it
ERROR_BUDGET = 3.0  # two int8 programs that differ in single codes have errors of one size


def compile_program(
    program: Program,
    source: artifact.Folder,
    folder: Path,
    name: str,
    helpers: Helpers,
    say: Callable[[str], None],
    bar: Progress,
) -> tuple[dict[str, Any], ParityReport]:
    """Write libraries, weights and golden values into `folder`; returns the manifest's fields and the kernel-by-kernel report.

    helpers: build what is not theirs. Raises OverBudget where a kernel does not compute what its operator means, or where two
    instruction sets differ in a bit.
    """
    require_space(Path(tempfile.gettempdir()), CODE_BYTES, "linking (in the temporary folder, which TMPDIR names)")
    require_space(folder, CODE_BYTES + sum(t.nbytes for t in program.tensors().values()), "a library with its weights")
    graph = kernel_graph(program)
    bar.advance(note="fused")
    arrays: dict[str, Array] = {}
    built = {t.name: build_variant(graph, t, folder, arrays, helpers.records) for t in helpers.own}
    built |= {b.target: b for b in helpers.results(graph, folder, arrays)}
    targets = table.variants(name, helpers.triple)
    libraries = [built[t.name] for t in targets]
    bar.advance(note="compiled")
    stored, arguments = merge(libraries, arrays)
    entries = artifact.write_weights(folder / WEIGHTS, stored)
    times = ", ".join(f"{b.target} in {b.build_s:.1f} s" for b in libraries)
    say(f"built {times}: {', '.join(f'{k} {v}' for k, v in graph.fused.items() if v)}")
    described = [{**_describe(t), "build_s": b.build_s, **a} for t, b, a in zip(targets, libraries, arguments, strict=True)]
    golden = source.arrays(artifact.GOLDEN)
    inputs = {k.removeprefix("in/"): v for k, v in golden.items() if k.startswith("in/")}
    runner, results = _golden_run(graph, targets, described, stored, folder, [inputs[s.name] for s in program.inputs])
    bar.advance(note="run")
    outputs, taps = results[: len(program.outputs)], results[len(program.outputs) :]
    rows = replay(graph, outputs, taps, {k: torch.from_numpy(v) for k, v in inputs.items()})
    judged = [
        (s.name, v) for s, v in zip(program.outputs, outputs, strict=True) if v.dtype.kind == "f" and f"fp32/{s.name}" in golden
    ]
    whole = [_against_unfused(name, value, golden) for name, value in judged]
    report = ParityReport((*rows, *whole))
    report.require(f"lower for {name}")
    golden |= {f"lowered/{s.name}": v for s, v in zip(program.outputs, outputs, strict=True)}
    write_arrays(folder / artifact.GOLDEN, golden)
    bar.advance(note="compared")
    say(f"compared {len(report.rows)} kernel outputs with torch on {runner}: all within budget")
    kept = ("source", "recipe", "passes", "inputs", "outputs", "axes", "ranges", "meta")
    manifest = {k: source.manifest[k] for k in kept}
    return {
        "kind": "library",
        **manifest,
        "target": {"name": name, "variants": described},
        "weights": entries,
        "taps": [{**dataclasses.asdict(t), "sha256": digest(v)} for t, v in zip(graph.taps, taps, strict=True)],
        "kernels": libraries[0].macs,
        "tuning": [r.to_json() for r in helpers.records],
        "program": libraries[0].calls,
        "independent": independent_axis(graph.program),
        "golden": {**source.manifest["golden"], "run_on": runner},
    }, report


def _against_unfused(name: str, lowered: Array, golden: dict[str, Array]) -> Row:
    """Kernels are compared with the fused graph; that the fused graph is the quantized program shows only in its outputs.

    A cache handed to the next call is no result and has no golden value.
    """
    exact, quantized = golden[f"fp32/{name}"].astype(np.float64), golden[f"quantized/{name}"].astype(np.float64)
    seen = np.isfinite(exact) & np.isfinite(quantized)
    size = float(np.linalg.norm(exact[seen]))
    ours, theirs = (float(np.linalg.norm((v - exact)[seen])) for v in (lowered.astype(np.float64), quantized))
    return Row(
        "output", name, "error against float32 over the quantized program's", ours / (theirs + 1e-4 * size + 1e-30), ERROR_BUDGET,
        "both round the same weights and activations; what is fused wrongly is off by far more",
    )  # fmt: skip


def _golden_run(
    graph: Graph,
    targets: Sequence[Target],
    described: list[dict[str, Any]],
    stored: list[Array],
    folder: Path,
    inputs: list[Array],
) -> tuple[str, list[Array]]:
    """What `taps` returns on the golden inputs, codes as int8, from the fastest variant that runs here; all others that do must agree.

    Where none runs here, one that does is built for it. Raises EnvironmentProblem where this machine runs no target at all.
    """
    runnable = [(t, d) for t, d in zip(targets, described, strict=True) if t.unavailable() is None]
    if not runnable:
        stand_in = _stand_in()
        arrays: dict[str, Array] = {}
        with tempfile.TemporaryDirectory() as temporary:
            built = build_variant(graph, stand_in, Path(temporary), arrays)
            stored, arguments = merge([built], arrays)
            return stand_in.name, _run(graph, {**_describe(stand_in), **arguments[0]}, stored, Path(temporary), inputs)
    (first, its), *others = runnable
    results = _run(graph, its, stored, folder, inputs)
    names = [*(f"output {s.name}" for s in graph.program.outputs), *(t.site for t in graph.taps)]
    for other, description in others:
        for site, a, b in zip(names, results, _run(graph, description, stored, folder, inputs), strict=True):
            if digest(a) != digest(b):
                raise OverBudget(f"lower: {site}: {other.name} and {first.name} differ; needed: the same bits; please report it")
    return first.name, results


def _stand_in() -> Target:
    for family in table.FAMILIES:
        if (found := table.target(family)).unavailable() is None:
            return found
    raise EnvironmentProblem(
        "lower: golden values are computed here, and this CPU runs none of the targets; needed: one that `khtst-compile targets` shows as "
        "running; lower on another machine"
    )


def _run(graph: Graph, variant: dict[str, Any], stored: list[Array], folder: Path, inputs: list[Array]) -> list[Array]:
    weights = artifact.arrange([np.array(a) for a in stored], variant)
    results = Engine(folder / variant["library"], weights, cpu.usable_cores()).call("taps", inputs)
    count = len(graph.program.outputs)
    offset = int(variant["codes_offset"])
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
        "library": library_name(target),
    }
