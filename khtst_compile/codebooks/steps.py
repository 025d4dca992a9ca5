"""Codebooks that are grids (FSQ, LFQ): each feature through steps of its own, and a weighted sum of the digits as the id.

Where the steps are is asked of the model's own function, bit pattern by bit pattern, so digits are those it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.evaluate import FAILURES, Evaluator
from khtst_compile.codebooks.found import Steps
from khtst_compile.codebooks.scores import SHAPES, keeps_rows
from khtst_compile.codebooks.sites import hinted
from khtst_compile.codebooks.values import straight_through
from khtst_compile.contract import Skipped
from khtst_compile.program import arguments, site_of

aten = torch.ops.aten

JUMPS = (
    aten.round.default,
    aten.round.decimals,
    aten.floor.default,
    aten.ceil.default,
    aten.trunc.default,
    aten.sign.default,
    aten.sgn.default,
    aten.gt.Scalar,
    aten.ge.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.gt.Tensor,
    aten.ge.Tensor,
    aten.lt.Tensor,
    aten.le.Tensor,
    aten.bucketize.Tensor,
)
_ELEMENTWISE = (
    *JUMPS,
    *SHAPES,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.hardtanh.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.relu.default,
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    aten.to.dtype,
    aten._to_copy.default,
)
RANKS = (2, 3, 4)
MOST_STEPS = 256
SAMPLES = 4096  # of the floats, that monotony is looked at on


class NoCodebook(Exception):
    """A weighted sum of digits that stands for nothing: positions, lengths."""


def find_steps(ev: Evaluator, skipped: list[Skipped]) -> Iterator[Steps]:
    """Every weighted sum of digits that are a function of steps of one vector."""
    for node in ev.graph.nodes:
        digits = _digits(ev, node)
        if digits is None or node in ev.constants:
            continue
        try:
            place = _one_codebook(ev, node, *digits)
        except FAILURES as error:
            place = f"it cannot be run on its own: {type(error).__name__}"
        if isinstance(place, Steps):
            yield place
        elif place and hinted(node):
            skipped.append(Skipped(site_of(node), place))


def _digits(ev: Evaluator, node: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
    """A sum over the last axis of digits times whole numbers -> the node of digits (..., d) and the numbers (d,) int64."""
    if node.target is not aten.sum.dim_IntList or node.meta["val"].dim() == 0:
        return None
    source, dims = arguments(node)[:2]
    keeps = len(node.args) > 2 and node.args[2]
    if not isinstance(source, fx.Node) or source.target is not aten.mul.Tensor or keeps or len(dims) != 1:
        return None
    if dims[0] % source.meta["val"].dim() != source.meta["val"].dim() - 1:
        return None
    for digits, weights in (arguments(source)[:2], arguments(source)[1::-1]):
        if not isinstance(weights, fx.Node) or weights not in ev.constants or not isinstance(digits, fx.Node):
            continue
        value = ev.value(weights).reshape(-1)
        d = ev.shape(source)[-1]
        if value.numel() == d and bool((value == value.round()).all()) and bool((value > 0).all()):
            return digits, value.long()
    return None


def _one_codebook(ev: Evaluator, total: fx.Node, digits: fx.Node, basis: torch.Tensor) -> Steps | str | None:
    """The codebook whose ids `total` sums up; a reason where it is none that can be said; None where it has no steps at all."""
    within, sources = _elementwise_behind(ev, digits)
    if not any(n.target in JUMPS for n in within):
        return None
    cuts = [n for n in sorted(within | sources, key=ev.order.__getitem__) if _cuts(ev, n, digits, within, sources)]
    usable = [
        n for n in cuts if len(ev.shape(n)) in RANKS and n.meta["val"].dtype is torch.float32 and ev.shape(n)[-1] == len(basis)
    ]
    if not usable:
        return "its digits depend on more than one vector of float32 features"
    reason: str | None = None
    for z in usable:
        between = {n for n in within if ev.order[n] > ev.order[z]}
        if not any(n.target in JUMPS for n in between):
            break
        try:
            return _steps(ev, total, digits, basis, z)
        except NoCodebook:
            return None
        except ValueError as error:
            reason = reason or str(error)
    return reason


def _elementwise_behind(ev: Evaluator, digits: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes between `digits` and what is not elementwise with constants any more, and those sources."""
    within: set[fx.Node] = set()
    sources: set[fx.Node] = set()
    pending = [digits]
    while pending:
        node = pending.pop()
        if node in within or node in sources or node in ev.constants:
            continue
        if node.op == "call_function" and node.target in _ELEMENTWISE and _same_rows(ev, node, digits):
            within.add(node)
            pending.extend(node.all_input_nodes)
        else:
            sources.add(node)
    return within, sources


def _same_rows(ev: Evaluator, node: fx.Node, digits: fx.Node) -> bool:
    return all(n in ev.constants or keeps_rows(ev, n, digits) for n in node.all_input_nodes) and keeps_rows(ev, node, digits)


def _cuts(ev: Evaluator, node: fx.Node, digits: fx.Node, within: set[fx.Node], sources: set[fx.Node]) -> bool:
    """Whether all that `digits` depends on goes through `node`."""
    pending, seen = [digits], set()
    while pending:
        here = pending.pop()
        if here is node or here in seen or here in ev.constants:
            continue
        seen.add(here)
        if here in sources:
            return False
        pending.extend(here.all_input_nodes)
    return True


def _steps(ev: Evaluator, total: fx.Node, digits: fx.Node, basis: torch.Tensor, z: fx.Node) -> Steps:
    """Raises ValueError with the reason where digits of z are no rising steps from 0 on."""
    d = len(basis)
    ends = torch.tensor([[-torch.finfo(torch.float32).max], [torch.finfo(torch.float32).max]]).expand(2, d)
    low, high = _digit(ev, z, digits, ends)
    if int((high * basis).sum()) >= 2**31:
        raise ValueError("it has more codes than int32 ids can tell apart")
    if bool((low != 0).any()):
        raise ValueError("its digits do not count up from 0 with the feature")
    counts = (high + 1).tolist()
    order = basis.argsort()
    if bool((basis[order][1:] < (basis * (high + 1))[order][:-1]).any()):
        raise ValueError("its ids do not tell all its codes apart")
    if max(counts) > MOST_STEPS or min(counts) < 1:
        raise ValueError(f"one of its features has {max(counts)} steps; needed: 1 to {MOST_STEPS}")
    grid = _floats(torch.linspace(_ordered(ends)[0, 0], _ordered(ends)[1, 0], SAMPLES, dtype=torch.float64).long())
    near = torch.linspace(-8, 8, SAMPLES)
    for values in (grid, near):
        seen = _digit(ev, z, digits, values[:, None].expand(-1, d).contiguous())
        if bool((seen.diff(dim=0) < 0).any()):
            raise ValueError("its digits fall somewhere while the feature rises")
    most = max(counts)
    thresholds = _bisect(ev, z, digits, most, d)
    for j, n in enumerate(counts):
        thresholds[n - 1 :, j] = torch.nan  # which nothing is at least as large as, infinity included
    places = torch.cat([ends[:1], thresholds.where(thresholds.isfinite(), torch.finfo(torch.float32).max)])
    held, through, steps = _values(ev, z, digits, total, places)
    if not held and not hinted(total):
        raise NoCodebook("nothing reads values of its digits")
    for j, n in enumerate(counts):
        steps[n:, j] = steps[n - 1, j]
    anchor = _last_id(ev, total, basis, counts)
    return Steps(
        "",
        "",
        z.name,
        anchor.name,
        digits.name,
        tuple(n.name for n in held),
        tuple((n.name, v.name) for n, v in through),
        thresholds.T.contiguous(),
        steps.T.contiguous(),
        basis.to(torch.int32),
    )


def _digit(ev: Evaluator, z: fx.Node, digits: fx.Node, rows: torch.Tensor) -> torch.Tensor:
    """rows: (m, d) float32 -> the digits the model computes, (m, d) int64. Raises ValueError where they are no whole numbers."""
    (found,) = ev.rows(z, [digits], rows)
    near = found.double().round()
    if not bool(((found.double() - near).abs() < 1e-3).all()):
        raise ValueError("its digits are not whole numbers")
    return near.long()


def _bisect(ev: Evaluator, z: fx.Node, digits: fx.Node, most: int, d: int) -> torch.Tensor:
    """The smallest float32 of each feature at which its digit is k or more, for k = 1 .. most - 1: (most - 1, d)."""
    if most == 1:
        return torch.empty(0, d)
    wanted = torch.arange(1, most)[:, None]
    bounds = _ordered(torch.tensor([-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max]))
    low, high = (torch.full((most - 1, d), int(b)) for b in bounds)  # digit(low) < k <= digit(high)
    while bool((high - low > 1).any()):
        middle = low + (high - low) // 2
        reached = _digit(ev, z, digits, _floats(middle)) >= wanted
        high, low = torch.where(reached, middle, high), torch.where(reached, low, middle)
    return _floats(high)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in the same order, neighbors 1 apart."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _floats(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse of `_ordered`."""
    bits = torch.where(ordered < 0, (-ordered) | 0x80000000, ordered)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def _values(
    ev: Evaluator, z: fx.Node, digits: fx.Node, total: fx.Node, places: torch.Tensor
) -> tuple[list[fx.Node], list[tuple[fx.Node, fx.Node]], torch.Tensor]:
    """The nodes that hold the value of each step, their straight-through forms, and the values at `places` (n, d): (n, d) float32."""
    within: set[fx.Node] = {z}
    for node in ev.graph.nodes:
        moving = [n for n in node.all_input_nodes if n not in ev.constants]
        if node.op != "call_function" or node.target not in _ELEMENTWISE or not moving or any(n not in within for n in moving):
            continue
        if all(keeps_rows(ev, n, z) for n in (*moving, node)):
            within.add(node)
    drawn = torch.randn(512, places.shape[1], generator=torch.Generator().manual_seed(0)) * 2
    ids = _digit(ev, z, digits, drawn)
    held: list[fx.Node] = []
    tables: list[torch.Tensor] = []
    for node in sorted(within - {z}, key=ev.order.__getitem__):
        if node.meta["val"].dtype is not torch.float32 or all(u in within or u is total for u in node.users):
            continue
        table, seen = torch.split(ev.rows(z, [node], torch.cat([places, drawn]))[0], [len(places), len(drawn)])
        if torch.equal(table.gather(0, ids.clamp(max=len(table) - 1)), seen) and not _feeds_only(node, total):
            held.append(node)
            tables.append(table)
    if not held:
        digits_alone = torch.arange(len(places)).float()[:, None].expand(-1, places.shape[1])
        return [], [], digits_alone.clone()
    same = [n for n, t in zip(held, tables, strict=True) if torch.equal(t, tables[-1])]
    return same, [t for n in same for t in straight_through(n)], tables[-1].clone()


def _feeds_only(node: fx.Node, total: fx.Node) -> bool:
    """Whether a node is read for nothing but the ids."""
    return all(u.target is aten.mul.Tensor and set(u.users) == {total} for u in node.users)


def _last_id(ev: Evaluator, total: fx.Node, basis: torch.Tensor, counts: list[int]) -> fx.Node:
    """`total`, or the node behind it that rounds and casts the same ids."""
    largest = int(((torch.tensor(counts) - 1) * basis).sum())
    drawn = torch.randint(largest + 1, ev.shape(total), generator=torch.Generator().manual_seed(0)).to(total.meta["val"].dtype)
    node = total
    while True:
        users: list[Any] = list(node.users)
        if len(users) != 1 or users[0].target not in (*SHAPES, aten.round.default, aten.to.dtype, aten._to_copy.default):
            return node
        if not torch.equal(ev.value(users[0], {total: drawn}).double().reshape(-1), drawn.double().reshape(-1)):
            return node
        node = users[0]
