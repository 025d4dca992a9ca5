"""Around one attention: its arguments, and heads split from and merged into the rows of a projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from khtst_compile.program import Rewriter

aten = torch.ops.aten


def sdpa_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a scaled_dot_product_attention by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    given.update(dict(zip(names, node.args, strict=False)))
    given.update(node.kwargs)
    return given


def merged_heads(rw: Rewriter, value: fx.Node, before: fx.Node) -> fx.Node:
    """(batch, heads, length, head_dim) -> (batch, length, heads * head_dim), undoing a view + transpose where that made it."""
    _, h, _, d = value.meta["val"].shape
    if value.target is aten.transpose.int and set(value.args[1:]) in ({1, 2}, {-3, -2}):
        view = value.args[0]
        if isinstance(view, fx.Node) and view.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            source = view.args[0]
            if isinstance(source, fx.Node) and source.meta["val"].dim() == 3 and source.meta["val"].shape[2] == h * d:
                return source
    moved = rw.call(aten.transpose.int, value, 1, 2, before=before)
    sizes = [_size(rw, value, 0, before), _size(rw, value, 2, before), h * d]
    return rw.call(aten.reshape.default, moved, sizes, before=before)


def _size(rw: Rewriter, value: fx.Node, axis: int, before: fx.Node) -> Any:
    size = value.meta["val"].shape[axis]
    return size if isinstance(size, int) else rw.call(aten.sym_size.int, value, axis, before=before)


def replace_merged(rw: Rewriter, old: fx.Node, new: fx.Node, heads: tuple[int, int]) -> None:
    """`new` is (b, s, h*d). Users of `old` (b, h, s, d) that only merge the heads read it directly; others get it split again."""
    node, chain = old, [old]
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target not in (
            aten.transpose.int,
            aten.reshape.default,
            aten.view.default,
            aten.contiguous.default,
            aten.clone.default,
        ):
            break
        chain.append(user)
        node = user
        if user.meta["val"].dim() == 3:
            break
    transposes = [n for n in chain if n.target is aten.transpose.int]
    merged = tuple(chain[-1].meta["val"].shape)
    swaps_heads = len(transposes) == 1 and set(transposes[0].args[1:]) in ({1, 2}, {-3, -2})
    if swaps_heads and merged == tuple(new.meta["val"].shape):
        chain[-1].replace_all_uses_with(new)
        for n in reversed(chain):
            rw.graph.erase_node(n)
        return
    sizes = [_size(rw, new, 0, old), _size(rw, new, 1, old), *heads]
    split = rw.call(aten.view.default, new, sizes, before=old)
    rw.replace(old, rw.call(aten.transpose.int, split, 1, 2, before=old))
