"""Attention rows that may see no key: zeros in torch. torch.onnx writes a softmax of nothing, NaN, for a float mask, and for a bool mask
turns every NaN into zero, also those of the input; here both come out as in torch."""

from __future__ import annotations

import math

import torch
from torch import fx

from khtst_compile.program import Program, Rewriter, arguments, call_nodes

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


def zero_hidden_rows(program: Program) -> Program:
    """Make the result of masked attention 0 where the mask (bool, or float with -inf) hides every key, as torch has it."""
    rw = Rewriter(program)
    masks: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    zero: fx.Node | None = None
    for node in list(call_nodes(rw.graph, ATTENTION)):
        mask = arguments(node)[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node):
            continue
        after = node.next
        if zero is None:
            zero = rw.add_tensor("nothing_seen", torch.zeros(()))
            hidden = rw.add_tensor("hidden", torch.tensor(-math.inf))
        if mask not in masks:
            is_bool = mask.meta["val"].dtype is torch.bool
            added = rw.call(aten.where.self, mask, zero, hidden, before=node) if is_bool else mask
            masks[mask] = added, _any_shown(rw, mask, node)
        added, shown = masks[mask]
        node.replace_input_with(mask, added)
        made = rw.call(aten.where.self, shown, node, zero, before=after, like=node)
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)  # type: ignore[misc]
    return rw.finish() if masks else program


def _any_shown(rw: Rewriter, mask: fx.Node, before: fx.Node) -> fx.Node:
    """mask: (..., queries or 1, keys) -> (..., queries or 1, 1) bool, whether a key is seen."""
    if mask.meta["val"].dtype is torch.bool:
        return rw.call(aten.any.dim, mask, -1, True, before=before)
    return rw.call(aten.gt.Scalar, rw.call(aten.amax.default, mask, [-1], True, before=before), -math.inf, before=before)
