"""The value of any node of a graph, given those of some others: what a codebook computes is asked of the model's own operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Take the shape of their first argument, never its values.
_LIKE: dict[Any, float | None] = {aten.zeros_like.default: 0.0, aten.ones_like.default: 1.0, aten.full_like.default: None}
_NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
WANTED_ROWS = 19  # what an axis that varies is taken as, where its range allows: a size that models seldom have
FAILURES = (RuntimeError, KeyError, IndexError, ValueError, TypeError)
"""What running a part of a graph on made-up values raises where it expects others, or needs a public input."""


class Evaluator:
    """Runs parts of `graph` at one choice of sizes for the axes that vary.

    tensors: graph input -> bound tensor. constants: nodes that depend on no public input's values, such as a codebook that is worked out
    from a parameter; each is computed once.
    """

    def __init__(self, graph: fx.Graph, tensors: Mapping[str, torch.Tensor], ranges: Mapping[str, tuple[int, int]]):
        self.graph, self.tensors = graph, tensors
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self._sizes = _choose_sizes(graph, ranges)
        self.constants: set[fx.Node] = set()
        self._known: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if self._is_constant(node):
                self.constants.add(node)

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node.name in self.tensors
        if node.op != "call_function":
            return False
        if isinstance(node.meta.get("val"), _SIZES) or node.target in _LIKE or node.target in _NEW:
            return True
        return all(n in self.constants for n in node.all_input_nodes)

    def size(self, value: Any) -> Any:
        """A size of the graph as a number."""
        if isinstance(value, _SIZES):
            expression = value.node.expr
            found = expression.subs({s: self._sizes.get(str(s), WANTED_ROWS) for s in expression.free_symbols})
            return (
                bool(found)
                if isinstance(value, torch.SymBool)
                else int(found)
                if isinstance(value, torch.SymInt)
                else float(found)
            )
        return value

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """A tensor's shape at the chosen sizes."""
        return tuple(self.size(s) for s in node.meta["val"].shape)

    def value(self, node: fx.Node, given: Mapping[fx.Node, Any] | None = None) -> Any:
        """What `node` computes where the nodes in `given` have those values. Raises KeyError where it needs a public input."""
        return self.values([node], given)[node]

    def values(self, nodes: Iterable[fx.Node], given: Mapping[fx.Node, Any] | None = None) -> dict[fx.Node, Any]:
        """See `value`; nodes -> values of all that had to be computed."""
        known: dict[fx.Node, Any] = dict(given or {})
        needed: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in known or node in needed:
                continue
            if node in self._known:
                known[node] = self._known[node]
                continue
            needed.add(node)
            if not self._alone(node):
                pending.extend(node.all_input_nodes)
        with torch.no_grad():
            for node in sorted(needed, key=self.order.__getitem__):
                known[node] = self._compute(node, known)
                if node in self.constants:
                    self._known[node] = known[node]
        return known

    def _alone(self, node: fx.Node) -> bool:
        """Whether a node's value follows from recorded shapes."""
        return node.target in _LIKE or isinstance(node.meta.get("val"), _SIZES)

    def _compute(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            if node.name not in self.tensors:
                raise KeyError(node.name)
            return self.tensors[node.name]
        seen = node.meta.get("val")
        if isinstance(seen, _SIZES):
            return self.size(seen)
        if node.target in _LIKE:
            filled = _LIKE[node.target]
            fill: Any = node.args[1] if filled is None else filled
            return torch.full(self.shape(node), fill, dtype=seen.dtype)  # type: ignore[union-attr]
        args = fx.map_arg(node.args, lambda n: known[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: known[n])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def rows(self, source: fx.Node, wanted: Sequence[fx.Node], rows: torch.Tensor) -> list[torch.Tensor]:
        """rows: (m, d), put through `source` (..., d) a graphful at a time -> (m, width) of each wanted node, row by row."""
        shape = self.shape(source)
        count = _product(shape[:-1])
        made: list[list[torch.Tensor]] = [[] for _ in wanted]
        for part in torch.split(rows, max(count, 1)):
            padded = torch.cat([part, part[-1:].expand(count - len(part), -1)]) if len(part) < count else part
            found = self.values(wanted, {source: padded.reshape(shape)})
            for kept, node in zip(made, wanted, strict=True):
                kept.append(found[node].reshape(count, -1)[: len(part)])
        return [torch.cat(m) for m in made]


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _choose_sizes(graph: fx.Graph, ranges: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Symbol -> a size in its range."""
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                for symbol in size.node.expr.free_symbols:
                    low, high = ranges.get(str(symbol), (1, WANTED_ROWS))
                    sizes[str(symbol)] = max(low, min(high, WANTED_ROWS))
    return sizes


def ranges_of(constraints: Mapping[Any, Any]) -> dict[str, tuple[int, int]]:
    """`ExportedProgram.range_constraints` -> symbol -> (low, high)."""
    found = {}
    for symbol, limits in constraints.items():
        low = int(limits.lower) if limits.lower.is_Integer else 1
        high = int(limits.upper) if limits.upper.is_Integer else 2**31
        found[str(symbol)] = (max(low, 1), high)
    return found
