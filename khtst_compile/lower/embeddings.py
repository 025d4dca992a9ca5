"""One to three table lookups added up, with the norm and the quantizer that follow -> khtst::embed and its longer forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from khtst_compile.linears import MAX_RANK
from khtst_compile.lower.match import bound, is_call, sole_user
from khtst_compile.program import Rewriter, arguments, call_nodes
from khtst_compile.sizes import same_shape

aten, khtst = torch.ops.aten, torch.ops.khtst

_TABLES = 3
_FOLLOWERS: dict[Any, Any] = {
    khtst.norm.default: khtst.embed_norm.default,
    khtst.norm_quantize.default: khtst.embed_norm_quantize.default,
}


def fuse_embeddings(rw: Rewriter) -> int:
    """Sums of lookups, outermost first, so that a sum inside another is not taken by itself."""
    count = 0
    for node in reversed(list(call_nodes(rw.graph, aten.embedding.default, aten.add.Tensor))):
        if node.graph is not rw.graph or not node.users:
            continue
        lookups = _lookups(rw, node)
        if lookups is None:
            continue
        operands = [x for pair in lookups for x in pair] + [None] * (2 * (_TABLES - len(lookups)))
        user = sole_user(node)
        if user is not None and user.target in _FOLLOWERS:
            rw.replace(user, rw.call(_FOLLOWERS[user.target], *operands, *user.args[1:], before=user))
            rw.graph.erase_node(node)
        else:
            rw.replace(node, rw.call(khtst.embed.default, *operands, before=node))
        count += 1
        rw.graph.eliminate_dead_code()
    return count


def _lookups(rw: Rewriter, node: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """(ids, table) of each lookup, in the order in which ((a + b) + c) adds them; None where `node` is anything else."""
    terms = _terms(node)
    if terms is None or len(terms) > _TABLES:
        return None
    shape = tuple(node.meta["val"].shape[:-1])
    pairs = []
    for term in terms:
        table, ids = arguments(term)[:2]
        value = table.meta["val"]
        if not bound(rw, table) or value.dtype is not torch.float32 or value.shape[1] != node.meta["val"].shape[-1]:
            return None
        ids = _unexpanded(ids)
        if ids.meta["val"].dtype not in (torch.int64, torch.int32) or not _fits(ids, shape):
            return None
        pairs.append((ids, table))
    if not same_shape(pairs[0][0].meta["val"].shape, shape) and len(pairs) > 1:
        pairs[:2] = pairs[1::-1]  # a + b is b + a; the first one's axes are the kernel's
    full = same_shape(pairs[0][0].meta["val"].shape, shape)
    return pairs if full and 1 <= len(shape) < MAX_RANK else None


def _terms(node: Any) -> list[fx.Node] | None:
    if is_call(node, aten.embedding.default):
        return [node]
    if not is_call(node, aten.add.Tensor):
        return None
    left, right = arguments(node)[:2]
    if is_call(left, aten.embedding.default) and is_call(right, aten.add.Tensor):
        left, right = right, left
    first, second = _terms(left), _terms(right)
    if first is None or second is None or len(second) != 1 or any(sole_user(t) is None for t in (left, right)):
        return None
    return first + second


def _unexpanded(ids: fx.Node) -> fx.Node:
    """What an expand repeats along axes of one: the kernel repeats it by itself."""
    while is_call(ids, aten.expand.default):
        source = arguments(ids)[0]
        if source.meta["val"].dim() != ids.meta["val"].dim():
            break
        ids = source
    return ids


def _fits(ids: fx.Node, shape: tuple[Any, ...]) -> bool:
    """Of this shape, or of 1 in all axes but the last."""
    mine = ids.meta["val"].shape
    return same_shape(mine, shape) or same_shape(mine, (*(1 for _ in shape[:-1]), shape[-1]))
