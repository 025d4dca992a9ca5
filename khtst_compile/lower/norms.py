"""Norms that a model writes out -> aten.layer_norm and aten.rms_norm, by the structure of the graph.

    c = x                                   (RMSNorm)      c = x - mean(x)                          (LayerNorm)
    v = mean(c^2) + eps                     c^2 as pow(c, 2), c * c, or the whole mean as var(x, unbiased=False)
    y = c * rsqrt(v)  or  c / sqrt(v)
    y * gamma, + beta                       constants of one row, where they are the only reader

All means are over the last axis with the axis kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from khtst_compile.lower.match import axis_is_last, bound, is_call, other, served, sole_user
from khtst_compile.program import Rewriter, arguments, call_nodes

aten = torch.ops.aten


def written_norms(rw: Rewriter) -> int:
    """Replace every written-out norm by the one operator that says so; returns how many."""
    count = 0
    for root in list(call_nodes(rw.graph, aten.rsqrt.default, aten.sqrt.default)):
        found = _normalized(root)
        if found is None or not served(found[0]):
            continue
        last, source, layer, eps = found
        width = source.meta["val"].shape[-1]
        if not isinstance(width, int):
            continue
        last, gamma = _row_constant(rw, last, aten.mul.Tensor, width)
        last, beta = _row_constant(rw, last, aten.add.Tensor, width) if layer else (last, None)
        if layer:
            new = rw.call(aten.layer_norm.default, source, [width], gamma, beta, eps, before=last, like=last)
        else:
            new = rw.call(aten.rms_norm.default, source, [width], gamma, eps, before=last, like=last)
        rw.replace(last, new)
        count += 1
    return count


def _normalized(root: fx.Node) -> tuple[fx.Node, fx.Node, bool, float] | None:
    """root: a (reciprocal) square root -> (c scaled by it, x, whether the mean was subtracted, eps); None for anything else."""
    (shifted,) = arguments(root)
    last = sole_user(root)
    if last is None or not is_call(shifted, aten.add.Tensor) or not isinstance(shifted.args[1], float):
        return None
    if not is_call(last, aten.mul.Tensor if root.target is aten.rsqrt.default else aten.div.Tensor):
        return None
    centered = other(last, root)
    if not isinstance(centered, fx.Node) or (last.target is aten.div.Tensor and last.args[1] is not root):
        return None
    whole = _without_mean(centered)
    if _is_mean_square(shifted.args[0], centered) or (whole is not None and _is_variance(shifted.args[0], whole)):
        return last, centered if whole is None else whole, whole is not None, float(shifted.args[1])
    return None


def _is_mean(node: Any) -> bool:
    return (
        is_call(node, aten.mean.dim) and len(node.args) == 3 and bool(node.args[2]) and axis_is_last(node.args[0], node.args[1])
    )


def _is_mean_square(node: Any, of: fx.Node) -> bool:
    if not _is_mean(node):
        return False
    square = arguments(node)[0]
    if is_call(square, aten.pow.Tensor_Scalar):
        return square.args[0] is of and bool(square.args[1] == 2)
    return is_call(square, aten.mul.Tensor) and bool(square.args == (of, of))


def _is_variance(node: Any, of: fx.Node) -> bool:
    """var(x, [-1], keepdim=True) with every element counted."""
    if not isinstance(node, fx.Node) or node.args[:1] != (of,):
        return False
    if node.target is aten.var.correction:
        given = {"correction": 1, "keepdim": False, **node.kwargs}
        return (
            len(node.args) == 2 and bool(given["correction"] == 0) and bool(given["keepdim"]) and axis_is_last(of, node.args[1])
        )
    if node.target is aten.var.dim and len(node.args) == 4:
        _, axes, unbiased, keepdim = arguments(node)
        return not unbiased and bool(keepdim) and axis_is_last(of, axes)
    return False


def _without_mean(node: fx.Node) -> fx.Node | None:
    """x of x - mean(x), else None."""
    if not is_call(node, aten.sub.Tensor):
        return None
    source, mean = arguments(node)[:2]
    return source if isinstance(source, fx.Node) and _is_mean(mean) and mean.args[0] is source else None


def _row_constant(rw: Rewriter, node: fx.Node, operator: Any, width: int) -> tuple[fx.Node, fx.Node | None]:
    """The only reader and its other operand, where that is a bound (width,) float32 tensor; else the node itself and None."""
    user = sole_user(node)
    if user is None or not is_call(user, operator):
        return node, None
    constant = other(user, node)
    if not isinstance(constant, fx.Node) or not bound(rw, constant):
        return node, None
    value = constant.meta["val"]
    fits = tuple(value.shape) == (width,) and value.dtype is torch.float32
    return (user, constant) if fits else (node, None)
