"""What stands for an id: the nodes of a graph that depend on ids and constants alone, tabulated by running them.

A lookup, a gather from an expanded table and a product with one-hot rows are all the same then: a row for each id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.evaluate import FAILURES, Evaluator
from khtst_compile.codebooks.scores import SHAPES
from khtst_compile.program import arguments

aten = torch.ops.aten

_ARITHMETIC = (
    *SHAPES,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.neg.default,
    aten.to.dtype,
)
"""With constants: what a value may go through and still be the codebook's. Anything more is the decoder's."""
_TABLES = {aten.embedding.default: 0, aten.index.Tensor: 0, aten.index_select.default: 0, aten.gather.default: 0}
"""Operators that look ids up: which argument is the table."""


@dataclass(frozen=True)
class Values:
    """table: (heads, K, v) float32, the value of each id. nodes: those that hold it, row for row; through: (node, vector) of
    straight-through forms `vector + (value - vector)`, which equal the value but for rounding; within: all nodes it goes through."""

    table: torch.Tensor
    nodes: tuple[fx.Node, ...]
    through: tuple[tuple[fx.Node, fx.Node], ...]
    within: frozenset[fx.Node]


def find_values(ev: Evaluator, anchor: fx.Node, codes: int, width: int, heads: int = 1) -> Values | None:
    """anchor: the node that holds ids below `codes`, one a row, rows of a head together; width: features of the vector. None where they
    index no table."""
    rows = _numel(ev, anchor) // heads
    first = (torch.arange(rows) % codes).repeat(heads, 1)
    turned = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    given = [{anchor: ids.reshape(ev.shape(anchor))} for ids in (first, first[:, turned])]
    kinds: dict[fx.Node, str] = {anchor: "ids"}
    known: list[dict[fx.Node, Any]] = [dict(g) for g in given]
    for node in _after(ev, anchor):
        moving = [n for n in node.all_input_nodes if n not in ev.constants]
        if not moving or any(n not in kinds for n in moving):
            continue
        before = {kinds[n] for n in moving}
        if "value" in before and (before != {"value"} or node.target not in _ARITHMETIC):
            continue
        for values in known:
            values.update(ev.values([node], values))
        kind = _kind(known[0][node], known[1][node], turned, codes, heads)
        if kind is not None:
            kinds[node] = kind
    held = [n for n, kind in kinds.items() if kind == "value"]
    edge = [n for n in held if any(kinds.get(u) != "value" for u in n.users)]
    if not edge:
        return None
    tables = {n: tabulate(ev, anchor, n, codes, heads) for n in edge}
    fitting = [n for n in edge if tables[n].shape[-1] == width] or edge
    chosen = tables[fitting[-1]]
    same = tuple(n for n in edge if tables[n].shape == chosen.shape and torch.allclose(tables[n], chosen, 0, 0, equal_nan=True))
    return Values(chosen, same, tuple(t for n in same for t in straight_through(n)), frozenset(held))


def _kind(first: Any, second: Any, turned: torch.Tensor, codes: int, heads: int) -> str | None:
    """What a node holds, from its values for some ids and for the same ids in another order: "ids" (integers that follow from them),
    "one-hot", "value", or None."""
    if not isinstance(first, torch.Tensor):
        return None
    if not first.is_floating_point():
        return "ids"
    count = heads * len(turned)
    if first.dim() == 0 or first.numel() != count * first.shape[-1] or first.dtype is not torch.float32:
        return None
    rows, moved = first.reshape(heads, len(turned), -1), second.reshape(heads, len(turned), -1)
    if not torch.equal(torch.nan_to_num(rows[:, turned]), torch.nan_to_num(moved)):
        return None
    if rows.shape[2] == codes and bool(((rows == 0) | (rows == 1)).all()) and bool((rows.sum(-1) == 1).all()):
        return "one-hot"
    if rows.shape[2] == 1 and torch.equal(rows[0, :, 0], torch.arange(len(turned)).remainder(codes).float()):
        return "ids"
    return "value"


def tabulate(ev: Evaluator, anchor: fx.Node, node: fx.Node, codes: int, heads: int = 1) -> torch.Tensor:
    """What `node` holds for each id -> (heads, codes, v) float32."""
    rows = _numel(ev, anchor) // heads
    parts = []
    for start in range(0, codes, rows):
        ids = torch.arange(start, start + rows).clamp(max=codes - 1).repeat(heads, 1).reshape(ev.shape(anchor))
        parts.append(ev.value(node, {anchor: ids}).reshape(heads, rows, -1))
    return torch.cat(parts, 1)[:, :codes].clone()


def indexes_table(ev: Evaluator, anchor: fx.Node) -> bool:
    """Whether what follows from ids alone looks rows of a constant up, in whatever order: less than `find_values` asks for."""
    integers = {anchor}
    for node in _after(ev, anchor):
        seen = node.meta.get("val")
        table = arguments(node)[_TABLES[node.target]] if node.target in _TABLES else None
        if table is not None and table in ev.constants and table.meta["val"].is_floating_point():
            if integers.intersection(node.all_input_nodes):
                return True
        elif (
            isinstance(seen, torch.Tensor)
            and not seen.is_floating_point()
            and all(n in integers or n in ev.constants for n in node.all_input_nodes)
        ):
            integers.add(node)
    return False


def straight_through(value: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(node, vector) of each `vector + (value - vector)`."""
    found = []
    for difference in value.users:
        if difference.target is not aten.sub.Tensor or difference.kwargs or arguments(difference)[0] is not value:
            continue
        vector = arguments(difference)[1]
        for node in difference.users:
            if node.target is aten.add.Tensor and not node.kwargs and set(arguments(node)[:2]) == {vector, difference}:
                found.append((node, vector))
    return found


def same_ids(ev: Evaluator, anchor: fx.Node) -> list[fx.Node]:
    """`anchor` and the reshapes of it, row for row, that something else reads."""
    held = {anchor}
    for node in _after(ev, anchor):
        source = arguments(node)[0] if node.args else None
        if source in held and node.target in SHAPES and all(n in ev.constants or n in held for n in node.all_input_nodes):
            ids = torch.arange(_numel(ev, anchor)).reshape(ev.shape(anchor))
            if torch.equal(ev.value(node, {anchor: ids}).reshape(-1), ids.reshape(-1)):
                held.add(node)
    return [anchor, *(n for n in held if n is not anchor and any(u not in held for u in n.users))]


def _after(ev: Evaluator, anchor: fx.Node) -> Sequence[fx.Node]:
    """The nodes that depend on `anchor`, in order."""
    reached: dict[fx.Node, None] = {anchor: None}
    for node in ev.graph.nodes:
        if node.op == "call_function" and node not in ev.constants and any(n in reached for n in node.all_input_nodes):
            reached[node] = None
    return list(reached)[1:]


def _numel(ev: Evaluator, node: fx.Node) -> int:
    total = 1
    for size in ev.shape(node):
        total *= size
    return total


def holds_ids(ev: Evaluator, anchors: Sequence[fx.Node], codes: Sequence[int], results: Mapping[str, fx.Node]) -> list[str]:
    """The public outputs that hold the ids of `anchors` (rows, then levels) and nothing else."""
    count = _numel(ev, anchors[0])
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(k, (count,), generator=generator) for k in codes]
    given = {a: ids.reshape(ev.shape(a)) for a, ids in zip(anchors, drawn, strict=True)}
    wanted = torch.stack(drawn, -1)
    found = []
    for name, node in results.items():
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype is torch.bool:
            continue
        try:
            held = ev.value(node, given)
        except FAILURES:  # it depends on more than these ids
            continue
        if held.numel() == wanted.numel() and torch.equal(held.reshape(wanted.shape).long(), wanted):
            found.append(name)
    return found
