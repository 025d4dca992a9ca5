"""Layer by layer for ONNX: codes, integer sums and outputs as onnxruntime computes them, against the quantized program's own tensors.

Lookups in codebooks are judged on the vectors that onnxruntime had: every id, and the bits of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import fx

from khtst_compile.errors import ArtifactError
from khtst_compile.lower.digest import digest
from khtst_compile.lower.onnx_codebook import IDS, ROWS, VALUES
from khtst_compile.lower.replay_lookups import LOOKUPS, judge_exact, reference
from khtst_compile.ops.w8a8_linear import int8_matmul, w8a8_linear_reference
from khtst_compile.parity import Row, codes_differ, relative_error_db, worst_ulp_of_terms
from khtst_compile.program import Program, arguments, call_nodes, site_of

Array = npt.NDArray[Any]
OFFSET = 128  # codes and weights are stored as uint8 with this zero point: the one form onnxruntime runs fast and exactly
EXACT = "integers from equal inputs are equal"
# onnxruntime rounds the two scalings and the bias one after the other where the operator has one fused multiply-add.
FLOAT_ULP, FLOAT_REASON = 70.0, "a row's scale a few ulp off; two scalings and a bias, each rounded, for one fused multiply-add"
NEAR_TIE = "other orders of float32 sums before the quantizer: a code next to a tie moves by one"
NEAR_TIE_SHARE = 5e-3
VECTORS_DB, VECTORS_REASON = -80.0, "float operators after the last quantized linear, in other orders of float32 sums"


@dataclass(frozen=True)
class _Product:
    """Names in the ONNX graph of one int8 product: the codes it reads, its int32 sums, and the linear's float output."""

    codes: str
    sums: str
    output: str


def replay_onnx(program: Program, model: Path, inputs: dict[str, Array], threads: int | None) -> list[Row]:
    """program: what was exported; model: the .onnx file. Rows for codes, sums and output of every quantized linear and for
    vectors, ids and values of every lookup, in order.

    The program runs in torch, but after each of these goes on with what onnxruntime computed there, so that every layer is judged on
    nearly its own inputs. Raises ArtifactError where the model has other int8 products or lookups than the program.
    """
    linears = list(call_nodes(program.graph, torch.ops.khtst.w8a8_linear.default))
    returned = arguments(next(n for n in reversed(program.graph.nodes) if n.op == "output"))[0]
    public = dict(reversed([(n.name, s.name) for n, s in zip(returned, program.outputs, strict=True)]))
    proto = onnx.load(str(model))
    count = sum(n.op_type == "MatMulInteger" for n in proto.graph.node)
    lookups = [n for n in program.graph.nodes if n.target in LOOKUPS]
    marks = [name.removesuffix(ROWS) for n in proto.graph.node for name in n.output if name.endswith(f".{ROWS}")]
    # The exporter computes equal products once, and equal lookups.
    all_there = count == len(linears) and len(marks) == len(lookups)
    first = {n: n for n in (*linears, *lookups)} if all_there else _first_equal(program)
    same = _grouped(linears, first, count, "int8 products", model)
    looked_up = _grouped(lookups, first, len(marks), "lookups", model)
    names = [next((public[m.name] for m in equal if m.name in public), None) for equal in same.values()]
    products, values = _run(proto, names, marks, inputs, threads)
    marked = {m.name: mark for equal, mark in zip(looked_up.values(), marks, strict=True) for m in equal}
    pairs = {m.name: p for equal, p in zip(same.values(), products, strict=True) for m in equal}
    seen: dict[str, Any] = dict(program.tensors())
    rows: list[Row] = []

    def hook(node: fx.Node, value: Any) -> Any:
        if node.name in pairs:
            product = pairs[node.name]
            rows.extend(_judge(node, product, values, seen))
            value = torch.from_numpy(values[product.output])
        if node.name in marked:
            found = {part: torch.from_numpy(values[marked[node.name] + part]) for part in (ROWS, VALUES, IDS)}
            rows.extend(_judge_lookup(node, found, seen))
            value = tuple(found[part].reshape(v.shape) for part, v in zip((VALUES, IDS), value, strict=True))
        seen[node.name] = value
        return value

    with torch.no_grad():
        program.run({k: torch.from_numpy(v) for k, v in inputs.items()}, hook)
    return rows


def _grouped(
    nodes: list[fx.Node], first: dict[fx.Node, fx.Node], count: int, what: str, model: Path
) -> dict[fx.Node, list[fx.Node]]:
    """The first of equal nodes -> all of them. Raises ArtifactError unless there are `count`."""
    same = {n: [m for m in nodes if first[m] is n] for n in nodes if first[n] is n}
    if count != len(same):
        raise ArtifactError(
            f"{model}: has {count} {what}, the reference {len(same)}; it was exported from another program; export again"
        )
    return same


def _first_equal(program: Program) -> dict[fx.Node, fx.Node]:
    """Node -> the first node of the same value: an equal stored tensor, or the same operator on the same, or equal, arguments."""
    tensors = program.tensors()
    seen: dict[Any, fx.Node] = {}
    first: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        key: Any = node
        if node.name in tensors and node.op == "placeholder":
            value = tensors[node.name].numpy()
            key = (value.dtype, value.shape, digest(value))
        elif node.op == "call_function":
            key = (node.target, str(fx.map_arg((node.args, node.kwargs), lambda n: first[n])))
        first[node] = seen.setdefault(key, node)
    return first


def _run(
    proto: Any, public: list[str | None], marks: list[str], inputs: dict[str, Array], threads: int | None
) -> tuple[list[_Product], dict[str, Array]]:
    """The int8 products in graph order, and every value they and the lookups name. public: names of those results that are outputs of the
    model; marks: what the names of each lookup's values begin with."""
    import onnxruntime

    found = [n for n in proto.graph.node if n.op_type == "MatMulInteger"]
    products = [
        _Product(n.input[0], n.output[0], name or n.output[0].removesuffix(".acc")) for n, name in zip(found, public, strict=True)
    ]
    names = list(dict.fromkeys(name for p in products for name in (p.codes, p.sums, p.output)))
    names += [mark + part for mark in marks for part in (ROWS, VALUES, IDS)]
    if not names:  # asked for nothing, onnxruntime would return everything
        return [], {}
    present = {o.name for o in proto.graph.output}
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in present)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return products, dict(zip(names, session.run(names, inputs), strict=True))


def _judge_lookup(node: fx.Node, found: dict[str, torch.Tensor], seen: dict[str, Any]) -> list[Row]:
    """found: what it read, its values and its ids, row by row."""
    site = site_of(node)
    operands: list[Any] = [seen[a.name] if isinstance(a, fx.Node) else a for a in arguments(node)]
    theirs = operands[0].reshape(found[ROWS].shape)
    finite = (theirs.isfinite() & found[ROWS].isfinite()).all(-1)
    db = relative_error_db(found[ROWS][finite].numpy(), theirs[finite].numpy())
    values, ids = reference(node, [found[ROWS], *operands[1:]])
    return [
        Row(site, "vectors", "relative error dB", db, VECTORS_DB, VECTORS_REASON),
        judge_exact(site, "ids", found[IDS].reshape(ids.shape), ids),
        judge_exact(site, "values", found[VALUES].reshape(values.shape), values),
    ]


def _judge(node: fx.Node, product: _Product, values: dict[str, Array], seen: dict[str, Any]) -> list[Row]:
    site = site_of(node)
    operands: list[Any] = [None if a is None else seen[a.name] for a in arguments(node)]
    want_codes, scale, weight, weight_scale, bias = operands
    codes = torch.from_numpy((values[product.codes].astype(np.int16) - OFFSET).astype(np.int8))
    largest, share = codes_differ(codes.numpy(), want_codes.numpy())
    sums = int8_matmul(codes, weight)
    off = np.abs(values[product.sums].astype(np.int64) - sums.numpy().astype(np.int64))
    want = w8a8_linear_reference(codes, scale, weight, weight_scale, bias).numpy()
    terms = np.abs(sums.numpy() * (scale.unsqueeze(-1) * weight_scale).double().numpy())
    if bias is not None:
        terms = terms + np.abs(bias.double().numpy())
    return [
        Row(site, "codes", "largest difference", largest, 1.0, NEAR_TIE),
        Row(site, "codes", "share that differs", share, NEAR_TIE_SHARE, NEAR_TIE),
        Row(site, "int32 sums", "largest difference", float(off.max(initial=0)), 0.0, EXACT),
        Row(site, "output", "ulp of terms", worst_ulp_of_terms(values[product.output], want, terms), FLOAT_ULP, FLOAT_REASON),
    ]
