"""What TVM's importer needs before and beside itself: decomposition, explicit dtypes, converters for what it gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import tvm
from torch import fx
from tvm import relax, te

from khtst_compile.lower.bounds import clip_indices
from khtst_compile.lower.sorting import SORTING
from khtst_compile.program import Program, Rewriter, arguments
from khtst_compile.quiet import quiet

aten = torch.ops.aten


# Operators whose operands torch converts to the result's dtype before computing; TVM converts to the first operand's.
_ARITHMETIC = {
    aten.add,
    aten.sub,
    aten.mul,
    aten.div,
    aten.pow,
    aten.maximum,
    aten.minimum,
    aten.where,
    aten.cumsum,
    aten.sum,
    aten.mean,
}
# Comparisons: operands meet in their common dtype, the result is bool.
_COMPARISON = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}


def prepare(program: Program) -> Program:
    """Decompose to core ATen (khtst:: operators stay whole) and make every implied conversion explicit."""
    with quiet():
        return explicit_dtypes(clip_indices(replace(program, ep=program.ep.run_decompositions())))


def explicit_dtypes(program: Program) -> Program:
    """Cast operands to the dtype torch computes in: without it an int64 tensor times 1.001 comes out times 1."""
    rw = Rewriter(program)
    for node in list(rw.graph.nodes):
        family = getattr(node.target, "overloadpacket", None)
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if family in _ARITHMETIC:
            _cast_operands(rw, node, value.dtype)
        elif family in _COMPARISON:
            _cast_operands(rw, node, torch.result_type(*(_operand(a) for a in node.args[:2])))
    return rw.finish()


def _operand(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _cast_operands(rw: Rewriter, node: fx.Node, dtype: torch.dtype) -> None:
    """Tensors become `dtype`; a Python scalar becomes a float where that is one. A condition (bool, first of `where`) stays."""
    args = list(node.args)
    first = 1 if node.target is aten.where.self else 0
    scalars = (
        1 if node.target in (aten.mul.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar) else 0
    )
    for i, argument in enumerate(args[first:], start=first):
        tensor = _operand(argument)
        if isinstance(argument, fx.Node) and isinstance(tensor, torch.Tensor) and tensor.dtype != dtype:
            args[i] = rw.call(aten._to_copy.default, argument, before=node, kwargs={"dtype": dtype})
        elif scalars and i == 1 and isinstance(argument, int) and dtype.is_floating_point:
            args[i] = float(argument)
    node.args = tuple(args)


def _steps(start: int, size: int, step: int) -> npt.NDArray[np.int32]:
    return np.arange(start, start + size * step, step, dtype=np.int32)


def _dynamic_slice(node: fx.Node, importer: Any) -> Any:
    """`x[..., start:end]` with a symbolic end: TVM clamps the end and loses the shape, so the elements are taken by index instead."""
    source = node.args[0]
    axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    x = importer.env[source]
    size = node.meta["val"].shape[axis]
    whole = source.meta["val"].shape[axis]  # type: ignore[union-attr]
    if size == whole:
        return x
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    step = node.args[4] if len(node.args) > 4 else 1
    if (isinstance(whole, int) and isinstance(size, int)) or not isinstance(start, int) or start < 0 or not isinstance(step, int):
        return importer._slice(node)
    if isinstance(size, int):  # a fixed part of a symbolic axis
        return importer.block_builder.emit(relax.op.take(x, relax.const(_steps(start, size, step)), axis=axis, mode="clip"))
    if step != 1:
        return importer._slice(node)
    end = importer.env[node.args[3]] if isinstance(node.args[3], fx.Node) else node.args[3]
    index = importer.block_builder.emit(relax.op.arange(start, end, 1, dtype="int32"))
    return importer.block_builder.emit(relax.op.take(x, index, axis=axis, mode="clip"))


def _arange(node: fx.Node, importer: Any) -> Any:
    """`arange(start, end)` from a symbolic start: TVM cannot fuse an operator with a symbolic scalar operand, so this one stays alone."""
    start, end, step = (*(importer.env[a] if isinstance(a, fx.Node) else a for a in arguments(node)), 1)[:3]
    if isinstance(start, (int, float)) or step != 1:
        return importer._arange(node)
    builder, dtype = importer.block_builder, str(node.meta["val"].dtype).removeprefix("torch.")
    size = tvm.sym.Analyzer().simplify(end - start)

    def compute(first: Any, count: Any) -> Any:
        return te.compute((count,), lambda i: (first + i).astype(dtype), name="arange")

    call = builder.call_te(compute, start, size)
    made = call.args[0]
    builder.update_func(made, builder.get()[made].with_attr("op_pattern", 8))
    return builder.emit(call)


def _embedding(node: fx.Node, importer: Any) -> Any:
    """A table read by index, without the flattening that keeps TVM from fusing it with what follows."""
    table, ids = importer.env[node.args[0]], importer.env[node.args[1]]
    index = importer.block_builder.emit(relax.op.astype(ids, "int32"))
    return importer.block_builder.emit(relax.op.take(table, index, axis=0, mode="clip"))


def _clamp(node: fx.Node, importer: Any) -> Any:
    """TVM's own converter takes infinity for a missing bound, which no integer can be."""
    value = importer.env[node.args[0]]
    for bound, operation in zip(node.args[1:3], (relax.op.maximum, relax.op.minimum), strict=False):
        if bound is not None:
            limit = _number(importer, bound, value) if isinstance(bound, fx.Node) else relax.const(bound, value.ty.dtype)
            value = importer.block_builder.emit(operation(value, limit))
    return value


def _number(importer: Any, bound: fx.Node, like: Any) -> Any:
    """A bound that is computed: a tensor, or a symbolic size, of which TVM makes a tensor only by counting."""
    limit, emit = importer.env[bound], importer.block_builder.emit
    if isinstance(bound.meta["val"], torch.Tensor):
        return limit
    one = emit(relax.op.arange(limit, limit + 1, 1, dtype=like.ty.dtype))
    return one if like.ty.ndim else emit(relax.op.squeeze(one, [0]))


def _extreme(node: fx.Node, importer: Any) -> Any:
    """amax and amin, which TVM's importer does not know: (x, axes, keepdim)."""
    operation = relax.op.max if node.target is aten.amax.default else relax.op.min
    axes = list(node.args[1]) if len(node.args) > 1 and node.args[1] else None  # type: ignore[arg-type]
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    return importer.block_builder.emit(operation(importer.env[node.args[0]], axes, keep))


def _elu(node: fx.Node, importer: Any) -> Any:
    """elu(x, alpha, scale, input_scale): TVM's own converter forgets the scales, and selu decomposes into them."""
    emit, x = importer.block_builder.emit, importer.env[node.args[0]]
    alpha, scale, inner = (*node.args[1:], 1.0, 1.0, 1.0)[:3] if len(node.args) > 1 else (1.0, 1.0, 1.0)

    def constant(value: Any) -> Any:
        return relax.const(float(value), x.ty.dtype)

    grown = emit(relax.op.exp(emit(relax.op.multiply(x, constant(inner)))))
    negative = emit(relax.op.multiply(emit(relax.op.subtract(grown, constant(1.0))), constant(alpha)))
    chosen = emit(relax.op.where(emit(relax.op.greater(x, constant(0.0))), x, negative))
    return emit(relax.op.multiply(chosen, constant(scale)))


def _select(node: fx.Node, importer: Any) -> Any:
    """`x[..., i, ...]`, without TVM's unchecked take."""
    x, axis, index = importer.env[node.args[0]], int(node.args[1]), node.args[2]  # type: ignore[arg-type]
    size = node.args[0].meta["val"].shape[axis]  # type: ignore[union-attr]
    if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
        return importer._select(node)
    place = relax.const(np.int32(index + size if index < 0 else index))
    return importer.block_builder.emit(relax.op.take(x, place, axis=axis, mode="clip"))


CONVERTERS: dict[str, Callable[[fx.Node, Any], Any]] = {
    "slice.Tensor": _dynamic_slice,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "embedding.default": _embedding,
    "clamp.default": _clamp,
    "elu.default": _elu,
    "select.int": _select,
    "amax.default": _extreme,
    "amin.default": _extreme,
    **SORTING,
}
