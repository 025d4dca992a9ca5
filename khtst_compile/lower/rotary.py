"""Rotary position embedding as models write it -> khtst::rotary on unsplit heads; repeated key heads -> shared ones."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from khtst_compile.lower.match import VIEWS, bound, is_call, sole_user
from khtst_compile.program import Rewriter, arguments, call_nodes

aten, khtst = torch.ops.aten, torch.ops.khtst


def fuse_rotary(rw: Rewriter) -> int:
    """x * cos + cat(-x[d/2:], x[:d/2]) * sin, x = transpose(view(projection)), with an RMSNorm per head between if there is one."""
    count = 0
    for add in list(call_nodes(rw.graph, aten.add.Tensor)):
        found = _turned(add)
        if found is None:
            continue
        x, cos, sin = found
        source = _split(rw, x)
        if source is None:
            continue
        flat, gamma, eps = source
        _, heads, _, width = x.meta["val"].shape
        new = rw.call(khtst.rotary.default, flat, cos, sin, gamma, eps, heads, width, [0], before=add)
        sizes = [rw.call(aten.sym_size.int, flat, i, before=add) for i in range(2)]
        split = rw.call(aten.view.default, new, [*sizes, heads, width], before=add)
        rw.replace(add, rw.call(aten.transpose.int, split, 1, 2, before=add))
        count += 1
    return count


def _turned(add: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin) of the sum; x (batch, heads, length, d), cos and sin (batch or 1, length, d)."""
    if not is_call(add, aten.add.Tensor) or add.meta["val"].dtype is not torch.float32 or add.meta["val"].dim() != 4:
        return None
    for plain, turned in itertools.permutations(arguments(add)[:2]):
        if not is_call(plain, aten.mul.Tensor) or not is_call(turned, aten.mul.Tensor):
            continue
        for (x, cos), (cat, sin) in itertools.product(
            itertools.permutations(arguments(plain)), itertools.permutations(arguments(turned))
        ):
            if _is_half_turn(cat, x):
                found = [_per_position(t, x) for t in (cos, sin)]
                if found[0] is not None and found[1] is not None:
                    return x, found[0], found[1]
    return None


def _is_half_turn(cat: Any, x: Any) -> bool:
    """Is `cat` (-x[..., d/2:], x[..., :d/2])?"""
    if not is_call(cat, aten.cat.default) or not isinstance(x, fx.Node) or len(cat.args) != 2 or cat.args[1] not in (-1, 3):
        return False
    width = x.meta["val"].shape[-1]
    parts = arguments(cat)[0]
    if len(parts) != 2 or not isinstance(width, int) or width % 2 or not is_call(parts[0], aten.neg.default):
        return False
    return _slice(parts[0].args[0], x) == (width // 2, width) and _slice(parts[1], x) == (0, width // 2)


def _slice(node: Any, of: fx.Node) -> tuple[int, int] | None:
    """(start, end) of a slice of the last axis of `of`."""
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not of or len(node.args) != 4 or node.args[1] not in (-1, 3):
        return None
    width = of.meta["val"].shape[-1]
    _, _, start, end = arguments(node)
    return int(start or 0) % width, min(int(end), width)


def _per_position(node: Any, x: Any) -> fx.Node | None:
    """t of unsqueeze(t, 1), t (batch or 1, length, d): the same for every head."""
    if not is_call(node, aten.unsqueeze.default) or node.args[1] not in (1, -3):
        return None
    source = arguments(node)[0]
    value, shape = source.meta["val"], x.meta["val"].shape
    fits = value.dim() == 3 and value.dtype is torch.float32 and value.shape[0] in (1, shape[0]) and value.shape[1:] == shape[2:]
    return source if fits else None


def _split(rw: Rewriter, x: fx.Node) -> tuple[fx.Node, fx.Node | None, float] | None:
    """(projection (batch, length, heads * d), gamma or None, eps) behind x = transpose([rms_norm](view(projection)), 1, 2)."""
    if not is_call(x, aten.transpose.int) or set(x.args[1:]) not in ({1, 2}, {-3, -2}):
        return None
    view, gamma, eps = arguments(x)[0], None, 0.0
    _, heads, _, width = x.meta["val"].shape
    if is_call(view, aten.rms_norm.default) and sole_user(view) is x and len(view.args) == 4:
        view, _, gamma, eps = arguments(view)
        if gamma is None or not bound(rw, gamma):
            return None
    if not is_call(view, *VIEWS):
        return None
    source = arguments(view)[0]
    fits = source.meta["val"].dim() == 3 and isinstance(heads, int) and source.meta["val"].shape[2] == heads * width
    return (source, gamma, float(eps)) if fits else None


def shared_heads(rw: Rewriter) -> int:
    """Attention whose keys and values are heads repeated in memory reads the heads themselves (enable_gqa)."""
    count = 0
    for sdpa in list(call_nodes(rw.graph, aten.scaled_dot_product_attention.default)):
        sources = [_repeated(a) for a in arguments(sdpa)[1:3]]
        if sources[0] is None or sources[1] is None or sources[0].meta["val"].shape[1] != sources[1].meta["val"].shape[1]:
            continue
        sdpa.args = (sdpa.args[0], *sources, *sdpa.args[3:])
        sdpa.kwargs = {**sdpa.kwargs, "enable_gqa": True}
        count += 1
    return count


def _repeated(node: Any) -> fx.Node | None:
    """x of reshape(expand(unsqueeze(x, 2)), (batch, heads, length, d)): each head several times in a row."""
    if not is_call(node, *VIEWS) or node.meta["val"].dim() != 4:
        return None
    expand = arguments(node)[0]
    if is_call(expand, aten.clone.default):
        expand = arguments(expand)[0]
    if not is_call(expand, aten.expand.default) or not is_call(expand.args[0], aten.unsqueeze.default):
        return None
    source, axis = arguments(expand.args[0])
    if axis not in (2, -3) or source.meta["val"].dim() != 4:
        return None
    (b, g, s, d), wide = source.meta["val"].shape, expand.meta["val"].shape
    same = tuple(wide) == (b, g, wide[2], s, d) and tuple(node.meta["val"].shape) == (b, g * wide[2], s, d)
    return source if same else None
