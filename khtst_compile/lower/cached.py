"""Attention over a cache and the new positions -> khtst::attention_cached, which reads both where they are.

What capture writes (capture/decoder.py): keys and values are the cache, its heads moved to the front, with the new ones behind it, and
the mask compares positions counted from the cache's length with positions counted from zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from khtst_compile.lower.heads import merged_heads, replace_merged, sdpa_arguments
from khtst_compile.lower.match import VIEWS
from khtst_compile.program import Rewriter, arguments, call_nodes

aten, khtst = torch.ops.aten, torch.ops.khtst


def fuse_cached_attention(rw: Rewriter) -> int:
    """scaled_dot_product_attention over [past, new] under a causal mask -> khtst::attention_cached on unsplit tensors."""
    count = 0
    for sdpa in list(call_nodes(rw.graph, aten.scaled_dot_product_attention.default)):
        given = sdpa_arguments(sdpa)
        query = given["query"]
        keys, values = _past_and_new(given["key"]), _past_and_new(given["value"])
        if keys is None or values is None or given["dropout_p"] or given["is_causal"]:
            continue
        heads, new, head_dim = query.meta["val"].shape[1:]
        _, kv_heads, _, width = keys[1].meta["val"].shape
        sizes = (heads, kv_heads, head_dim)
        if not all(isinstance(n, int) for n in sizes) or width != head_dim or heads % kv_heads:
            continue
        if values[1].meta["val"].shape[1] != kv_heads or values[1].meta["val"].shape[3] != head_dim:
            continue
        if not causal(given["attn_mask"], keys[0].meta["val"].shape[0], new):
            continue
        flat = [merged_heads(rw, t, sdpa) for t in (query, keys[1], values[1])]
        scale = given["scale"] if given["scale"] is not None else float(head_dim) ** -0.5
        made = rw.call(
            khtst.attention_cached.default, *flat, keys[0], values[0], None, *sizes, scale, [0, 0, 0], before=sdpa, like=sdpa
        )
        replace_merged(rw, sdpa, made, (heads, head_dim))
        count += 1
    return count


def cache_rows(rw: Rewriter) -> int:
    """What goes into the cache, (batch, heads, new, d) as (new, batch, heads * d), is the projection or rotary with its first axes swapped.

    Heads split and merged again would be copied once for each of the two.
    """
    count = 0
    for rows in list(call_nodes(rw.graph, *VIEWS)):
        moved = arguments(rows)[0]
        if (
            not isinstance(moved, fx.Node)
            or moved.target is not aten.permute.default
            or list(arguments(moved)[1]) != [2, 0, 1, 3]
        ):
            continue
        value, wanted = moved.meta["val"].shape, rows.meta["val"].shape
        if not all(isinstance(n, int) for n in value[2:]) or tuple(wanted) != (*value[:2], value[2] * value[3]):
            continue
        flat = merged_heads(rw, arguments(moved)[0], rows)
        rw.replace(rows, rw.call(aten.transpose.int, flat, 0, 1, before=rows))
        count += 1
    return count


def _past_and_new(whole: Any) -> tuple[fx.Node, fx.Node] | None:
    """cat([past (T, b, h * d) as (b, h, T, d), new (b, h, s, d)], 2) -> (past, new); None for anything else."""
    if not isinstance(whole, fx.Node) or whole.target is not aten.cat.default or len(arguments(whole)) != 2:
        return None
    parts, axis = arguments(whole)
    if len(parts) != 2 or axis not in (2, -2) or parts[0].target is not aten.permute.default:
        return None
    split, order = arguments(parts[0])
    if list(order) != [1, 2, 0, 3] or split.target not in VIEWS:
        return None
    past = arguments(split)[0]
    value, (_, _, heads, head_dim) = past.meta["val"], split.meta["val"].shape
    if value.dim() != 3 or value.dtype is not torch.float32 or value.shape[2] != heads * head_dim:
        return None
    return past, parts[1]


def causal(mask: Any, past: Any, new: Any) -> bool:
    """Is it provably `past + i >= j` over (new, past + new), and nothing else?"""
    compare = _below_unsqueezes(mask)[0]
    if compare is None or compare.target is not aten.ge.Tensor:
        return False
    rows, columns = (_below_unsqueezes(a) for a in arguments(compare))
    if rows[1] != [1] or columns[1] != [0]:  # which axis each is spread along
        return False
    whole = str(past + new)
    return _counted(rows[0]) == (str(past), whole) and _counted(columns[0]) == ("0", whole)


def _below_unsqueezes(node: Any) -> tuple[fx.Node | None, list[int]]:
    """The node under a chain of unsqueezes, and their axes."""
    axes: list[int] = []
    while isinstance(node, fx.Node) and node.target is aten.unsqueeze.default:
        axes.append(int(arguments(node)[1]))
        node = arguments(node)[0]
    return (node if isinstance(node, fx.Node) else None), axes


def _counted(node: fx.Node | None) -> tuple[str, str] | None:
    """(start, end) of an arange in steps of one, as expressions of sizes; None for anything else."""
    if node is None or node.target not in (aten.arange.default, aten.arange.start):
        return None
    limits = [str(a.meta["val"]) if isinstance(a, fx.Node) else str(a) for a in arguments(node)]
    return (limits[0], limits[1]) if node.target is aten.arange.start else ("0", limits[0])
