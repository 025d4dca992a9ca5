"""Program -> a checked ONNX file: standard operators only, names and dynamic axes those of the Program.

torch.onnx translates ATen; the khtst:: operators are lowered by `onnx_ops`. Values keep the names of the graph's nodes where
they still exist (a quantized linear's output is called as its node, its int32 sums "<node>.acc"), so that parity can match them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateHashedInitializersPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from torch import fx

from khtst_compile import __version__
from khtst_compile.contract import Report
from khtst_compile.errors import LoweringError, ResourceError, UsageError
from khtst_compile.lower.onnx_clean import clean
from khtst_compile.lower.onnx_emit import DOMAIN
from khtst_compile.lower.onnx_masks import zero_hidden_rows
from khtst_compile.lower.onnx_ops import KhtstLowering, Lowered, translation_table
from khtst_compile.program import Program, TensorSpec, source_line
from khtst_compile.quiet import quiet

OPSETS = (18, 23)  # 18: the oldest torch.onnx translates to; 23: the newest onnxruntime 1.20 .. 1.32 all load
ROTATIONS = ("matmul", "exact")
EXTERNAL_ABOVE = 1_500_000_000  # bytes of weights; a protobuf file cannot exceed 2 GiB


@dataclass(frozen=True)
class OnnxReport:
    """path, data: the files written (data: None where the weights are inside the model); opset; bytes: size of both files.

    quantizers, linears, rotations, lookups: khtst:: operators lowered (a quantizer several linears read counts once); ops: operator type ->
    count.
    """

    path: Path
    data: Path | None
    opset: int
    bytes: int
    quantizers: int
    linears: int
    rotations: int
    lookups: int
    ops: dict[str, int]


def export_onnx(
    program: Program,
    path: str | os.PathLike[str],
    *,
    opset: int = 20,
    rotation: str = "matmul",
    external_above: int = EXTERNAL_ABOVE,
    report: Report | None = None,
) -> OnnxReport:
    """Write `program` to `path` and return what was written; nothing is left at `path` where it fails.

    rotation: "matmul" (fast; codes within one, see `onnx_ops.rotation_slack`) or "exact" (the additions of `khtst::rotate`, bit for bit).
    external_above: weights of more than this many bytes go to "<name>.data" beside the model.
    Raises LoweringError for an operator without translation or an axis the capture fixed, UsageError for wrong options,
    ResourceError where the disk is full.
    """
    target = Path(path)
    if not OPSETS[0] <= opset <= OPSETS[1]:
        raise UsageError(f"onnx: opset is {opset}; needed: {OPSETS[0]} to {OPSETS[1]}")
    if rotation not in ROTATIONS:
        raise UsageError(f"onnx: rotation is {rotation!r}; needed: one of {', '.join(ROTATIONS)}")
    if not target.parent.is_dir():
        raise UsageError(f"onnx: folder {str(target.parent)!r} does not exist; create it first")
    if target.is_dir():
        raise UsageError(f"onnx: {str(target)!r} is a folder; needed: a file name")
    say = report or (lambda line: None)
    model = _translate(zero_hidden_rows(program), opset)
    say(f"onnx: {len(program.graph.nodes)} graph nodes translated to opset {opset}")
    done = KhtstLowering(model, rotation).run()
    _tidy(model)
    _name_signature(model, program)
    say(f"onnx: {done.linears} int8 linears, {done.quantizers} quantizers, {done.rotations} rotations, {done.lookups} lookups")
    data = _write(model, target, external_above)
    say(f"onnx: wrote {target.name}" + (f" and {data.name}" if data else ""))
    return _summary(model, target, data, opset, done)


def _translate(program: Program, opset: int) -> ir.Model:
    """torch.onnx's translation, khtst:: operators as opaque nodes."""
    try:
        with quiet("torch.onnx"):
            converted = torch.onnx.export(
                program.ep,
                dynamo=True,
                opset_version=opset,
                optimize=False,
                verbose=False,
                custom_translation_table=translation_table(),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise LoweringError(_why_not(program.graph, error)) from error
    assert converted is not None
    clean(converted.model)
    return converted.model


def _why_not(graph: fx.Graph, error: BaseException) -> str:
    """One sentence from torch.onnx's pages: which operator, where in the model, why."""
    cause: BaseException = error
    name, operator = "", ""
    while True:
        found = re.search(r"Error when translating node %(\w+) .*?target=torch\.ops\.([\w.]+)", str(cause))
        if found is not None:
            name, operator = found[1], found[2]
        if cause.__cause__ is None:
            break
        cause = cause.__cause__
    # The first sentence only: what follows is the signature of torch.onnx's function, or the whole graph.
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].split(". ")[0].rstrip(".")
    if not operator:
        return f"onnx: the graph could not be translated: {reason}"
    # The failing node is one of the decomposed graph; where that one has another name, any use of the operator says where to look.
    calls = [n for n in graph.nodes if n.op == "call_function" and str(n.target) == operator]
    where = [source_line(n) for n in calls if n.name == name] or [source_line(n) for n in calls] or [name]
    return (
        f"onnx: operator {operator} ({where[0]}) cannot be translated: {reason}; replace it in the model or give it a translation"
    )


def _tidy(model: ir.Model) -> None:
    """Weights stored once, dead nodes and unread tensors gone, and no trace of source paths or stack traces."""
    RemoveUnusedNodesPass()(model)
    for value in model.graph.initializers.values():
        # torch.onnx transposes float32 weights as views, which the next pass cannot hash.
        if value.const_value is not None and not value.const_value.numpy().flags.c_contiguous:
            value.const_value = ir.tensor(np.ascontiguousarray(value.const_value.numpy()), name=value.name)
    DeduplicateHashedInitializersPass()(model)
    RemoveUnusedOpsetsPass()(model)
    model.opset_imports.pop(DOMAIN, None)
    model.producer_name, model.producer_version = "khtst-compile", __version__
    model.doc_string = None
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.doc_string, graph.name = None, "khtst"
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.doc_string = None
            value.metadata_props.clear()
        for node in graph:
            node.doc_string = None
            node.metadata_props.clear()
            for value in node.outputs:
                value.doc_string = None
                value.metadata_props.clear()


def _name_signature(model: ir.Model, program: Program) -> None:
    """Give inputs, outputs and dynamic axes the Program's names, in every shape of the model."""
    graph = model.graph
    public = {spec.name for spec in (*program.inputs, *program.outputs)}
    _separate_outputs(graph)
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.name in public:
            value.name = f"{value.name}.inner"
    axes: dict[str, str] = {}
    for kind, found, wanted in (("input", graph.inputs, program.inputs), ("output", graph.outputs, program.outputs)):
        if len(found) != len(wanted):
            raise LoweringError(
                f"onnx: the graph has {len(found)} {kind}s, the program names {len(wanted)}; capture the model again"
            )
        for value, spec in zip(found, wanted, strict=True):
            value.name = spec.name
            _collect_axes(kind, value, spec, axes)
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, axes) for dim in value.shape])


def _separate_outputs(graph: ir.Graph) -> None:
    """An output that is an input, a stored tensor or another output gets an Identity: one value cannot carry two names."""
    seen: set[ir.Value] = set()
    for at, value in enumerate(graph.outputs):
        if value.producer() is None or value in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.append(node)
            graph.outputs[at] = node.outputs[0]
        seen.add(value)


def _collect_axes(kind: str, value: ir.Value, spec: TensorSpec, axes: dict[str, str]) -> None:
    """Note which symbol of the translation each named axis of an input or output goes by."""
    if value.shape is None or len(value.shape) != len(spec.shape):
        raise LoweringError(f"onnx: {kind} {spec.name!r} has shape {value.shape}; the program says {spec.shape}")
    for dim, wanted in zip(value.shape, spec.shape, strict=True):
        if isinstance(wanted, int):
            continue
        if isinstance(dim, int):
            raise LoweringError(
                f"onnx: axis {wanted!r} of {kind} {spec.name!r} was fixed to {dim} when the model was captured; "
                f"needed: a dynamic axis; capture it with --shapes {wanted}=min..max or declare it fixed"
            )
        if dim.value is not None and str(dim.value).isidentifier() and wanted.isidentifier():
            axes.setdefault(str(dim.value), wanted)


def _renamed(dim: int | ir.SymbolicDim, axes: dict[str, str]) -> int | ir.SymbolicDim:
    """A dimension with the program's axis names in it; it may be an expression of several ("s0*s1")."""
    if isinstance(dim, int) or dim.value is None:
        return dim
    return ir.SymbolicDim(re.sub(r"[A-Za-z_]\w*", lambda m: axes.get(m[0], m[0]), str(dim.value)))


def _write(model: ir.Model, target: Path, external_above: int) -> Path | None:
    """Save, check and move into place; returns the file of external weights, if there is one.

    The old model goes first and the new one comes last, so that no model ever stands beside another's weights.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    data_name = f"{target.name}.data" if size > external_above else None
    final_data = target.with_name(f"{target.name}.data")
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        ir.save(model, folder / target.name, external_data=data_name)
        _check(folder / target.name)
        if data_name is not None or final_data.exists():
            target.unlink(missing_ok=True)
            final_data.unlink(missing_ok=True)
        if data_name is not None:
            (folder / data_name).replace(final_data)
        (folder / target.name).replace(target)
    except OSError as error:
        kind = ResourceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(
            f"onnx: cannot write {str(target)!r}: {error.strerror or error}; free space or choose another place"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return final_data if data_name is not None else None


def _check(path: Path) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise LoweringError(f"onnx: the exported model does not pass the checker: {error}") from error


def _summary(model: ir.Model, target: Path, data: Path | None, opset: int, done: Lowered) -> OnnxReport:
    ops = Counter(node.op_type for node in model.graph.all_nodes())
    size = target.stat().st_size + (data.stat().st_size if data is not None else 0)
    counts = (done.quantizers, done.linears, done.rotations, done.lookups)
    return OnnxReport(target, data, opset, size, *counts, dict(sorted(ops.items())))
