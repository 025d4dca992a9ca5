"""Sizes that vary: which axis of which input has one, and how a size is worked out from the inputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from khtst_compile.errors import UnsupportedError
from khtst_compile.program import Program, Rewriter, placeholders, source_line

aten = torch.ops.aten


def axis_names(program: Program) -> dict[str, str]:
    """Symbol of a size that varies -> the axis' public name, in the order of the inputs' axes."""
    nodes = {n.name: n for n in placeholders(program.graph)}
    named: dict[str, str] = {}
    for name, spec in zip(program.user_inputs(), program.inputs, strict=True):
        for size, axis in zip(nodes[name].meta["val"].shape, spec.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and isinstance(axis, str):
                named.setdefault(str(size), axis)
    return named


def taken_apart(node: fx.Node, size: Any, names: dict[str, str], symbols: dict[str, Any]) -> list[Any]:
    """The sizes a size is the product of: itself, or symbols in the order of `names` and then the number they are multiplied by.

    Raises UnsupportedError for any other expression.
    """
    if not isinstance(size, torch.SymInt) or str(size) in names:
        return [size]
    factors = list(size.node.expr.args) if size.node.expr.is_Mul else [size.node.expr]
    inner = [str(f) for f in factors if f.is_Symbol]
    number = [int(f) for f in factors if f.is_Integer]
    if len(inner) + len(number) != len(factors) or not set(inner) <= set(names):
        raise UnsupportedError(
            f"split: codebook at {node.name!r} ({source_line(node)}) has {size} rows; needed: a product of the inputs' axes"
        )
    return [*(symbols[s] for s in names if s in inner), *number]


class Sizes:
    """Nodes that hold sizes, made from the axes of some inputs of a Rewriter's graph."""

    def __init__(self, rewriter: Rewriter, inputs: Sequence[fx.Node], before: fx.Node):
        self._rewriter, self._before = rewriter, before
        self._axes = {
            str(size): (node, axis)
            for node in reversed(inputs)
            for axis, size in reversed(list(enumerate(node.meta["val"].shape)))
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
        }
        self._made: dict[str, fx.Node] = {}

    def of(self, size: Any, reader: fx.Node) -> Any:
        """`size` as an argument: a number, or the node that holds it. Raises UnsupportedError where no input has it."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self._expression(size.node.expr, reader)

    def _expression(self, expr: Any, reader: fx.Node) -> Any:
        if expr.is_Integer:
            return int(expr)
        text = str(expr)
        if text in self._made:
            return self._made[text]
        if text in self._axes:
            node, axis = self._axes[text]
            self._made[text] = self._rewriter.call(aten.sym_size.int, node, axis, before=self._before)
        elif expr.is_Mul:
            product = self._expression(expr.args[0], reader)
            for factor in expr.args[1:]:
                product = self._rewriter.call(operator.mul, product, self._expression(factor, reader), before=self._before)
            self._made[text] = product
        else:
            raise UnsupportedError(
                f"split: node {reader.name!r} ({source_line(reader)}) needs the size {text}, which no codebook's ids have; the decoder "
                "knows nothing else of the input"
            )
        return self._made[text]
