"""Is every sample of a batch computed by itself? A proof over the graph, without which a batch is never run in parts.

Each value is in one of three states: the same for every sample; one entry per sample along its first axis, which depends on that
sample alone; or the samples' numbers (arange over the batch), which may only pick each sample's own entry. An operator without a
rule, or one whose operands fit none, ends the proof.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from khtst_compile.program import Program, arguments

aten, khtst = torch.ops.aten, torch.ops.khtst

SAME, EACH, NUMBER, SIZE = "same", "each", "number", "size"

# Operators on rows, on (batch, length, features) or on ids, that never look from one entry of the first axis to another.
_ROWWISE = frozenset(
    (
        khtst.quantize_rows.default, khtst.act_quantize.default, khtst.gate_quantize.default, khtst.norm.default,
        khtst.norm_quantize.default, khtst.rotary.default, khtst.embed.default, khtst.embed_norm.default,
        khtst.embed_norm_quantize.default, khtst.w8a8_gemm.default, khtst.linear.default, khtst.attention.default,
        khtst.codebook_lookup.default, khtst.step_lookup.default,
    )
)  # fmt: skip
_WEIGHTED = {aten.embedding.default: 0, aten.linear.default: 1}  # row by row, where this argument is no sample's
_REDUCTIONS = frozenset(
    (
        aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
        aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default,
        aten._softmax.default, aten._log_softmax.default, aten.cumsum.default,
    )
)  # fmt: skip
_COPIES = frozenset((aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default))
_MADE = frozenset((aten.full.default, aten.zeros.default, aten.ones.default))
_RESHAPES = frozenset((aten.view.default, aten.reshape.default, aten._unsafe_view.default))
_ON_AXIS = frozenset((aten.slice.Tensor, aten.select.int, aten.unsqueeze.default))


class _NotProved(Exception):
    """The proof ends here."""


def independent_axis(program: Program) -> str | None:
    """The dynamic axis, first of every input that has it and of every output, along which samples are computed one by one; or None."""
    for name, symbol in _candidates(program).items():
        try:
            _Proof(program, symbol).run()
        except _NotProved:
            continue
        return name
    return None


def _candidates(program: Program) -> dict[str, str]:
    """Dynamic axis -> its symbol, for those that lead an input."""
    found = {}
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec, graph in zip(program.inputs, program.user_inputs(), strict=True):
        shape = nodes[graph].meta["val"].shape
        if spec.shape and isinstance(spec.shape[0], str) and isinstance(shape[0], torch.SymInt):
            found[spec.shape[0]] = str(shape[0])
    return found


class _Proof:
    def __init__(self, program: Program, symbol: str):
        self._program, self._symbol = program, symbol
        self._states: dict[fx.Node, str] = {}

    def run(self) -> None:
        """Raises _NotProved."""
        for node in self._program.graph.nodes:
            if node.op == "output":
                if any(self._states.get(n) != EACH for n in node.all_input_nodes):
                    raise _NotProved
                return
            self._states[node] = state = self._state(node)
            self._check(node.meta.get("val"), state)

    def _check(self, value: Any, state: str) -> None:
        """A value per sample has the axis first, and nowhere else has any value it."""
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            sizes = [str(s) for s in tensor.shape]
            if state != SAME and sizes[:1] != [self._symbol]:
                raise _NotProved
            if any(self._symbol in size for size in sizes[state != SAME :]):
                raise _NotProved

    def _state(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            value = node.meta["val"]
            leads = isinstance(value, torch.Tensor) and value.dim() > 0 and str(value.shape[0]) == self._symbol
            return EACH if leads and node.name in self._program.user_inputs() else SAME
        if node.op != "call_function":
            return SAME
        if node.target is aten.sym_size.int:
            size = str(node.meta["val"])
            if self._symbol in size and size != self._symbol:
                raise _NotProved
            return SIZE if size == self._symbol else SAME
        states = {self._states[n] for n in node.all_input_nodes}
        if states <= {SAME}:
            return SAME
        return self._depends(node, states)

    def _depends(self, node: fx.Node, states: set[str]) -> str:
        """The state of a node with an operand that is not the same for every sample."""
        args, target = arguments(node), node.target
        if target is operator.getitem:
            return self._states[args[0]]
        if target is aten.arange.start_step and states == {SIZE} and args[0] == 0 and list(args[2:3]) in ([], [1]):
            return NUMBER
        if target in _MADE and states <= {SIZE, SAME}:
            return self._unless(any(isinstance(a, fx.Node) for a in args[1:]), EACH)  # filled with a size: not each sample's own
        if target is aten.expand.default and NUMBER not in states:
            return EACH  # where the axis is must be as `_check` wants it
        source = args[0] if args and isinstance(args[0], fx.Node) else None
        its = self._states.get(source) if source is not None else None
        if target is aten.index.Tensor:
            return self._index(node, args[0], args[1])
        if target in _RESHAPES and its == EACH:
            return EACH  # the first axis keeps its size, so what belongs to a sample stays with it
        if SIZE in states:
            raise _NotProved
        if target in _ON_AXIS and its is not None:
            axis = int(args[1]) if len(args) > 1 else 0
            return self._unless(axis == 0 or axis == -_rank(node if target is aten.unsqueeze.default else source), its)
        if target in _COPIES and its is not None:
            return its
        if NUMBER in states:
            raise _NotProved
        if target is aten.permute.default:
            return self._unless(int(args[1][0]) not in (0, -_rank(source)), EACH)
        if target is aten.transpose.int:
            return self._unless(any(int(a) in (0, -_rank(source)) for a in args[1:3]), EACH)
        if target in _REDUCTIONS:
            place = 2 if target is aten.linalg_vector_norm.default else 1
            axes = args[place] if len(args) > place else None
            axes = [axes] if isinstance(axes, int) else axes
            return self._unless(not axes or any(int(a) in (0, -_rank(source)) for a in axes), EACH)
        if target is aten.cat.default:
            axis = int(args[1]) if len(args) > 1 else 0
            return self._unless(axis in (0, -_rank(node)) or any(self._states[a] != EACH for a in args[0]), EACH)
        if target in _WEIGHTED:
            return self._unless(self._states[args[_WEIGHTED[target]]] != SAME, self._aligned(node, True))
        if target in _ROWWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
            return self._aligned(node, target in _ROWWISE)
        raise _NotProved

    def _unless(self, broken: bool, state: str) -> str:
        if broken:
            raise _NotProved
        return state

    def _aligned(self, node: fx.Node, rowwise: bool) -> str:
        """Operands per sample have all axes of the result, or its rows; others do not meet the first axis."""
        value = node.meta["val"]
        value = value[0] if isinstance(value, (tuple, list)) and value[0] is not None else value
        rank = value.dim() if isinstance(value, torch.Tensor) else 0
        for operand in node.all_input_nodes:
            theirs = operand.meta.get("val")
            if not isinstance(theirs, torch.Tensor):
                continue
            if self._states[operand] == EACH:
                if theirs.dim() < 1 or (not rowwise and theirs.dim() != rank):
                    raise _NotProved
            elif not rowwise and theirs.dim() == rank and str(theirs.shape[0]) != "1":
                raise _NotProved
        return EACH

    def _index(self, node: fx.Node, source: fx.Node, indices: list[Any]) -> str:
        """Each sample's own entry of a value per sample, or entries of a table chosen by a value per sample."""
        if any(not isinstance(i, fx.Node) for i in indices):
            raise _NotProved
        states = [self._states[i] for i in indices]
        rank = _rank(node) - (_rank(source) - len(indices))  # of the indices, broadcast; axes not indexed come last
        whole = all(_rank(i) == rank for i, s in zip(indices, states, strict=True) if s != SAME)
        first = [
            s == SAME and _rank(i) == rank and str(i.meta["val"].shape[0]) != "1" for i, s in zip(indices, states, strict=True)
        ]
        if not whole or any(first):
            raise _NotProved
        if self._states[source] == EACH:
            return self._unless(states[0] != NUMBER or NUMBER in states[1:], EACH)
        return self._unless(NUMBER in states or self._states[source] != SAME, EACH)


def _rank(node: Any) -> int:
    return int(node.meta["val"].dim())
