"""Logits -> the next token: the most likely one, or a seeded draw. Needs numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import UsageError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the most likely token (the first of equals), above 0 divides the logits before the draw; top_k: only the so
    many most likely (0: all); top_p: of those only the most likely that together reach this probability. Raises UsageError for values
    out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}; needed: 0 (most likely token) or above")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; needed: 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; needed: above 0, at most 1")

    def pick(self, logits: Array, generator: np.random.Generator) -> int:
        """logits: (vocabulary,) float32 -> a token id."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = self._candidates(logits)
        chances = probabilities(logits[order], self.temperature)
        if self.top_p < 1:
            kept = int(np.searchsorted(np.cumsum(chances), self.top_p)) + 1
            order, chances = order[:kept], chances[:kept]
        edges = np.cumsum(chances)
        place = np.searchsorted(edges, generator.random() * edges[-1], side="right")
        return int(order[min(int(place), len(order) - 1)])

    def _candidates(self, logits: Array) -> Array:
        """Ids from the most to the least likely, lower ids first among equals."""
        ids = np.arange(logits.size)
        if 0 < self.top_k < logits.size:
            ids = ids[logits >= np.partition(logits, -self.top_k)[-self.top_k]]
        order: Array = ids[np.argsort(-logits[ids], kind="stable")]
        return order[: self.top_k or None]


def probabilities(logits: Array, temperature: float) -> Array:
    """softmax(logits / temperature) in float64; logits: (n,)."""
    scaled = logits.astype(np.float64) / temperature
    exps = np.exp(scaled - scaled.max())
    return np.asarray(exps / exps.sum())
