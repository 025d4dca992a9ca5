"""What TVM's importer needs before and beside itself: decomposition, explicit dtypes, converters for what it gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tvm import relax

from khtst_compile.program import Program

aten = torch.ops.aten


def prepare(program: Program) -> Program:
    """Decompose to core ATen (khtst:: operators stay whole)."""
    return replace(program, ep=program.ep.run_decompositions())


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
    if isinstance(size, int) or not isinstance(start, int) or start < 0 or step != 1:
        return importer._slice(node)
    end = importer.env[node.args[3]] if isinstance(node.args[3], fx.Node) else node.args[3]
    index = importer.block_builder.emit(relax.op.arange(start, end, 1, dtype="int32"))
    return importer.block_builder.emit(relax.op.take(x, index, axis=axis, mode="fast"))


def _embedding(node: fx.Node, importer: Any) -> Any:
    """A table read by index, without the flattening that keeps TVM from fusing it with what follows."""
    table, ids = importer.env[node.args[0]], importer.env[node.args[1]]
    index = importer.block_builder.emit(relax.op.astype(ids, "int32"))
    return importer.block_builder.emit(relax.op.take(table, index, axis=0, mode="fast"))


CONVERTERS: dict[str, Callable[[fx.Node, Any], Any]] = {
    "slice.Tensor": _dynamic_slice,
    "embedding.default": _embedding,
}
