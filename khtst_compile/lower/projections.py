"""Several int8 linears of one input as one: their weights stacked, each read from its own columns."""

from __future__ import annotations

import torch
from torch import fx

from khtst_compile.lower.match import sites
from khtst_compile.program import Rewriter, arguments

khtst = torch.ops.khtst


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
