"""The trust-guided search for a group's smoothing strength alpha. Pure: it sees a function of alpha, nothing of graphs or layers.

alpha = sigmoid(eta), kept in [0.01, 0.99]
trust     h = exp(-E / e0) * b(alpha)
objective L = log E - entropy * H(alpha)        (H the binary entropy; the logarithm makes steps independent of E's size)
step      eta <- eta - rate * (1 - h) * dL/deta (rate grows while L falls, shrinks and steps back when it rises)

A descent stops when h > tau or when E no longer moves relative to itself. The error has more than one valley in alpha, so several
starts are looked at first; "no smoothing" is a candidate. The result is the best candidate on held-out tokens, never the last,
and the error reported is the one measured at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

LOW, HIGH = 0.01, 0.99
STARTS = (0.5, 0.85, 0.2)  # alpha = 0.5, SmoothQuant's default, first: the result is never worse than it
MARGIN = 0.002  # relative; a candidate has to beat "no smoothing" by more than this to be worth a factor
GROW, SHRINK = 1.6, 0.35  # of the step: up after a step that helped, down after one that did not
LONGEST = 1.0  # of one step in eta; at alpha = 0.5 that is 0.23 in alpha

Evaluate = Callable[[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TrustOptions:
    """lr: first step rate, in eta; e0: error at which trust falls to 1/e; tau: trust at which a descent stops; entropy: weight of
    H(alpha); balance: "peak" or "monotone"; max_evals: error evaluations in all; stall: relative change of E that ends a descent."""

    lr: float = 10.0
    e0: float = 0.1
    tau: float = 0.98
    entropy: float = 0.0
    balance: str = "peak"
    max_evals: int = 15
    stall: float = 1e-3


@dataclass(frozen=True)
class Candidate:
    """alpha: None for no smoothing; error, held: relative squared error on fit and on held-out tokens; trust: h there."""

    alpha: float | None
    error: float
    held: float
    trust: float


@dataclass(frozen=True)
class SearchResult:
    """best: the candidate chosen; none: no smoothing; half: alpha = 0.5; start: the start that best descends from; evals: error
    evaluations spent; tried: every candidate in the order it was evaluated."""

    best: Candidate
    none: Candidate
    half: Candidate
    start: float | None
    evals: int
    tried: tuple[Candidate, ...]


def balance(alpha: torch.Tensor, form: str = "peak") -> torch.Tensor:
    """b(alpha): "peak" is 4 alpha (1 - alpha), 1 at one half and 0 at both ends; "monotone" is sigmoid(4 (alpha - 1/2)), kept for
    comparison: it is 0.5 at one half, so trust there never passes 0.5. Raises KeyError for another name."""
    return BALANCES[form](alpha)


BALANCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "peak": lambda alpha: 4 * alpha * (1 - alpha),
    "monotone": lambda alpha: torch.sigmoid(4 * (alpha - 0.5)),
}


def binary_entropy(alpha: torch.Tensor) -> torch.Tensor:
    """H(alpha) = -alpha ln alpha - (1 - alpha) ln(1 - alpha), in nats; alpha in (0, 1)."""
    return -(alpha * alpha.log() + (1 - alpha) * (-alpha).log1p())


def trust(error: torch.Tensor, alpha: torch.Tensor, e0: float = 0.1, form: str = "peak") -> torch.Tensor:
    """h = exp(-E / e0) * b(alpha), in [0, 1]: how much to believe that alpha needs no further search."""
    return torch.exp(-error / e0) * balance(alpha, form)


def objective(error: torch.Tensor, alpha: torch.Tensor, entropy: float) -> torch.Tensor:
    """L = log E - entropy * H(alpha)."""
    return error.clamp_min(1e-30).log() - entropy * binary_entropy(alpha)


def search(evaluate: Evaluate, options: TrustOptions | None = None) -> SearchResult:
    """evaluate: alpha (scalar tensor) or None -> (E on fit tokens, differentiable in alpha; E on held-out tokens).

    Calls it at most `max_evals` times (at least 2: none and one half).
    """
    run = _Search(evaluate, options or TrustOptions())
    none = run.look(None)
    starts = [run.step(a, a) for a in STARTS[: max(1, run.options.max_evals - 1)]]
    # Descend from the most promising starts; the second gets what the first one left.
    for first in sorted(starts, key=lambda p: p.candidate.error)[:2]:
        run.descend(first)
    eligible = [c for c in run.tried if math.isfinite(c.error) and math.isfinite(c.held)] or [none]
    best = min(eligible, key=lambda c: c.held)
    if best.alpha is not None and best.held > none.held * (1 - MARGIN):
        best = none
    return SearchResult(best, none, starts[0].candidate, run.start_of.get(best.alpha), run.evals, tuple(run.tried))


@dataclass(frozen=True)
class _Point:
    candidate: Candidate
    start: float
    eta: float
    loss: float
    slope: float


class _Search:
    """Counts evaluations and remembers every candidate."""

    def __init__(self, evaluate: Evaluate, options: TrustOptions):
        self.evaluate, self.options = evaluate, options
        self.evals = 0
        self.tried: list[Candidate] = []
        self.start_of: dict[float | None, float | None] = {}

    def look(self, alpha: float | None) -> Candidate:
        """Evaluate without a gradient."""
        with torch.no_grad():
            fit, held = self.evaluate(None if alpha is None else torch.tensor(alpha))
        self.evals += 1
        self.tried.append(Candidate(alpha, float(fit), float(held), 0.0))
        return self.tried[-1]

    def step(self, alpha: float, start: float) -> _Point:
        """Evaluate at alpha, with dL/deta."""
        options = self.options
        eta = torch.tensor(math.log(alpha / (1 - alpha)), requires_grad=True)
        a = torch.sigmoid(eta)
        fit, held = self.evaluate(a)
        self.evals += 1
        loss = objective(fit, a, options.entropy)
        (slope,) = torch.autograd.grad(loss, eta)
        h = float(trust(fit.detach(), a.detach(), options.e0, options.balance))
        candidate = Candidate(alpha, float(fit.detach()), float(held.detach()), h)
        self.tried.append(candidate)
        self.start_of.setdefault(alpha, start)
        return _Point(candidate, start, float(eta.detach()), float(loss.detach()), float(slope))

    def descend(self, at: _Point) -> None:
        """Follow the trust-damped gradient from `at` until trust, a stall or the evaluations end it."""
        options, rate = self.options, self.options.lr
        while self.evals < options.max_evals and at.candidate.trust <= options.tau and math.isfinite(at.slope):
            move = -rate * (1 - at.candidate.trust) * at.slope
            move = max(-LONGEST, min(LONGEST, move))
            alpha = min(HIGH, max(LOW, 1 / (1 + math.exp(-(at.eta + move)))))
            if abs(alpha - (at.candidate.alpha or 0.0)) < 1e-3:
                return
            new = self.step(alpha, at.start)
            moved = abs(new.candidate.error - at.candidate.error) > options.stall * at.candidate.error
            if new.loss < at.loss:
                at, rate = new, rate * GROW
            else:
                rate *= SHRINK
            if not moved:
                return
