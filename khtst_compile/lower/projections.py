"""Several int8 linears of one input as one: their weights stacked, each read from its own columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from khtst_compile.lower.match import sites
from khtst_compile.program import Rewriter, arguments, call_nodes

aten, khtst = torch.ops.aten, torch.ops.khtst

# Operators that read their first operands from a column on -> the argument that says from which, one number for each.
_OFFSETS: dict[Any, int] = {
    khtst.attention.default: 7,
    khtst.attention_cached.default: 10,
    khtst.attention_int8.default: 11,
    khtst.quantize_cache.default: 4,
    khtst.rotary.default: 7,
}


def merge_projections(rw: Rewriter) -> int:
    """w8a8_linear nodes of the same codes, each read by an operator that can be given a column offset, become one.

    Other readers, such as the cache that is handed to the next call, get a slice.
    """
    groups: dict[tuple[Any, Any], list[fx.Node]] = {}
    for node in call_nodes(rw.graph, khtst.w8a8_linear.default):
        if any(u.target in _OFFSETS for u in node.users):
            groups.setdefault(arguments(node)[:2], []).append(node)
    count = 0
    for nodes in groups.values():
        if not mergeable(rw, nodes):
            continue
        whole = merged(rw, nodes, before=nodes[0])
        for node, offset in zip(nodes, offsets(nodes), strict=True):
            _read_columns(rw, node, whole, offset)
        count += 1
    return count


def merge_rotaries(rw: Rewriter) -> int:
    """rotary of heads that lie side by side in one tensor, turned by the same angles, becomes one; returns how many were merged away.

    Heads that are normalized first have each their own gamma, and stay apart.
    """
    count = 0
    last: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(call_nodes(rw.graph, khtst.rotary.default)):
        x, cos, sin, gamma, eps, heads, head_dim, (offset,) = arguments(node)
        key = (x, cos, sin, head_dim)
        before, last[key] = last.get(key), node
        if gamma is not None or before is None or before.args[3] is not None:
            continue
        _, _, _, _, _, earlier, _, (start,) = arguments(before)
        if start + earlier * head_dim != offset:
            continue
        whole = rw.call(khtst.rotary.default, x, cos, sin, None, eps, earlier + heads, head_dim, [start], before=before)
        for old, column in ((before, 0), (node, earlier * head_dim)):
            _read_columns(rw, old, whole, column)
        last[key] = whole
        count += 1
    return count


def _read_columns(rw: Rewriter, old: fx.Node, whole: fx.Node, offset: int) -> None:
    """All readers of `old` read `whole` from column `offset` on; `old` is erased."""
    axis, width = old.meta["val"].dim() - 1, int(old.meta["val"].shape[-1])
    part: fx.Node | None = None
    for user in list(old.users):
        if user.target in _OFFSETS:
            _shift(user, old, whole, offset)
        elif user.target is aten.sym_size.int and user.args[1] in range(axis):
            user.replace_input_with(old, whole)
        else:
            part = part or rw.call(aten.slice.Tensor, whole, axis, offset, offset + width, before=old, like=old)
            user.replace_input_with(old, part)
    rw.graph.erase_node(old)


def _shift(user: fx.Node, old: fx.Node, new: fx.Node, offset: int) -> None:
    """Let an operator read `new` from column `offset` wherever it read `old`."""
    args = list(user.args)
    place = _OFFSETS[user.target]
    starts = list(args[place])  # type: ignore[arg-type]
    for i in range(len(starts)):
        if args[i] is old:
            args[i], starts[i] = new, starts[i] + offset
    args[place] = starts
    user.args = tuple(args)


def mergeable(rw: Rewriter, nodes: list[fx.Node]) -> bool:
    """Are there at least two, with weights and scales that are known now?"""
    known = all(o is None or rw.value(o) is not None for n in nodes for o in arguments(n)[2:5])
    return len(nodes) > 1 and known


def merged(rw: Rewriter, nodes: list[fx.Node], before: fx.Node) -> fx.Node:
    """One w8a8_linear for several of the same codes and scale; the caller rewires their readers to `offsets` and erases them."""
    weights, scales, biases = ([_value(rw, n, i) for n in nodes] for i in (2, 3, 4))
    widths = [int(n.meta["val"].shape[-1]) for n in nodes]
    hint = "+".join(n.name for n in nodes)
    bias = None
    if any(b is not None for b in biases):
        bias = rw.add_tensor(
            hint + "_bias", torch.cat([torch.zeros(w) if b is None else b for b, w in zip(biases, widths, strict=True)])
        )
    node = rw.call(
        khtst.w8a8_linear.default,
        *arguments(nodes[0])[:2],
        rw.add_tensor(hint + "_weight", torch.cat([w for w in weights if w is not None])),
        rw.add_tensor(hint + "_scale", torch.cat([s for s in scales if s is not None])),
        bias,
        before=before,
        like=nodes[0],
    )
    node.meta["khtst_sites"] = [site for n in nodes for site in sites(n)]
    return node


def offsets(nodes: list[fx.Node]) -> list[int]:
    """The first column of each in what `merged` makes."""
    widths = [int(n.meta["val"].shape[-1]) for n in nodes]
    return [sum(widths[:i]) for i in range(len(widths))]


def _value(rw: Rewriter, node: fx.Node, place: int) -> torch.Tensor | None:
    operand = arguments(node)[place] if place < len(node.args) else None
    return None if operand is None else rw.value(operand)
