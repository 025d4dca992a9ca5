"""Indices that cannot leave the tensor they index: kernels read and write where they are told, so what torch would refuse is clipped."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from khtst_compile.errors import LoweringError
from khtst_compile.program import Program, Rewriter, arguments, site_of, source_line
from khtst_compile.sizes import same_shape

aten = torch.ops.aten

# Operators (tensor, axis, index, ...): an index is from 0 on.
ALONG_AXIS = (
    aten.gather.default,
    aten.index_select.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
SCATTERS = (aten.scatter.src, aten.scatter.reduce, aten.scatter_add.default, aten.scatter_reduce.two)
# Operators (tensor, [index or None for each axis], ...): an index may count from the end.
BY_POSITION = (aten.index.Tensor, aten.index_put.default)
# Operators whose values are some of their first argument's, whatever its integer type.
SAME_VALUES = (
    aten.unsqueeze.default,
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten.clone.default,
)
# Operators that write or read by index in forms nothing here has a check for.
UNCHECKED = (aten.put.default, aten.take.default, aten.masked_scatter.default, aten._embedding_bag_forward_only.default)


def clip_indices(program: Program) -> Program:
    """Put a clip before every index that is no constant. Raises LoweringError for constants out of range and forms without a check."""
    rw = Rewriter(program)
    for node in list(rw.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in UNCHECKED:
            raise LoweringError(f"{_where(node)}: {node.target} indexes memory unchecked; use gather, scatter or index_select")
        if node.target in ALONG_AXIS:
            source, axis, index = arguments(node)[:3]
            rank = source.meta["val"].dim()
            node.update_arg(2, _clipped(rw, node, source, axis % max(rank, 1), index, wraps=False))
            if node.target in SCATTERS:
                node.update_arg(3, _narrowed(rw, node, arguments(node)[3], index))
        elif node.target in BY_POSITION:
            _by_position(rw, node)
    return rw.finish()


def _by_position(rw: Rewriter, node: fx.Node) -> None:
    source, indices = arguments(node)[:2]
    if any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices):
        _by_mask(rw, node, source, indices)
        return
    found = [None if i is None else _clipped(rw, node, source, axis, i, wraps=True) for axis, i in enumerate(indices)]
    node.update_arg(1, found)


def _by_mask(rw: Rewriter, node: fx.Node, source: fx.Node, indices: list[Any]) -> None:
    """`x[mask] = value` chooses element by element; other forms depend on how many are chosen."""
    mask, value = indices[0], arguments(node)[2] if node.target is aten.index_put.default else None
    whole = len(indices) == 1 and same_shape(mask.meta["val"].shape, source.meta["val"].shape)
    if value is None or not whole or value.meta["val"].numel() != 1 or any(arguments(node)[3:]):
        raise LoweringError(f"{_where(node)}: {node.target} with a mask; use torch.where, which gives every element a place")
    scalar = rw.call(aten.reshape.default, value, [], before=node)
    rw.replace(node, rw.call(aten.where.self, mask, scalar, source, before=node))


def _clipped(rw: Rewriter, node: fx.Node, source: fx.Node, axis: int, index: fx.Node, *, wraps: bool) -> fx.Node:
    """`index` inside [0, size of the axis); wraps: -1 is the last entry."""
    size: Any = source.meta["val"].shape[axis] if source.meta["val"].dim() else 1
    constant = rw.value(index)
    if constant is not None and isinstance(size, int) and constant.numel():
        low, high = int(constant.min()), int(constant.max())
        if low < (-size if wraps else 0) or high >= size:
            raise LoweringError(f"{_where(node)}: index {low}..{high} on an axis of {size}; correct the stored index")
        if low >= 0:
            return index
    if _is_inside(rw, index, size):
        return index
    last: Any = size - 1
    if not isinstance(size, int):
        size = rw.call(aten.sym_size.int, source, axis, before=node)
        last = _sum(rw, size, -1, node)
    if wraps:
        negative = rw.call(aten.lt.Scalar, index, 0, before=node)
        index = rw.call(aten.where.self, negative, rw.call(aten.add.Tensor, index, size, before=node), index, before=node)
    return rw.call(aten.clamp.default, index, 0, last, before=node)


def _is_inside(rw: Rewriter, index: fx.Node, size: Any) -> bool:
    """Whether an index is in range by its making: counted up to the very size, or part of a stored tensor that is in range."""
    while index.op == "call_function" and index.target in SAME_VALUES:
        index = arguments(index)[0]
    constant = rw.value(index)
    if constant is not None:
        return bool(constant.numel()) and int(constant.min()) >= 0 and isinstance(size, int) and int(constant.max()) < size
    given = arguments(index)
    if index.target is aten.arange.default:
        given = (0, *given)
    elif index.target is not aten.arange.start_step or (len(given) > 2 and given[2] != 1):
        return False
    start, end = given[0], given[1].meta["val"] if isinstance(given[1], fx.Node) else given[1]
    return isinstance(start, int) and start >= 0 and str(end) == str(size)


def _narrowed(rw: Rewriter, node: fx.Node, source: fx.Node, index: fx.Node) -> fx.Node:
    """The part of `source` that an index of a smaller shape takes: TVM wants equal shapes."""
    for axis, (have, want) in enumerate(zip(source.meta["val"].shape, index.meta["val"].shape, strict=True)):
        if isinstance(have, int) and isinstance(want, int) and have != want:
            source = rw.call(aten.slice.Tensor, source, axis, 0, want, before=node)
    return source


def _sum(rw: Rewriter, size: fx.Node, number: int, before: fx.Node) -> fx.Node:
    """`size + number` of a symbolic size."""
    with rw.graph.inserting_before(before):
        node = rw.graph.call_function(operator.add, (size, number))
    node.meta["val"] = size.meta["val"] + number
    return node


def _where(node: fx.Node) -> str:
    return f"{site_of(node)!r} ({source_line(node)})"
