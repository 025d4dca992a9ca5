"""`smooth`: move activation outliers into the weights, with a strength searched for each group of layers.

linear(x, W, b) -> linear(x * inv_s, W * s, b), one `inv_s` per activation, shared by every linear layer that reads it. Where all
readers of the operation that makes x are such layers, `inv_s` goes into that operation's own constants and no multiply remains; else
`w8a8` takes the multiply into its quantizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from khtst_compile.calibrate import ActivationStats, Stats
from khtst_compile.contract import Outcome, Skipped
from khtst_compile.errors import PassError, UsageError
from khtst_compile.fakequant import OutputError, Treatment
from khtst_compile.folding import fold_scale
from khtst_compile.linears import Linear, find_linears, groups, is_kept, require_linears
from khtst_compile.ops.rotate import check_rotation
from khtst_compile.program import Program, Rewriter, site_of
from khtst_compile.quant.rotation import fit_rotation
from khtst_compile.quant.smoothing import GroupObjective, decibels, smooth_factors, weight_maxima, zero_channels
from khtst_compile.quant.trust import BALANCES, Candidate, Evaluate, SearchResult, TrustOptions, search

aten = torch.ops.aten
WEIGHS = ("output", "layer")


@dataclass(frozen=True)
class Smooth:
    """alpha: "trust" (searched per group) or one number in [0, 1] for all; lr, e0, tau, entropy, balance, max_evals: of the search, see
    `quant.trust`; weigh: "output" (by what an error does to the model's output) or "layer" (the layer's own relative error); block,
    points: the rotation that will follow (None: filled in from the recipe, else none); fold: put factors into the producer where
    that is provably safe; check: compare the searched strengths, 0.5 everywhere and none on whole held-out samples and keep the best;
    keep_fp32: ';'-separated globs of sites to leave alone."""

    name: ClassVar[str] = "smooth"

    alpha: float | str = "trust"
    lr: float = 10.0
    e0: float = 0.1
    tau: float = 0.98
    entropy: float = 0.0
    balance: str = "peak"
    max_evals: int = 15
    weigh: str = "output"
    block: int | None = None
    points: int | None = None
    fold: bool = True
    check: bool = True
    keep_fp32: str | None = None

    def check_options(self) -> None:
        if (isinstance(self.alpha, str) and self.alpha != "trust") or (
            not isinstance(self.alpha, str) and not 0 <= self.alpha <= 1
        ):
            raise UsageError(f"alpha is {self.alpha!r}; needed: trust, or a number from 0 to 1")
        for option, known in (("balance", tuple(BALANCES)), ("weigh", WEIGHS)):
            if getattr(self, option) not in known:
                raise UsageError(f"{option} is {getattr(self, option)!r}; known: {', '.join(known)}")
        if self.max_evals < 2 or self.lr <= 0 or self.e0 <= 0:
            raise UsageError("max_evals must be at least 2, lr and e0 above 0")
        if self.block is not None:
            check_rotation(self.block, self.block if self.points is None else self.points, self.block)

    def requires(self, program: Program) -> None:
        if program.stats is None:
            raise PassError("smoothing needs to know the activations and the program was never calibrated; give calibration data")
        require_linears(
            program, "no linear layer is in the graph, so there is nothing to smooth; run it before w8a8, on a float32 program"
        )

    def run(self, program: Program) -> Outcome:
        assert program.stats is not None
        rewriter = Rewriter(program)
        candidates, skipped = self._candidates(rewriter, program.stats)
        with torch.no_grad():
            chosen = {x: self._choose(members, program.stats.activations[x.name]) for x, members in candidates.items()}
            details: dict[str, Any] = {}
            if self.alpha == "trust" and self.check and program.stats.held_samples and chosen:
                details["(model)"] = _settle(program, candidates, chosen)
            stats = program.stats
            changed = 0
            for x, members in candidates.items():
                choice, site = chosen[x], site_of(members[0].node)
                folded = None
                if choice.alpha is None:
                    skipped += [Skipped(site_of(m.node), "not smoothed: held-out error is lower without") for m in members]
                else:
                    folded, stats = _apply(rewriter, x, members, choice.factor, stats, self.fold)
                    changed += len(members)
                details[site] = {**choice.facts(members), "folded": folded}
        return Outcome(replace(rewriter.finish(), stats=stats), changed, tuple(skipped), details)

    def ensures(self, before: Program, after: Program) -> None:
        if len(find_linears(before.graph, before.tensors())) != len(find_linears(after.graph, after.tensors())):
            raise PassError("smoothing changed the number of linear layers")

    def _candidates(self, rewriter: Rewriter, stats: Stats) -> tuple[dict[fx.Node, list[Linear]], list[Skipped]]:
        skipped, usable = [], []
        for linear in find_linears(rewriter.graph, rewriter.tensors):
            reason = linear.refusal
            if reason is None and is_kept(site_of(linear.node), self.keep_fp32):
                reason = "kept float32 as asked"
            if reason is None and linear.x.name not in stats.activations:
                reason = "calibration saw nothing at its input"
            if reason is None and not bool(linear.weight.isfinite().all()):
                raise PassError(f"linear {site_of(linear.node)!r}: its weight has NaN or infinite entries; repair the checkpoint")
            if reason is None:
                usable.append(linear)
            else:
                skipped.append(Skipped(site_of(linear.node), reason))
        return groups(usable), skipped

    def _choose(self, members: Sequence[Linear], stats: ActivationStats) -> _Choice:
        """The strength for one group and everything worth reporting about it."""
        weights = [linear.weight for linear in members]
        x_max, w_max = stats.absmax.float(), weight_maxima(weights)
        names = [linear.node.name for linear in members]
        weighed = self.weigh == "output" and all(n in stats.grads and n in stats.held_grads for n in names)
        rotation = fit_rotation(x_max.numel(), self.block, self.points) if self.block else None
        block, points = rotation or (0, 0)
        objective = GroupObjective(
            stats.rows,
            stats.held_rows,
            weights,
            [stats.grads[n] for n in names] if weighed else None,
            [stats.held_grads[n] for n in names] if weighed else None,
            block,
            points,
        )

        def evaluate(alpha: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return objective.error(None if alpha is None else smooth_factors(x_max, w_max, alpha))

        options = TrustOptions(self.lr, self.e0, self.tau, self.entropy, self.balance, self.max_evals)
        if isinstance(self.alpha, str):
            with torch.enable_grad():
                result = search(evaluate, options)
        else:
            result = _fixed(float(self.alpha), evaluate)
        return _Choice(result, x_max, w_max, block, points, "output" if weighed else "layer", result.best.alpha)


@dataclass
class _Choice:
    """What was decided for one group: the search, the maxima its factor comes from, the rotation it assumed, and alpha (None: none)."""

    result: SearchResult
    x_max: torch.Tensor
    w_max: torch.Tensor
    block: int
    points: int
    weighed: str
    alpha: float | None

    @property
    def factor(self) -> torch.Tensor:
        assert self.alpha is not None
        return smooth_factors(self.x_max, self.w_max, self.alpha)

    def at(self, alpha: float | None) -> Treatment:
        """The group's treatment at another strength."""
        return Treatment(None if alpha is None else smooth_factors(self.x_max, self.w_max, alpha), self.block, self.points)

    def candidate(self) -> Candidate:
        """The evaluated candidate that was chosen in the end."""
        return next(c for c in (self.result.best, self.result.half, self.result.none) if c.alpha == self.alpha)

    def facts(self, members: Sequence[Linear]) -> dict[str, Any]:
        now = self.candidate()
        return {
            "layers": [site_of(linear.node) for linear in members],
            "alpha": "none" if self.alpha is None else round(self.alpha, 4),
            "error_db": {"before": decibels(self.result.none.error), "after": decibels(now.error), "held": decibels(now.held)},
            "trust": round(now.trust, 4),
            "evals": self.result.evals,
            "start": self.result.start,
            "weighed": self.weighed,
            "zero_channels": zero_channels(self.x_max),
        }


def _fixed(alpha: float, evaluate: Evaluate) -> SearchResult:
    """The result for a strength that was given, in the shape of a search's."""
    none, here = (_measured(a, evaluate) for a in (None, alpha))
    return SearchResult(here, none, here, None, 2, (none, here))


def _measured(alpha: float | None, evaluate: Evaluate) -> Candidate:
    fit, held = evaluate(None if alpha is None else torch.tensor(alpha))
    return Candidate(alpha, float(fit), float(held), 0.0)


def _settle(program: Program, candidates: Mapping[fx.Node, Sequence[Linear]], chosen: dict[fx.Node, _Choice]) -> dict[str, Any]:
    """Compare three whole-model assignments on held-out samples and put the best into `chosen`.

    Groups are searched one at a time; this is what makes the sum of them never worse than 0.5 everywhere or none everywhere there.
    """
    assert program.stats is not None
    measure = OutputError(program, [linear for members in candidates.values() for linear in members], program.stats.held_samples)
    plans: dict[str, dict[fx.Node, float | None]] = {
        "searched": {x: c.alpha for x, c in chosen.items()},
        "half": dict.fromkeys(chosen, 0.5),
        "none": dict.fromkeys(chosen),
    }
    errors = {
        plan: measure({linear.node.name: chosen[x].at(alpha) for x, alpha in at.items() for linear in candidates[x]})
        for plan, at in plans.items()
    }
    best = min(errors, key=lambda plan: errors[plan] if math.isfinite(errors[plan]) else math.inf)
    for x, choice in chosen.items():
        choice.alpha = plans[best][x]
    return {"output_error_db": {plan: decibels(e) for plan, e in errors.items()}, "kept": best}


def _apply(
    rewriter: Rewriter, x: fx.Node, members: Sequence[Linear], s: torch.Tensor, stats: Stats, fold: bool
) -> tuple[str | None, Stats]:
    """Rewrite one group; returns the producer that took the factor (None: a multiply stands) and the statistics of the new graph."""
    inv_s = 1.0 / s
    for linear in members:
        weight = (linear.weight.double() / inv_s.double()).float()
        linear.set_weight(rewriter.add_tensor(f"{site_of(linear.node)}_smooth_weight", linear.stored(weight)))
    folded = fold_scale(rewriter, x, {linear.node for linear in members}, inv_s) if fold else None
    if folded is not None:
        return folded, _rescaled(stats, x.name, folded, inv_s)
    factor = rewriter.add_tensor(f"{site_of(members[0].node)}_inv_smooth", inv_s)
    scaled = rewriter.call(aten.mul.Tensor, x, factor, before=members[0].node)
    for linear in members:
        linear.set_input(scaled)
    return None, stats


def _rescaled(stats: Stats, activation: str, producer: str, inv_s: torch.Tensor) -> Stats:
    """Statistics after `activation` came to hold `inv_s` times what it held; a producing linear layer's gradients grow by the inverse."""
    seen = dict(stats.activations)
    seen[activation] = seen[activation].scaled(inv_s)
    for name, other in seen.items():
        if producer in other.grads:
            seen[name] = replace(
                other,
                grads={**other.grads, producer: other.grads[producer] / inv_s},
                held_grads={k: g / inv_s if k == producer else g for k, g in other.held_grads.items()},
            )
    return replace(stats, activations=seen)
