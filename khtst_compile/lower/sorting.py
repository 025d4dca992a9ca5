"""sort and topk by the kernel of `targets/kernels/argsort.py`: one order everywhere, equal elements as they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import fx
from tvm import relax

from khtst_compile.errors import LoweringError
from khtst_compile.program import site_of, source_line
from khtst_compile.targets.kernels.argsort import Argsort, prim_func
from khtst_compile.targets.kernels.rows import Lead


def _sort(node: fx.Node, importer: Any) -> Any:
    """sort(x, dim, descending) and sort(x, stable=, dim=, descending=): values and int64 places."""
    given: dict[str, Any] = dict(zip(("dim", "descending"), node.args[1:], strict=False)) | dict(node.kwargs)
    axis = int(given.get("dim", -1))
    return _both(importer, node, _order(node, importer, axis, bool(given.get("descending", False))), axis)


def _topk(node: fx.Node, importer: Any) -> Any:
    """topk(x, k, dim, largest, sorted): the first k of the sorted axis; torch leaves open which of equal elements come."""
    given: dict[str, Any] = dict(zip(("k", "dim", "largest"), node.args[1:], strict=False)) | dict(node.kwargs)
    axis = int(given.get("dim", -1))
    order = _order(node, importer, axis, bool(given.get("largest", True)))
    kept = relax.const(np.arange(int(given["k"]), dtype=np.int32))
    return _both(importer, node, importer.block_builder.emit(relax.op.take(order, kept, axis=axis, mode="clip")), axis)


def _both(importer: Any, node: fx.Node, order: Any, axis: int) -> Any:
    values = importer.block_builder.emit(relax.op.gather_elements(importer.env[node.args[0]], order, axis=axis))
    return importer.block_builder.emit(relax.Tuple([values, order]))


def _order(node: fx.Node, importer: Any, axis: int, descending: bool) -> Any:
    """Places, int64 and shaped like the node's first argument, of its elements in sorted order along `axis`."""
    builder, x = importer.block_builder, importer.env[node.args[0]]
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    rank = value.dim()
    if not rank:
        raise LoweringError(f"{site_of(node)} ({source_line(node)}): {node.target} of a single number; needed: at least one axis")
    moved = [a for a in range(rank) if a != axis % rank] + [axis % rank]
    if moved != list(range(rank)):
        x = builder.emit(relax.op.permute_dims(x, moved))
    flat = builder.emit(relax.op.reshape(x, (-1, x.ty.shape[-1])))
    dtype, length = str(value.dtype).removeprefix("torch."), value.shape[axis]
    spec = Argsort(dtype, descending, Lead(1), length if isinstance(length, int) else None, name=f"argsort_{node.name}")
    function = prim_func(spec).with_attr("tirx.is_scheduled", True).with_attr("op_pattern", 8)
    order = builder.emit(relax.call_tir(builder.add_func(function, spec.name), [flat], relax.TensorType(flat.ty.shape, "int64")))
    order = builder.emit(relax.op.reshape(order, x.ty.shape))
    back = [moved.index(a) for a in range(rank)]
    return order if moved == list(range(rank)) else builder.emit(relax.op.permute_dims(order, back))


SORTING: dict[str, Callable[[fx.Node, Any], Any]] = {
    "sort.default": _sort,
    "sort.stable": _sort,
    "topk.default": _topk,
}
