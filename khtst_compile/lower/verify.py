"""What `verify` compares, for each kind of artifact and of reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact
from khtst_compile.errors import UsageError
from khtst_compile.parity import ParityReport, Row, relative_error_db, worst_cosine

Array = npt.NDArray[Any]
Say = Callable[[str], None]
SLACK_DB = 1.0
SLACK_REASON = "what quantize measured on these samples, and 1 dB: another order of float sums moves single codes"
IDS_REASON = (
    "what quantize measured on these samples, and 2 %, or two ids: other roundings choose between codes that are nearly as near"
)
LAYER_DB = -8.0
LAYER_REASON = "int8 noise gathered up to here; a wrong scale, weight or input is louder than this"
SAME_BITS = "every CPU gives the same bits"


def verify_artifact(
    folder: artifact.Folder, reference: str | Path | None, threads: int | None, variant: str | None, task: str | None, say: Say
) -> ParityReport:
    """See api.verify."""
    golden = folder.arrays(artifact.GOLDEN)
    inputs = {k.removeprefix("in/"): v for k, v in golden.items() if k.startswith("in/")}
    if folder.kind == "library":
        outputs, taps = _run_library(folder, inputs, threads, variant)
    elif variant is not None:
        raise UsageError(f"verify: variant {variant!r} of {folder.path}, which is of kind {folder.kind!r}; needed: 'library'")
    else:
        outputs, taps = _RUNNERS[folder.kind](folder, inputs, threads)
    rows: list[Row] = []
    if reference is None:
        rows += _against_hashes(folder, taps)
    elif (Path(reference) / artifact.MANIFEST).is_file():
        rows += _against_quantized(folder, artifact.read(reference, kind="quantized"), inputs, outputs, taps, threads, say)
    else:
        golden |= _original(folder, reference, task, inputs, taps, rows, say)
    exact = {k.removeprefix("fp32/"): v for k, v in golden.items() if k.startswith("fp32/")}
    summary = _accuracy(folder, outputs, exact, rows)
    return ParityReport(tuple(rows), {"kind": folder.kind, "comparisons": float(len(rows)), **summary})


def _accuracy(folder: artifact.Folder, outputs: dict[str, Array], exact: dict[str, Array], rows: list[Row]) -> dict[str, float]:
    """Rows for the outputs against fp32; the budgets are what quantize measured on the very samples."""
    measured = folder.manifest["golden"]["accuracy"]
    summary: dict[str, float] = {}
    for name, want in exact.items():
        got = outputs[name]
        if want.dtype.kind != "f":
            share = float((got != want).mean()) if got.size else 0.0
            rows.append(_judge_integers(name, share, measured.get(f"{name}: share that differs"), got.size))
            continue
        db, cosine = relative_error_db(got, want), worst_cosine(got, want)
        summary[f"{name}: relative error dB"], summary[f"{name}: worst cosine"] = max(db, -200.0), cosine
        budget = float(measured.get(f"{name}: relative error dB", -100.0)) + SLACK_DB
        rows.append(Row(f"output {name}", "against fp32", "relative error dB", db, max(budget, -100.0), SLACK_REASON))
        allowed = 1.3 * (1.0 - float(measured.get(f"{name}: worst cosine", 1.0))) + 1e-6
        rows.append(Row(f"output {name}", "against fp32", "1 - worst cosine", 1.0 - cosine, allowed, SLACK_REASON))
    return summary


def _judge_integers(name: str, share: float, measured: float | None, size: int) -> Row:
    """measured: what quantize saw of ids from a codebook, None for other integers."""
    if measured is None:
        return Row(f"output {name}", "against fp32", "share that differs", share, 0.0, "integers are equal")
    budget = 1.3 * measured + max(0.02, 2.0 / max(1, size))
    return Row(f"output {name}", "against fp32", "share that differs", share, budget, IDS_REASON)


def _against_hashes(folder: artifact.Folder, taps: list[Array]) -> list[Row]:
    from khtst_compile.lower.digest import digest

    rows = []
    for tap, value in zip(folder.manifest.get("taps", []), taps, strict=bool(taps)):
        differs = float(digest(value) != tap["sha256"])
        rows.append(Row(tap["site"], f"{tap['operator']} {tap['kind']}", "bytes differ (0 no, 1 yes)", differs, 0.0, SAME_BITS))
    return rows


def _against_quantized(
    folder: artifact.Folder,
    reference: artifact.Folder,
    inputs: dict[str, Array],
    outputs: dict[str, Array],
    taps: list[Array],
    threads: int | None,
    say: Say,
) -> list[Row]:
    """Layer by layer against torch, with the reference's own weights and scales."""
    import torch

    from khtst_compile.api import load_program

    program = load_program(reference)
    if folder.kind == "onnx":
        from khtst_compile.lower.onnx_replay import replay_onnx

        return replay_onnx(program, folder.file(artifact.ONNX_MODEL), inputs, threads)
    if folder.kind == "quantized":
        say("a quantized artifact is compared on its outputs alone")
        return []
    from khtst_compile.lower.relax import kernel_graph
    from khtst_compile.lower.replay import replay

    graph = kernel_graph(program)
    if [(t.site, t.operator) for t in graph.taps] != [(t["site"], t["operator"]) for t in folder.manifest["taps"]]:
        raise UsageError(
            f"{reference.path} is not what {folder.path} was lowered from: its layers differ; give that one, or lower again"
        )
    return replay(
        graph, [outputs[s.name] for s in graph.program.outputs], taps, {k: torch.from_numpy(v) for k, v in inputs.items()}
    )


def _original(
    folder: artifact.Folder,
    reference: str | Path,
    task: str | None,
    inputs: dict[str, Array],
    taps: list[Array],
    rows: list[Row],
    say: Say,
) -> dict[str, Array]:
    """Capture the original model, add a row per layer, and return its outputs as golden arrays."""
    import torch

    from khtst_compile.capture import capture
    from khtst_compile.capture.tasks import known_task
    from khtst_compile.lower.layers import layer_outputs
    from khtst_compile.windows import decoded

    meta = folder.manifest["meta"]
    if "split" in meta:
        raise UsageError(
            f"verify: {folder.path} is the {meta['split']['part']} of a model that was split, and {reference} the whole; give the artifact "
            "that split wrote"
        )
    program = capture(str(reference), task=task or known_task(meta), shapes=meta.get("shapes"), seed=int(meta.get("seed", 0)))
    tensors = {k: torch.from_numpy(v) for k, v in inputs.items()}
    if "cache" in meta:
        tensors = decoded(tensors)
    names = [s.name for s in program.inputs]
    if sorted(names) != sorted(tensors):
        raise UsageError(
            f"{reference} is not the original of {folder.path}: its inputs are {names}, the artifact's {sorted(inputs)}"
        )
    outputs, layers = layer_outputs(program, tensors)
    compared = 0
    for tap, value in zip(folder.manifest.get("taps", []), taps, strict=bool(taps)):
        want = [layers.get(site) for site in tap["site"].split("+")]
        comparable = tap["operator"] in ("w8a8_gemm", "linear") and tap["act"] == "none"
        if not comparable or any(w is None for w in want):
            continue
        exact = np.concatenate([w for w in want if w is not None], axis=-1)
        if exact.shape != value.shape:  # two layers of one module, or another fusion: nothing to compare with
            continue
        db = relative_error_db(value, exact)
        rows.append(Row(tap["site"], "against fp32", "relative error dB", db, LAYER_DB, LAYER_REASON))
        compared += 1
    say(f"compared {compared} layers and {len(outputs)} outputs with {reference}")
    return {f"fp32/{k}": outputs[k] for k in program.results()}


def _run_library(
    folder: artifact.Folder, inputs: dict[str, Array], threads: int | None, variant: str | None
) -> tuple[dict[str, Array], list[Array]]:
    from khtst_compile.runtime import load

    return load(folder.path, threads=threads, variant=variant).run_with_taps(inputs)


def _run_quantized(
    folder: artifact.Folder, inputs: dict[str, Array], threads: int | None
) -> tuple[dict[str, Array], list[Array]]:
    import torch

    from khtst_compile.api import load_program

    with torch.no_grad():
        outputs = load_program(folder).run({k: torch.from_numpy(v) for k, v in inputs.items()})
    return {k: v.numpy() for k, v in outputs.items()}, []


def _run_onnx(folder: artifact.Folder, inputs: dict[str, Array], threads: int | None) -> tuple[dict[str, Array], list[Array]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(str(folder.file(artifact.ONNX_MODEL)), options, providers=["CPUExecutionProvider"])
    names = [s["name"] for s in folder.manifest["outputs"]]
    return dict(zip(names, session.run(names, inputs), strict=True)), []


_Runner = Callable[[artifact.Folder, dict[str, Array], int | None], tuple[dict[str, Array], list[Array]]]
_RUNNERS: dict[str, _Runner] = {"quantized": _run_quantized, "onnx": _run_onnx}
