from __future__ import annotations

import numpy as np
import pytest

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa.bandit import Bandit, reward


@pytest.mark.parametrize(
    "previous, loss, wanted",
    [(1.0, 1.0, 0.5), (1.0, 0.5, 0.75), (1.0, 0.0, 1.0), (1.0, 1.5, 0.25), (1.0, 9.0, 0.0), (0.0, 1.0, 0.5)],
)
def test_reward(previous: float, loss: float, wanted: float) -> None:
    assert reward(previous, loss) == wanted


def test_each_arm_is_compared_with_itself() -> None:
    bandit = Bandit((0.2, 0.8), 0)
    bandit.learn(0, 1.0)
    bandit.learn(1, 100.0)  # a harder fraction, not a worse one
    assert bandit.successes.tolist() == [1, 1] and bandit.failures.tolist() == [1, 1]
    bandit.learn(0, 0.5)
    bandit.learn(1, 100.0)
    assert bandit.successes.tolist() == [1.75, 1.5] and bandit.failures.tolist() == [1.25, 1.5]
    assert bandit.pulls.tolist() == [2, 2]


def test_it_finds_the_arm_that_pays_and_keeps_trying_the_others() -> None:
    """The second arm's loss falls by 40 % a pull, the others' rise by 40 %: rewards .7 and .3."""
    bandit = Bandit((0.2, 0.5, 0.8), 0)
    losses = np.ones(3)
    for _ in range(300):
        arm = bandit.choose()
        losses[arm] *= 0.6 if arm == 1 else 1.4
        bandit.learn(arm, float(losses[arm]))
    assert bandit.pulls[1] > 200 and bandit.pulls.min() >= 3


def test_choices_are_the_seed() -> None:
    def choices(seed: int) -> list[int]:
        bandit = Bandit((0.2, 0.5, 0.8), seed)
        return [bandit.choose() for _ in range(20)]

    assert choices(1) == choices(1) != choices(2)


def test_refuses_no_arms() -> None:
    with pytest.raises(UsageError, match="no fractions"):
        Bandit((), 0)
