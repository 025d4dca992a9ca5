"""Along which axes is a tensor provably constant? Used to shrink attention masks to the axes they depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def uniform_axes(node: fx.Node) -> set[int]:
    """Axes of `node` (0-based, of its own rank) along which all its elements are equal; a sound under-estimate."""
    return _uniform(node, {})


def _uniform(node: Any, seen: dict[fx.Node, set[int]]) -> set[int]:
    if not isinstance(node, fx.Node):
        return set()
    if node not in seen:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return set()
        ones = {i for i, size in enumerate(value.shape) if isinstance(size, int) and size == 1}
        rule = _RULES.get(node.target)
        seen[node] = ones | (rule(node, seen) if rule is not None else set())
    return seen[node]


def _elementwise(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    """Constant where every operand is, after aligning ranks at the right."""
    rank = node.meta["val"].dim()
    found = set(range(rank))
    for operand in node.args:
        if not isinstance(operand, fx.Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
            continue
        shift = rank - operand.meta["val"].dim()
        found &= set(range(shift)) | {a + shift for a in _uniform(operand, seen)}
    return found


def _not_negative(node: Any) -> bool:
    """Is every element of this value provably >= 0?"""
    if isinstance(node, (int, float)):
        return node >= 0
    if not isinstance(node, fx.Node):
        return False
    if node.target in (aten.arange.default, aten.full_like.default, aten.zeros_like.default):
        return node.target is not aten.full_like.default or _not_negative(node.args[1])
    if node.target in (aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor, aten.view.default, aten.to.dtype):
        return _not_negative(node.args[0])
    if node.target in (aten.add.Tensor, aten.mul.Tensor):
        return all(_not_negative(a) for a in node.args)
    return False


def _compare_ge(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    limit = node.args[1]
    if isinstance(limit, (int, float)) and limit <= 0 and _not_negative(node.args[0]):
        return set(range(node.meta["val"].dim()))  # true everywhere
    return _elementwise(node, seen)


def _unsqueeze(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    rank = node.meta["val"].dim()
    at = int(node.args[1]) % rank  # type: ignore[arg-type]
    return {at} | {a if a < at else a + 1 for a in _uniform(node.args[0], seen)}


def _expand(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return set()
    shift = node.meta["val"].dim() - source.meta["val"].dim()
    return set(range(shift)) | {a + shift for a in _uniform(source, seen)}


def _same(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    return set(_uniform(node.args[0], seen))


def _everywhere(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    return set(range(node.meta["val"].dim()))


def _index(node: fx.Node, seen: dict[fx.Node, set[int]]) -> set[int]:
    """All axes indexed by tensors: the result varies only where an index does."""
    source, indices = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or any(i is None for i in indices):  # type: ignore[union-attr]
        return set()
    if len(indices) != source.meta["val"].dim():  # type: ignore[arg-type]
        return set()
    rank = node.meta["val"].dim()
    found = set(range(rank))
    for index in indices:  # type: ignore[union-attr]
        if not isinstance(index, fx.Node):
            return set()
        shift = rank - index.meta["val"].dim()
        found &= set(range(shift)) | {a + shift for a in _uniform(index, seen)}
    return found


# Operators that compute each element from the operands' elements at the same place, after broadcasting.
ELEMENTWISE: frozenset[Any] = frozenset(
    (
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.rsub.Scalar, aten.where.self,
        aten.__and__.Tensor, aten.__or__.Tensor, aten.logical_and.default, aten.logical_or.default, aten.logical_not.default,
        aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
        aten.eq.Scalar, aten.ne.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.ge.Scalar,
        aten.eq.Tensor, aten.ne.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.gt.Tensor, aten.ge.Tensor,
        aten.to.dtype, aten.to.device, aten.to.dtype_layout,
    )
)  # fmt: skip

_Rule = Callable[[fx.Node, dict[fx.Node, set[int]]], set[int]]
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.index.Tensor: _index,
    aten.ge.Scalar: _compare_ge,
    **dict.fromkeys((aten.slice.Tensor, aten.clone.default), _same),
    **dict.fromkeys((aten.new_ones.default, aten.new_zeros.default, aten.full.default, aten.ones.default), _everywhere),
    **dict.fromkeys((aten.zeros.default, aten.full_like.default, aten.ones_like.default), _everywhere),
}
