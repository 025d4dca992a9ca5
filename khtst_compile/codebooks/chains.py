"""Residual stacks: codebooks that each quantize what those before them left over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from khtst_compile.codebooks.evaluate import Evaluator
from khtst_compile.codebooks.scores import Scores
from khtst_compile.codebooks.values import Values, straight_through
from khtst_compile.contract import Skipped
from khtst_compile.program import arguments, site_of

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Candidate:
    """One argmax that was understood. above: its vectors and what they are a reshape of, nearest first; z: which of those to read.

    held: the nodes its value replaces, those of `values` or, for the last level of a stack, of the total; through: their straight-through
    forms."""

    anchor: fx.Node
    scores: Scores
    values: Values
    above: tuple[fx.Node, ...]
    z: fx.Node
    claims: bool
    total: tuple[fx.Node, ...] | None = None

    @property
    def held(self) -> tuple[fx.Node, ...]:
        return self.values.nodes if self.total is None else self.total

    @property
    def through(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        if self.total is None:
            return self.values.through
        return tuple(t for n in self.total for t in straight_through(n))


@dataclass(frozen=True)
class Chain:
    """members: the levels in order; running: whether each quantizes (what was left) - (value), else (the vector) - (total so far)."""

    members: tuple[Candidate, ...]
    running: bool


def chains(ev: Evaluator, candidates: Sequence[Candidate], skipped: list[Skipped]) -> list[Chain]:
    """Group `candidates` (in graph order) into stacks; what is no stack is one of a single level."""
    left = list(candidates)
    found: list[Chain] = []
    while left:
        members, modes = [left.pop(0)], {True, False}
        totals = [set(members[0].values.nodes)]
        while (at := _next(members, totals, left, modes)) is not None:
            after = left.pop(at[0])
            members.append(after)
            totals.append(_totals(totals[-1], after))
            modes = at[1]
        if len(members) == 1:
            found.append(Chain((members[0],), True))
            continue
        reason = _not_one(ev, members, totals)
        if reason is None:
            last = members[-1]
            total = tuple(sorted(totals[-1], key=ev.order.__getitem__))
            whole = Candidate(last.anchor, last.scores, last.values, last.above, last.z, last.claims, total)
            found.append(Chain((*members[:-1], whole), True in modes))
        else:
            skipped.append(Skipped(site_of(members[0].anchor), f"its {len(members)} levels stay lookups of their own: {reason}"))
            found += [Chain((m,), True) for m in members]
    return found


def _next(
    members: Sequence[Candidate], totals: Sequence[set[fx.Node]], left: Sequence[Candidate], modes: set[bool]
) -> tuple[int, set[bool]] | None:
    """Which of `left` quantizes the rest of `members`, and by which rules it can be said to."""
    for at, candidate in enumerate(left):
        rest = candidate.above[-1]
        if (
            rest.target is not aten.sub.Tensor
            or rest.kwargs
            or len(candidate.scores.codes) != 1
            or len(members[0].scores.codes) != 1
        ):
            continue
        source, taken = arguments(rest)[:2]
        fitting = set()
        if source in members[-1].above and taken in members[-1].values.nodes:
            fitting.add(True)
        if source in members[0].above and taken in totals[-1]:
            fitting.add(False)
        if fitting & modes:
            return at, fitting & modes
    return None


def _totals(before: Iterable[fx.Node], level: Candidate) -> set[fx.Node]:
    """The nodes that add a level's value to the total so far."""
    return {
        user
        for total in before
        for user in total.users
        if user.target is aten.add.Tensor
        and not user.kwargs
        and any(set(arguments(user)[:2]) == {total, value} and total is not value for value in level.values.nodes)
    }


def _not_one(ev: Evaluator, members: Sequence[Candidate], totals: Sequence[set[fx.Node]]) -> str | None:
    """Why these levels cannot become one lookup, or None."""
    if not totals[-1]:
        return "no node holds the sum of their values"
    if any(m.values.table.shape[2] != members[0].scores.codes.shape[2] for m in members):
        return "their values have another number of features than their vectors"
    live = live_nodes(ev.graph, {m.anchor for m in members} | totals[-1])
    hidden = [n for m in members for n in m.values.nodes] + [n for t in totals[:-1] for n in t]
    hidden += [n for m in members[1:] for n in m.above]
    read = next((n for n in hidden if n in live and n not in totals[-1]), None)
    return None if read is None else f"{read.name!r}, which lies between them, is read elsewhere"


def live_nodes(graph: fx.Graph, replaced: set[fx.Node]) -> set[fx.Node]:
    """The nodes that outputs still depend on once `replaced` come from somewhere else."""
    reached: set[fx.Node] = set()
    pending = [n for n in graph.nodes if n.op == "output"]
    while pending:
        node = pending.pop()
        if node in reached:
            continue
        reached.add(node)
        if node not in replaced:
            pending.extend(node.all_input_nodes)
    return reached - replaced
