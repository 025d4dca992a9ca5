"""Puts lookups into a graph where codebooks were found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.chains import live_nodes
from khtst_compile.codebooks.found import Codebook, Steps, Vectors
from khtst_compile.codebooks.frozen import Tables
from khtst_compile.codebooks.scores import SHAPES
from khtst_compile.errors import PassError
from khtst_compile.program import Rewriter
from khtst_compile.sizes import same_shape

aten = torch.ops.aten
khtst = torch.ops.khtst

_HANDED_ON = (
    *SHAPES,
    aten.stack.default,
    aten.cat.default,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.to.dtype,
    aten._to_copy.default,
)


def emit_vectors(rewriter: Rewriter, frozen: Sequence[tuple[Vectors, Tables, bool]]) -> tuple[list[fx.Node], dict[str, str]]:
    """One lookup, or one for each head: (codebook, its tensors, whether int8 may search first) -> the lookup nodes, and which new node
    holds what an old one did."""
    book = frozen[0][0]
    anchors = [rewriter.node(name) for name in book.anchors]
    at, z = anchors[0], rewriter.node(book.z)
    nodes, values, ids = [], [], []
    for number, (one, tables, certified) in enumerate(frozen):
        given = z if one.head is None else rewriter.call(aten.select.int, z, 0, number, before=at)
        bound = [
            rewriter.add_tensor(f"{one.site}_{what}", tensor) if tensor is not None else None
            for what, tensor in (("codes", tables.codes), ("bias", tables.bias), ("table", tables.table))
        ]
        node = rewriter.call(khtst.codebook_lookup.default, given, *bound, one.running, certified, before=at)
        nodes.append(node)
        values.append(rewriter.getitem(node, 0, at))
        ids.append(rewriter.getitem(node, 1, at))
    value, chosen = values[0], ids[0]
    if book.head is not None:
        value, chosen = (rewriter.call(aten.stack.default, parts, 0, before=at) for parts in (values, ids))
    _hand_out(rewriter, book, z, chosen, at)
    for number, anchor in enumerate(anchors):
        level = chosen if len(anchors) == 1 else rewriter.call(aten.select.int, chosen, -1, number, before=at)
        for old in (rewriter.node(name) for name in book.levels[number].ids):
            old.replace_all_uses_with(_cast(rewriter, _shaped(rewriter, level, old, z, at), anchor, at))
    last = book.levels[-1]
    return nodes, _replace_values(rewriter, last.values, last.through, value, z, at)


def emit_steps(rewriter: Rewriter, book: Steps) -> tuple[fx.Node, dict[str, str]]:
    """The lookup node of a function of steps, and which new node holds what an old one did."""
    anchor, z = rewriter.node(book.anchor), rewriter.node(book.z)
    after = [n for n in rewriter.graph.nodes if z in n.all_input_nodes]
    at = after[0]
    bound = [
        rewriter.add_tensor(f"{book.site}_{what}", tensor)
        for what, tensor in (("thresholds", book.thresholds), ("steps", book.steps), ("basis", book.basis))
    ]
    node = rewriter.call(khtst.step_lookup.default, z, *bound, before=at, like=anchor)
    value, ids = rewriter.getitem(node, 0, at), rewriter.getitem(node, 1, at)
    anchor.replace_all_uses_with(_cast(rewriter, _shaped(rewriter, ids, anchor, z, at), anchor, at))
    return node, _replace_values(rewriter, book.values, book.through, value, z, at)


def only_handed_out(graph: fx.Graph, book: Codebook) -> str | None:
    """What computes with the ids of a codebook besides its own values (an operator's name), or None where they are only handed on."""
    last = book.levels[-1] if isinstance(book, Vectors) else book
    names = {*book.anchors, *last.values, *(n for n, _ in last.through)}
    replaced = {n for n in graph.nodes if n.name in names}
    reached = {n for n in graph.nodes if n.name in book.anchors}
    live = live_nodes(graph, replaced)
    for node in graph.nodes:
        if node in reached or node not in live or node.op == "output" or not reached.intersection(node.all_input_nodes):
            continue
        if node.target not in _HANDED_ON:
            return str(node.target)
        reached.add(node)
    return None


def _hand_out(rewriter: Rewriter, book: Codebook, z: fx.Node, ids: fx.Node, at: fx.Node) -> None:
    """Let the public output that holds the ids be those of the lookup, instead of level by level."""
    if book.ids is None or len(book.anchors) == 1:
        return
    results = rewriter.results()
    index = next(i for i, s in enumerate(rewriter.program.outputs) if book.ids["output"] == s.name)
    old = results[index]
    results[index] = _cast(rewriter, _shaped(rewriter, ids, old, z, at), old, at)
    rewriter.return_instead(results)


def _replace_values(
    rewriter: Rewriter, values: Sequence[str], through: Sequence[tuple[str, str]], value: fx.Node, z: fx.Node, at: fx.Node
) -> dict[str, str]:
    names = {}
    for name in (*values, *(n for n, _ in through)):
        old = rewriter.node(name)
        new = _shaped(rewriter, value, old, z, at)
        old.replace_all_uses_with(new)
        names[name] = new.name
    return names


def _cast(rewriter: Rewriter, node: fx.Node, like: fx.Node, at: fx.Node) -> fx.Node:
    dtype = like.meta["val"].dtype
    return node if node.meta["val"].dtype is dtype else rewriter.call(aten.to.dtype, node, dtype, before=at)


def _shaped(rewriter: Rewriter, node: fx.Node, like: fx.Node, z: fx.Node, at: fx.Node) -> fx.Node:
    """`node` in the shape of `like`, which holds as many rows in the same order; sizes that vary are read off z."""
    wanted = like.meta["val"].shape
    if same_shape(node.meta["val"].shape, wanted):
        return node
    axes = {str(s): i for i, s in enumerate(z.meta["val"].shape) if isinstance(s, torch.SymInt)}
    sizes: list[Any] = []
    for size in wanted:
        if not isinstance(size, torch.SymInt):
            sizes.append(int(size))
        elif str(size) in axes:
            sizes.append(rewriter.call(aten.sym_size.int, z, axes[str(size)], before=at))
        else:
            sizes.append(-1)
    if sizes.count(-1) > 1:
        raise PassError(
            f"node {like.name!r} has shape {tuple(wanted)}, whose sizes do not follow from those of {z.name!r}; make one of them fixed"
        )
    return rewriter.call(aten.reshape.default, node, sizes, before=at)
