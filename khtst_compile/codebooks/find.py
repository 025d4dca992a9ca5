"""Finds codebooks in a program's graph: an argmax over scores of constant codes whose ids index a table, and functions of steps."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from khtst_compile.codebooks.chains import Candidate, Chain, chains, live_nodes
from khtst_compile.codebooks.evaluate import FAILURES, Evaluator, ranges_of
from khtst_compile.codebooks.found import Codebook, Found, Level, Vectors
from khtst_compile.codebooks.scores import NoProduct, NotUnderstood, read_scores, upstream
from khtst_compile.codebooks.sites import claims_orthonormal, hinted, is_codebook_class, name_sites, stack_of
from khtst_compile.codebooks.steps import JUMPS, find_steps
from khtst_compile.codebooks.values import Values, find_values, holds_ids, indexes_table, same_ids
from khtst_compile.contract import Skipped
from khtst_compile.errors import PassError
from khtst_compile.linears import is_kept
from khtst_compile.ops.codebook import LARGEST
from khtst_compile.program import arguments, site_of

if TYPE_CHECKING:
    from khtst_compile.program import Program

aten = torch.ops.aten

_EXTREMES = {aten.argmax.default: True, aten.argmin.default: False}
_PAIRS = {aten.max.dim: True, aten.min.dim: False, aten.topk.default: True}
RANKS = (2, 3, 4)  # of z: one to three axes before the features


def find_codebooks(program: Program, keep: str | None = None) -> Found:
    """Every codebook of `program`; keep: ';'-separated globs of sites to leave alone.

    Raises PassError for a codebook with entries that are not finite, or with no entries but zeros.
    """
    if not any(_largest(n) is not None or n.target in JUMPS for n in program.graph.nodes):
        return Found()
    ev = Evaluator(program.graph, program.tensors(), ranges_of(program.ep.range_constraints))
    skipped: list[Skipped] = []
    candidates: list[Candidate] = []
    for anchor, scores, largest, dim in _anchors(program.graph):
        try:
            made = _candidate(ev, anchor, scores, largest, dim, skipped)
        except FAILURES as error:
            made = None
            if hinted(anchor):
                skipped.append(Skipped(site_of(anchor), f"it cannot be run on its own: {first_line(error)}"))
        if made is not None:
            candidates.append(made)
    results = {s.name: r for s, r in zip(program.outputs, _results(program.graph), strict=True)}
    live = live_nodes(program.graph, {c.anchor for c in candidates})
    grouped = chains(ev, candidates, skipped)
    grids = list(find_steps(ev, skipped))
    nodes = {n.name: n for n in program.graph.nodes}
    sites = name_sites([[m.anchor for m in c.members] for c in grouped] + [[nodes[s.anchor]] for s in grids])
    found: list[Codebook] = []
    for (site, source), chain in zip(sites, grouped, strict=False):
        found += _describe(ev, site, source, chain, live, results)
    for (site, source), grid in zip(sites[len(grouped) :], grids, strict=True):
        held = holds_step_ids(ev, nodes[grid.anchor], results)
        found.append(replace(grid, site=site, source=source, ids=held))
    skipped += _silent(program.graph, [nodes[a] for c in found for a in c.anchors], skipped)
    kept = [c for c in found if is_kept(c.site, keep)]
    skipped += [Skipped(c.site, "kept as asked") for c in kept]
    found = [c for c in found if c not in kept]
    return Found(tuple(found), tuple(dict.fromkeys(skipped)))


def _silent(graph: fx.Graph, anchors: list[fx.Node], skipped: list[Skipped]) -> list[Skipped]:
    """Quantizers by their class that round, and of which nothing was found or said."""
    known = {path for a in anchors for path, _ in stack_of(a)}
    missed: dict[str, None] = {}
    for node in graph.nodes:
        path = next((p for p, name in stack_of(node) if p and is_codebook_class(name)), None)
        if path is None or path in known or any(s.site == path or s.site.startswith(path + ".") for s in skipped):
            continue
        if node.target in JUMPS or _largest(node) is not None:
            missed[path] = None
    return [Skipped(path, "it rounds, and no ids are computed from that; return its ids to have it frozen") for path in missed]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def holds_step_ids(ev: Evaluator, anchor: fx.Node, results: dict[str, fx.Node]) -> dict[str, object] | None:
    """Which public output holds the ids of a function of steps."""
    drawn = torch.randint(100, ev.shape(anchor), generator=torch.Generator().manual_seed(1)).to(anchor.meta["val"].dtype)
    for name, node in results.items():
        try:
            held = ev.value(node, {anchor: drawn})
        except FAILURES:
            continue
        if (
            isinstance(held, torch.Tensor)
            and held.numel() == drawn.numel()
            and torch.equal(held.reshape(-1), drawn.reshape(-1).to(held.dtype))
        ):
            return {"output": name}
    return None


def _results(graph: fx.Graph) -> list[fx.Node]:
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])


def _largest(node: fx.Node) -> bool | None:
    """Whether a node takes the largest (or the smallest) of each row, or None."""
    if node.op != "call_function":
        return None
    if node.target in _EXTREMES:
        return _EXTREMES[node.target]
    paired: bool | None = _PAIRS.get(node.target)  # type: ignore[call-overload]
    return paired


def _anchors(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, bool, int]]:
    """(node of ids, node of scores, whether the largest wins, the axis)."""
    for node in graph.nodes:
        largest = _largest(node)
        if largest is None:
            continue
        given: Any = arguments(node)
        if node.target in _EXTREMES:
            dim = given[1] if len(given) > 1 else node.kwargs.get("dim")
            if dim is not None:
                yield node, given[0], largest, dim
            continue
        if node.target is aten.topk.default:
            if given[1] != 1:
                continue
            dim = given[2] if len(given) > 2 else -1
            largest = given[3] if len(given) > 3 else True
        else:
            dim = given[1]
        for reader in node.users:
            if reader.target is operator.getitem and reader.args[1] == 1:
                yield reader, given[0], largest, dim


def _candidate(
    ev: Evaluator, anchor: fx.Node, scores: fx.Node, largest: bool, dim: int, skipped: list[Skipped]
) -> Candidate | None:
    """The codebook behind one argmax; None where it is none, with the reason in `skipped` where it looks like one."""
    if scores in ev.constants or anchor in ev.constants:
        return None
    rank = scores.meta["val"].dim()
    codes = ev.shape(scores)[dim % rank]
    read, reason = None, ""
    try:
        if dim % rank != rank - 1:
            raise NotUnderstood(f"its codes lie along axis {dim % rank} of the scores; needed: the last one")
        read = read_scores(ev, scores, largest)
    except NoProduct as error:
        if not hinted(anchor) and not indexes_table(ev, anchor):
            return None
        reason = str(error)
    except NotUnderstood as error:
        reason = str(error)
    heads = 1 if read is None else len(read.codes)
    if read is not None and heads > 1 and ev.shape(read.z)[0] != heads:
        reason = f"{heads} codebooks lie side by side, and not along the first axis of the vectors"
    width = codes if read is None else read.codes.shape[2]
    values = find_values(ev, anchor, codes, width, heads) if not reason else find_values(ev, anchor, codes, width)
    if reason:
        if values is not None or hinted(anchor) or indexes_table(ev, anchor):
            skipped.append(Skipped(site_of(anchor), reason))
        return None
    assert read is not None
    if values is None:
        if not hinted(anchor):
            return None  # a classifier's decision
        values = Values(read.codes.clone(), (), (), frozenset())
    above = upstream(ev, read.z) if heads == 1 else [read.z]
    usable = [n for n in above if len(ev.shape(n)) in RANKS and n.meta["val"].dtype is torch.float32]
    if not usable:
        shape = ev.shape(read.z)
        skipped.append(
            Skipped(
                site_of(anchor), f"its vectors are {read.z.meta['val'].dtype} with {len(shape)} axes; needed: float32 with 2 to 4"
            )
        )
        return None
    _check(site_of(anchor), read.codes, values.table)
    return Candidate(anchor, read, values, tuple(above), usable[-1], claims_orthonormal(ev, anchor, read.origin))


def _check(site: str, codes: torch.Tensor, table: torch.Tensor) -> None:
    """Raise PassError for entries no search can work with."""
    for what, tensor in (("codes", codes), ("table", table)):
        bad = ~(tensor.abs() <= LARGEST)
        if bool(bad.any()):
            row = [int(i) for i in bad.nonzero()[0]]
            raise PassError(
                f"codebook {site!r}: its {what} hold {float(tensor[tuple(row)])} in row {row[1]}, feature {row[2]}; needed: finite "
                f"numbers up to {LARGEST:g}; repair the checkpoint"
            )
    if codes.shape[1] > 1 and not bool(codes.any()):
        raise PassError(
            f"codebook {site!r}: all its codes are 0, so it was never initialized; train the model, or load a trained checkpoint"
        )


def _describe(
    ev: Evaluator, site: str, source: str, chain: Chain, live: set[fx.Node], results: dict[str, fx.Node]
) -> Iterator[Vectors]:
    """The lookups of one chain: one, or one for each head."""
    members, running = chain.members, chain.running
    anchors = [c.anchor for c in members]
    held = holds_ids(ev, anchors, [c.scores.codes.shape[1] for c in members], results)
    first, heads = members[0], len(members[0].scores.codes)
    scored = tuple(c.scores.product.name for c in members if c.scores.product not in live)
    for head in range(heads):
        levels = tuple(
            Level(
                c.anchor.name,
                c.scores.codes[head],
                None if c.scores.bias is None else c.scores.bias[min(head, len(c.scores.bias) - 1)],
                c.values.table[head],
                tuple(n.name for n in c.held),
                tuple((n.name, z.name) for n, z in c.through),
                tuple(n.name for n in same_ids(ev, c.anchor)),
            )
            for c in members
        )
        yield Vectors(
            site if heads == 1 else f"{site}[{head}]",
            source,
            first.z.name,
            levels,
            running,
            all(c.scores.euclidean for c in members),
            max(c.scores.slack for c in members),
            all(c.claims for c in members),
            scored,
            {"output": held[0]} if held and heads == 1 else None,
            None if heads == 1 else (head, heads),
        )
