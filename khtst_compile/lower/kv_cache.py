"""Attention over int8 keys and values -> khtst::attention_int8, which reads the codes where they are.

What `passes/kv_cache.py` writes: codes of the cache and of the new positions side by side, times their scales, heads moved to the front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from khtst_compile.lower.cached import causal
from khtst_compile.lower.heads import merged_heads, replace_merged, sdpa_arguments
from khtst_compile.lower.match import VIEWS, is_call
from khtst_compile.program import Rewriter, arguments, call_nodes

aten, khtst = torch.ops.aten, torch.ops.khtst


def fuse_int8_attention(rw: Rewriter) -> int:
    """scaled_dot_product_attention over dequantized [past, new] under a causal mask -> khtst::attention_int8."""
    count = 0
    for sdpa in list(call_nodes(rw.graph, aten.scaled_dot_product_attention.default)):
        given = sdpa_arguments(sdpa)
        keys, values = _kept(given["key"]), _kept(given["value"])
        if keys is None or values is None or given["dropout_p"] or given["is_causal"]:
            continue
        query = given["query"]
        heads, new, head_dim = query.meta["val"].shape[1:]
        sizes = (heads, keys.heads, head_dim)
        if (
            not all(isinstance(n, int) for n in sizes)
            or heads % keys.heads
            or (keys.head_dim, values.head_dim) != (head_dim,) * 2
        ):
            continue
        # One pair of tensors holds the scales of both.
        if keys.scales != values.scales or (keys.first, values.first, values.heads) != (0, keys.heads, keys.heads):
            continue
        if not causal(given["attn_mask"], keys.past.meta["val"].shape[0], new):
            continue
        scale = given["scale"] if given["scale"] is not None else float(head_dim) ** -0.5
        operands = (merged_heads(rw, query, sdpa), keys.new, values.new, keys.scales[1], keys.past, values.past, keys.scales[0])
        made = rw.call(khtst.attention_int8.default, *operands, *sizes, scale, [0], before=sdpa, like=sdpa)
        replace_merged(rw, sdpa, made, (heads, head_dim))
        count += 1
    return count


def read_projections(rw: Rewriter) -> int:
    """khtst::quantize_cache of heads that were split and merged again reads what they were split from."""
    count = 0
    for node in list(call_nodes(rw.graph, khtst.quantize_cache.default)):
        for place, value in enumerate(arguments(node)[:2]):
            moved: Any = arguments(value)[0] if is_call(value, *VIEWS) else None
            if is_call(moved, aten.transpose.int) and tuple(moved.args[1:]) == (1, 2) and moved.args[0].meta["val"].dim() == 4:
                node.update_arg(place, merged_heads(rw, moved.args[0], node))
        count += 1
    return count


@dataclass(frozen=True)
class _Kept:
    """past, new: codes (positions, batch, heads * head_dim); scales: (past, new), (positions, batch, n), those of these heads from
    `first` on."""

    past: fx.Node
    new: fx.Node
    scales: tuple[fx.Node, fx.Node]
    first: int
    heads: int
    head_dim: int


def _kept(whole: Any) -> _Kept | None:
    """permute(reshape(float(cat(codes))) * unsqueeze(slice(cat(scales))), (1, 2, 0, 3)); None for anything else."""
    if not is_call(whole, aten.permute.default) or list(arguments(whole)[1]) != [1, 2, 0, 3]:
        return None
    product = arguments(whole)[0]
    if not is_call(product, aten.mul.Tensor) or not is_call(product.args[1], aten.unsqueeze.default):
        return None
    split, (its, axis) = product.args[0], product.args[1].args[:2]
    if axis not in (3, -1) or not is_call(split, *VIEWS) or not is_call(its, aten.slice.Tensor) or len(its.args) != 4:
        return None
    wide = split.args[0]
    scales, axis, first, end = its.args
    parts = [_joined(scales), _joined(wide.args[0]) if is_call(wide, aten.to.dtype) else None]
    if parts[0] is None or parts[1] is None or axis not in (2, -1):
        return None
    heads, head_dim = split.meta["val"].shape[2:]
    codes = parts[1][0].meta["val"]
    if codes.dtype is not torch.int8 or codes.shape[2] != heads * head_dim or end - first != heads:
        return None
    return _Kept(*parts[1], parts[0], first, heads, head_dim)


def _joined(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(past, new) of their cat along positions."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2 or (*node.args, 0)[1] != 0:
        return None
    past, new = node.args[0]
    return past, new
