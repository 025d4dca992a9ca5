"""What was found in a graph: codebooks by the names of their nodes, so that a copy of the graph is edited by the same description."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from khtst_compile.contract import Skipped


@dataclass(frozen=True, eq=False)
class Level:
    """One argmax. anchor: the node that holds its ids; values: nodes that hold its value, row for row; through: (node, vector) of
    straight-through forms of it; ids: nodes that hold the same ids in the same order, the anchor among them.

    codes: (K, d) float32; bias: (K,) float32 or None; table: (K, v) float32.
    """

    anchor: str
    codes: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor
    values: tuple[str, ...]
    through: tuple[tuple[str, str], ...] = ()
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Vectors:
    """One codebook_lookup to be. z: the node of vectors (..., d); levels: one, or those of a residual stack, whose total is in the last
    level's `values`; head: (index, heads) where z's first axis is that of codebooks side by side; scored: nodes that compute scores;
    slack: rounding of the model's own scores besides that of products, in units of the scores; ids: which public output holds its ids."""

    site: str
    source: str
    z: str
    levels: tuple[Level, ...]
    running: bool
    euclidean: bool
    slack: float
    claims: bool
    scored: tuple[str, ...]
    ids: dict[str, object] | None = None
    head: tuple[int, int] | None = None

    @property
    def anchors(self) -> tuple[str, ...]:
        return tuple(level.anchor for level in self.levels)

    def through_forms(self) -> tuple[tuple[str, str], ...]:
        """(node, vector) of each straight-through form of the value."""
        return self.levels[-1].through


@dataclass(frozen=True, eq=False)
class Steps:
    """One step_lookup to be. z: (..., d); anchor: the node of ids (...); values: nodes that hold the values (..., d).

    thresholds: (d, n - 1) float32; steps: (d, n) float32; basis: (d,) int32. digits: the node that holds each feature's digit.
    """

    site: str
    source: str
    z: str
    anchor: str
    digits: str
    values: tuple[str, ...]
    through: tuple[tuple[str, str], ...]
    thresholds: torch.Tensor
    steps: torch.Tensor
    basis: torch.Tensor
    ids: dict[str, object] | None = None

    @property
    def anchors(self) -> tuple[str, ...]:
        return (self.anchor,)

    def through_forms(self) -> tuple[tuple[str, str], ...]:
        """(node, vector) of each straight-through form of the value."""
        return self.through


Codebook = Vectors | Steps


@dataclass(frozen=True)
class Found:
    """codebooks, in graph order; skipped: what looks like one and is not understood, with the reason."""

    codebooks: tuple[Codebook, ...] = ()
    skipped: tuple[Skipped, ...] = field(default_factory=tuple)

    def replaced(self) -> set[str]:
        """Nodes that compute scores of a codebook that was found."""
        return {name for c in self.codebooks if isinstance(c, Vectors) for name in c.scored}
