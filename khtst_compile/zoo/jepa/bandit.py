"""How much to mask, learned while training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from khtst_compile.errors import UsageError
from khtst_compile.zoo.streams import stream


def reward(previous: float, loss: float) -> float:
    """1/2 + (previous - loss)/(2 previous), clipped to [0, 1]: 1/2 where nothing changed, 1 where the loss fell to 0."""
    return min(1.0, max(0.0, 0.5 + (previous - loss) / (2 * previous))) if previous > 0 else 0.5


class Bandit:
    """Thompson sampling over mask fractions, with a Beta belief about each one's reward (Agrawal and Goyal, 2012: a reward r in [0, 1]
    counts as r of a success and 1 - r of a failure). Its random numbers are a stream of their own."""

    def __init__(self, fractions: Sequence[float], seed: int) -> None:
        if not fractions:
            raise UsageError("bandit: no fractions; needed: one or more")
        self.fractions = tuple(fractions)
        self.successes, self.failures = np.ones(len(fractions)), np.ones(len(fractions))
        self.pulls = np.zeros(len(fractions), dtype=np.int64)
        self.last: list[float | None] = [None] * len(fractions)
        self.random = np.random.default_rng(stream(seed, "bandit").initial_seed())

    def choose(self) -> int:
        """The arm whose draw from its belief is largest."""
        return int(np.argmax(self.random.beta(self.successes, self.failures)))

    def learn(self, arm: int, loss: float) -> None:
        """`loss`: the predictive loss of an epoch with this arm's fraction. The first of an arm has nothing to be compared with."""
        self.pulls[arm] += 1
        previous, self.last[arm] = self.last[arm], loss
        if previous is not None:
            gained = reward(previous, loss)
            self.successes[arm] += gained
            self.failures[arm] += 1 - gained
