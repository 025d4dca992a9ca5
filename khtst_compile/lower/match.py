"""What the rules of fusion ask about a node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from khtst_compile.linears import MAX_RANK
from khtst_compile.program import Rewriter, arguments, site_of

aten = torch.ops.aten

VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
"""What shows the same values in another shape."""


def served(node: fx.Node) -> bool:
    """Do row kernels take a result of this dtype and number of axes?"""
    value = node.meta["val"]
    return value.dtype is torch.float32 and 2 <= value.dim() <= MAX_RANK


def bound(rw: Rewriter, *operands: Any) -> bool:
    """Is each of these a tensor known now (or absent)? Kernels take their weights as constants."""
    return all(o is None or (isinstance(o, fx.Node) and rw.value(o) is not None) for o in operands)


def sites(node: fx.Node) -> list[str]:
    """The modules a fused node stands for."""
    return list(node.meta.get("khtst_sites", [site_of(node)]))


def is_call(node: Any, *targets: Any) -> bool:
    """Is it a call of one of these operators, without keyword arguments?"""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets and not node.kwargs


def sole_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads it, or None where there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def other(node: fx.Node, one: fx.Node) -> Any:
    """The second operand of a binary operator, whichever side `one` is on."""
    first, second, *_ = arguments(node)
    return second if first is one else first


def axis_is_last(node: fx.Node, axes: Any) -> bool:
    """Do `axes` (a list or a number) name the last axis of this tensor alone?"""
    listed = axes if isinstance(axes, (list, tuple)) else [axes]
    return [int(a) % node.meta["val"].dim() for a in listed] == [node.meta["val"].dim() - 1]
