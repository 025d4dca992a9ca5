"""The search for alpha: each fault of the first implementation, shown not to be here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khtst_compile.quant.trust import (
    HIGH,
    LOW,
    STARTS,
    TrustOptions,
    balance,
    binary_entropy,
    objective,
    search,
    trust,
)

Curve = Callable[[torch.Tensor], torch.Tensor]


def evaluator(
    fit: Curve, none: float = 1.0, held: Curve | None = None
) -> tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], list[float | None]]:
    """An error function of alpha with a log of where it was asked."""
    asked: list[float | None] = []

    def evaluate(alpha: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(None if alpha is None else float(alpha.detach()))
        if alpha is None:
            return torch.tensor(none), torch.tensor(none)
        return fit(alpha), (held or fit)(alpha)

    return evaluate, asked


def valley(at: float, scale: float = 1.0) -> Curve:
    return lambda a: scale * (0.01 + (a - at) ** 2)


def test_balance_peaks_in_the_middle_and_the_old_form_does_not() -> None:
    grid = torch.linspace(LOW, HIGH, 99)
    assert grid[balance(grid).argmax()].item() == pytest.approx(0.5)
    assert balance(torch.tensor(0.5)).item() == 1.0
    assert bool((balance(grid, "monotone").diff() > 0).all())


def test_the_old_balance_can_never_be_trusted_at_one_half() -> None:
    half, perfect = torch.tensor(0.5), torch.tensor(0.0)
    assert trust(perfect, half, form="monotone").item() == 0.5
    assert trust(perfect, half, form="peak").item() == 1.0
    evals = {}
    for form in ("peak", "monotone"):
        evaluate, asked = evaluator(valley(0.5, 1e-4))
        search(evaluate, TrustOptions(tau=0.8, balance=form))
        evals[form] = len(asked)
    assert evals["peak"] < evals["monotone"], "trust at one half ends the descent there only in the new form"


def test_entropy_in_nats() -> None:
    assert binary_entropy(torch.tensor(0.5)).item() == pytest.approx(math.log(2))


def test_the_loss_has_an_exact_gradient() -> None:
    eta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def loss(e: torch.Tensor) -> torch.Tensor:
        alpha = torch.sigmoid(e)
        return objective(valley(0.8)(alpha), alpha, 0.2) + trust(valley(0.8)(alpha), alpha)

    assert torch.autograd.gradcheck(loss, (eta,))


def test_the_entropy_weight_pulls_towards_the_middle() -> None:
    alphas = []
    for entropy in (0.0, 5.0):
        evaluate, _ = evaluator(valley(0.9))
        tried = search(evaluate, TrustOptions(entropy=entropy)).tried
        alphas.append([c.alpha for c in tried if c.alpha is not None and c.alpha not in STARTS])
    assert alphas[0] != alphas[1]


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-9])
def test_the_size_of_the_error_does_not_matter(scale: float) -> None:
    # Plain descent on E itself stands still at 1e-4; on log E the path is the same at any size.
    evaluate, asked = evaluator(valley(0.93, scale), none=scale)
    result = search(evaluate, TrustOptions(e0=1e30))
    assert result.best.alpha == pytest.approx(0.93, abs=0.03)
    assert result.best.error < 1.1 * 0.01 * scale
    assert len(asked) == result.evals <= 15


def test_the_best_is_returned_and_not_the_last() -> None:
    # A cliff just beyond the optimum: steps overshoot into it.
    def fit(a: torch.Tensor) -> torch.Tensor:
        return torch.where(a < 0.9, 1.0 - a, 50 * a)

    overshot = 0
    for most in range(2, 16):
        evaluate, _ = evaluator(fit, none=2.0)
        result = search(evaluate, TrustOptions(max_evals=most))
        assert result.best.held == min(c.held for c in result.tried)
        overshot += result.tried[-1].held > result.best.held
    assert overshot, "no descent ended beyond the cliff, so this test shows nothing"


def test_the_error_reported_is_that_of_the_alpha_returned() -> None:
    evaluate, _ = evaluator(valley(0.7))
    best = search(evaluate).best
    assert best.alpha is not None
    # sigmoid(logit(alpha)) in float32
    assert best.error == pytest.approx(float(valley(0.7)(torch.tensor(best.alpha))), rel=1e-4)


def test_held_out_tokens_decide() -> None:
    evaluate, _ = evaluator(valley(0.9), held=valley(0.2))
    assert search(evaluate).best.alpha == pytest.approx(0.2, abs=0.05)


def test_no_smoothing_is_a_candidate() -> None:
    evaluate, _ = evaluator(valley(0.5), none=1e-5)
    result = search(evaluate)
    assert result.best.alpha is None and result.start is None and result.best.error == pytest.approx(1e-5)


def test_two_valleys_need_two_starts() -> None:
    def fit(a: torch.Tensor) -> torch.Tensor:
        return torch.minimum(0.2 + (a - 0.75) ** 2, 0.02 + 4 * (a - 0.15) ** 2)

    evaluate, _ = evaluator(fit)
    result = search(evaluate)
    assert result.best.alpha == pytest.approx(0.15, abs=0.05)
    assert result.start == STARTS[2]


def test_alpha_stays_inside_its_bounds() -> None:
    evaluate, asked = evaluator(lambda a: (5 * a).exp(), none=1e3)
    assert search(evaluate, TrustOptions(lr=1e3)).best.alpha == pytest.approx(LOW, abs=0.02)
    assert all(a is None or LOW - 1e-6 <= a <= HIGH + 1e-6 for a in asked)


def test_an_error_that_is_not_finite_never_wins() -> None:
    def fit(a: torch.Tensor) -> torch.Tensor:
        return torch.where(a > 0.6, a * math.nan, a)

    evaluate, _ = evaluator(fit, none=3.0)
    best = search(evaluate).best
    assert math.isfinite(best.error) and best.alpha is not None and best.alpha <= 0.6
    nowhere, _ = evaluator(lambda a: a * math.nan, none=math.nan)
    assert search(nowhere).best.alpha is None


@given(st.floats(0.02, 0.98), st.integers(2, 20), st.floats(1e-8, 1.0), st.floats(1e-6, 2.0))
@settings(max_examples=60, deadline=None)
def test_never_worse_than_none_or_half_and_never_over_the_count(at: float, most: int, scale: float, none: float) -> None:
    evaluate, asked = evaluator(valley(at, scale), none=none)
    result = search(evaluate, TrustOptions(max_evals=most))
    assert result.evals == len(asked) <= most
    assert asked[:2] == [None, 0.5]
    assert result.best.held <= min(result.none.held, result.half.held) * (1 + 0.0021)  # MARGIN in favor of no factor


@pytest.mark.parametrize(
    "change", [{"lr": 0.5}, {"e0": 1e-3}, {"tau": 0.5}, {"balance": "monotone"}, {"max_evals": 6}, {"stall": 0.5}]
)
def test_every_option_changes_the_path(change: dict[str, float | str]) -> None:
    paths = []
    for options in (TrustOptions(), TrustOptions(**change)):  # type: ignore[arg-type]
        evaluate, asked = evaluator(valley(0.68, 0.3))
        search(evaluate, options)
        paths.append(asked)
    assert paths[0] != paths[1]
