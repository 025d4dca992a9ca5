"""`rotate`: spread outliers over blocks of features with a Walsh-Hadamard transform, undone in the weight.

linear(x, W, b) -> linear(khtst.rotate(x, block, points), W @ H / points, b), one `rotate` per activation. `w8a8` takes the
transform into its quantizer, where it costs block * log2(points) additions a token and block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from khtst_compile.calibrate import ActivationStats
from khtst_compile.contract import Outcome, Skipped
from khtst_compile.errors import PassError, UsageError
from khtst_compile.linears import Linear, calibrated_rows, find_linears, groups, is_kept, require_linears
from khtst_compile.ops.rotate import check_rotation
from khtst_compile.program import Program, Rewriter, site_of
from khtst_compile.quant.rotation import fit_rotation, rotate_columns
from khtst_compile.quant.smoothing import GroupObjective, decibels


@dataclass(frozen=True)
class Rotate:
    """block: features per transform, a power of two (halved where it does not divide a layer's features); points: None or `block` for
    the full transform, block // 16 for the cheap form; check: leave layers alone whose held-out error it raises (where calibrated);
    keep_fp32: ';'-separated globs of sites to leave alone."""

    name: ClassVar[str] = "rotate"

    block: int = 128
    points: int | None = None
    check: bool = True
    keep_fp32: str | None = None

    def check_options(self) -> None:
        if self.block == 0:
            raise UsageError("rotation: block is 0, which means no rotation; leave the pass out instead")
        check_rotation(self.block, self.block if self.points is None else self.points, self.block)

    def requires(self, program: Program) -> None:
        require_linears(
            program, "no linear layer is in the graph, so there is nothing to rotate; run it before w8a8, on a float32 program"
        )

    def run(self, program: Program) -> Outcome:
        rewriter = Rewriter(program)
        skipped: list[Skipped] = []
        usable = []
        for linear in find_linears(rewriter.graph, rewriter.tensors):
            reason = "kept float32 as asked" if is_kept(site_of(linear.node), self.keep_fp32) else linear.refusal
            if reason is None:
                usable.append(linear)
            else:
                skipped.append(Skipped(site_of(linear.node), reason))
        details: dict[str, Any] = {}
        changed = 0
        for x, members in groups(usable).items():
            sites = [site_of(linear.node) for linear in members]
            facts = self._facts(rewriter, program, x, members)
            if "reason" in facts:
                skipped.extend(Skipped(site, facts["reason"]) for site in sites)
                continue
            _apply(rewriter, x, members, facts["block"], facts["points"])
            details[sites[0]] = {"layers": sites, **facts}
            changed += len(members)
        return Outcome(rewriter.finish(), changed, tuple(skipped), details)

    def ensures(self, before: Program, after: Program) -> None:
        if len(find_linears(before.graph, before.tensors())) != len(find_linears(after.graph, after.tensors())):
            raise PassError("rotating changed the number of linear layers")

    def _facts(self, rewriter: Rewriter, program: Program, x: fx.Node, members: Sequence[Linear]) -> dict[str, Any]:
        """The block and points for one group, with held-out errors where calibrated; or the reason to leave it alone."""
        features = members[0].weight.shape[1]
        fitted = fit_rotation(features, self.block, self.points)
        if fitted is None:
            return {"reason": f"not rotated: no power of two of at least 16 divides its {features} input features"}
        block, points = fitted
        facts: dict[str, Any] = {"block": block, "points": points}
        rows = calibrated_rows(rewriter, program.stats, x)
        if rows is None:
            return facts
        without, rotated = (_held_error(rows, members, *form) for form in ((0, 0), (block, points)))
        if self.check and math.isfinite(without) and rotated > without:
            return {"reason": f"not rotated: held-out error {decibels(rotated)} dB with, {decibels(without)} dB without"}
        return {**facts, "held_db": {"before": decibels(without), "after": decibels(rotated)}}


def _held_error(stats: ActivationStats, members: Sequence[Linear], block: int, points: int) -> float:
    names = [linear.node.name for linear in members]
    weighed = all(n in stats.grads and n in stats.held_grads for n in names)
    objective = GroupObjective(
        stats.rows,
        stats.held_rows,
        [linear.weight for linear in members],
        [stats.grads[n] for n in names] if weighed else None,
        [stats.held_grads[n] for n in names] if weighed else None,
        block,
        points,
    )
    with torch.no_grad():
        return float(objective.error(None)[1])


def _apply(rewriter: Rewriter, x: fx.Node, members: Sequence[Linear], block: int, points: int) -> None:
    rotated = rewriter.call(torch.ops.khtst.rotate.default, x, block, points, before=members[0].node)
    for linear in members:
        weight = linear.stored(rotate_columns(linear.weight, block, points))
        linear.set_weight(rewriter.add_tensor(f"{site_of(linear.node)}_rotated_weight", weight))
        linear.set_input(rotated)
