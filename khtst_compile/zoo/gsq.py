"""GSQ: a vector quantizer whose codebook is orthonormal (a point of the Stiefel manifold), trained by Gumbel-softmax or straight through.

A raw matrix W (K, d) is trained; the codebook is its polar factor C (K, d). For K <= d rows are orthonormal, C Cᵀ = I. For K > d they
cannot be: C is a tight frame then, Cᵀ C = I, and its rows have different norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.frozen import FrozenQuantizer, FrozenResidual, Quantized, quantize_levels
from khtst_compile.zoo.noise import gumbel, uniform
from khtst_compile.zoo.polar import delta_ort, polar
from khtst_compile.zoo.streams import stream

__all__ = [
    "CodeReport",
    "Quantized",
    "ResidualQuantizer",
    "Schedule",
    "StiefelQuantizer",
    "perplexity",
    "relaxed",
    "straight_through",
]

MODES = ("gsq", "ste_ema")


class Schedule(NamedTuple):
    """tau falls linearly from `start` to `end` within `steps` training passes and stays there."""

    start: float = 1.0
    end: float = 0.1
    steps: int = 1000

    def at(self, step: Tensor) -> Tensor:
        """step: () int64, passes so far -> () float32."""
        return self.start + (self.end - self.start) * (step.float() / self.steps).clamp(max=1.0)


@dataclass(frozen=True)
class CodeReport:
    """counts: how often each code was chosen; perplexity: exp of the entropy of their shares, between 1 and the number of codes;
    dead: codes never chosen; delta_ort: largest |entry| of Gram - I; scale: R; tight_frame: K > d."""

    counts: tuple[int, ...]
    perplexity: float
    dead: tuple[int, ...]
    delta_ort: float
    scale: float
    tight_frame: bool


def relaxed(z: Tensor, c: Tensor, noise: Tensor, tau: Tensor | float, scale: Tensor | float) -> Tensor:
    """`R softmax(z Cᵀ / tau + g) C` (Jang et al. 2017): z (..., d), c (K, d), noise (..., K) -> (..., d), exact gradients in z and c."""
    return scale * (torch.softmax(z @ c.T / tau + noise, -1) @ c)


def straight_through(z: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradient of z: z + stopgrad(value - z), both (..., d)."""
    return z + (value - z).detach()


def perplexity(counts: Tensor) -> float:
    """counts: (K,) -> exp(-sum p ln p), p = counts / sum; 0 where nothing was counted."""
    if not int(counts.sum()):
        return 0.0
    p = counts.double() / counts.sum()
    return float(torch.special.entr(p).sum().exp())


class StiefelQuantizer(nn.Module):
    """d features, `codes` codes: (..., d) float -> Quantized((..., d) float, (...) int64).

    mode "gsq": trains W by gradients through the relaxation. mode "ste_ema": values pass gradients straight through to z, and W moves
    towards the sums of the vectors that chose each code, whose polar factor maximizes sum <z, c> (orthogonal Procrustes, Schönemann
    1966); `decay` is that average's and R's. root: R is divided by sqrt(K). seed: of W and of the noise.

    Each training pass counts codes, moves R and advances tau; all of it is in buffers, so a checkpoint goes on where it stopped.
    """

    def __init__(
        self,
        d: int,
        codes: int,
        *,
        mode: str = "gsq",
        tau: Schedule = Schedule(),  # noqa: B008 - a constant
        root: bool = False,
        decay: float = 0.99,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise UsageError(f"StiefelQuantizer: mode is {mode!r}; known: {', '.join(MODES)}")
        if d < 1 or codes < 1 or tau.steps < 1 or min(tau.start, tau.end) <= 0 or not 0 <= decay < 1:
            raise UsageError(
                f"StiefelQuantizer: d={d}, codes={codes}, tau={tuple(tau)}, decay={decay}; needed: d and codes and steps of 1 or more, "
                "temperatures above 0, a decay in [0, 1)"
            )
        self.d, self.codes, self.mode, self.tau, self.root, self.decay, self.seed = d, codes, mode, tau, root, decay, seed
        weight = torch.randn(codes, d, generator=stream(seed, "gsq/codes"))
        self.weight = nn.Parameter(weight, requires_grad=mode == "gsq")
        self.scale: Tensor
        self.steps: Tensor
        self.counts: Tensor
        self.register_buffer("scale", torch.tensor(codes**-0.5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(codes, dtype=torch.int64))

    @property
    def tight_frame(self) -> bool:
        """K > d: the columns are orthonormal, the rows are not."""
        return self.codes > self.d

    def codebook(self) -> Tensor:
        """C, (codes, d), differentiable in W."""
        return polar(self.weight)

    def forward(self, z: Tensor) -> Quantized:
        if z.shape[-1] != self.d:
            raise UsageError(f"StiefelQuantizer: z is {tuple(z.shape)}; needed: (..., {self.d})")
        c = self.codebook()
        ids = (z @ c.T).argmax(-1)
        hard = self.scale.clone() * c[ids]
        if not self.training:
            return Quantized(hard, ids)
        if self.mode == "gsq":
            noise = gumbel(uniform(self.seed, self.steps, (*z.shape[:-1], self.codes), z))
            values = relaxed(z, c, noise, self.tau.at(self.steps), self.scale.clone())
        else:
            values = straight_through(z, hard)
        self._observe(z.detach().reshape(-1, self.d), c.detach(), ids.reshape(-1))
        return Quantized(values, ids)

    @torch.no_grad()
    def _observe(self, z: Tensor, c: Tensor, ids: Tensor) -> None:
        """Move what is averaged: z (n, d), c (codes, d), ids (n,)."""
        self.counts.index_add_(0, ids, torch.ones_like(ids))
        size = torch.linalg.vector_norm(z @ c.T @ c, dim=-1).mean()
        self.scale.lerp_(size / self.codes**0.5 if self.root else size, 1 - self.decay)
        if self.mode == "ste_ema":
            sums = torch.zeros_like(self.weight).index_add_(0, ids, z)
            # W's own size, as the polar factor does not see it; a code that nobody chose stays where it is.
            sums *= torch.linalg.matrix_norm(self.weight) / torch.linalg.matrix_norm(sums).clamp(min=1e-12)
            chosen = torch.zeros_like(self.counts).index_add_(0, ids, torch.ones_like(ids)) > 0
            self.weight.copy_(torch.where(chosen[:, None], self.weight.lerp(sums, 1 - self.decay), self.weight))
        self.steps.add_(1)

    @torch.no_grad()
    def report(self) -> CodeReport:
        """What the training passes since `forget` chose."""
        counts = tuple(int(n) for n in self.counts)
        dead = tuple(k for k, n in enumerate(counts) if n == 0)
        return CodeReport(counts, perplexity(self.counts), dead, delta_ort(self.codebook()), float(self.scale), self.tight_frame)

    def forget(self) -> None:
        """Count codes from zero again."""
        self.counts.zero_()

    @torch.no_grad()
    def freeze(self) -> FrozenQuantizer:
        """The quantizer for use, in eval mode: the codebook worked out in float64. Raises UsageError where W has no full rank."""
        c = polar(self.weight.double())
        return FrozenQuantizer(c, float(self.scale))


class ResidualQuantizer(nn.Module):
    """`levels` StiefelQuantizers, each quantizing what those before it left over: (..., d) -> Quantized((..., d), (..., levels) int64).

    options: those of StiefelQuantizer; level l has seed + l.
    """

    def __init__(self, d: int, codes: int, levels: int, *, seed: int = 0, **options: object) -> None:
        super().__init__()
        if levels < 1:
            raise UsageError(f"ResidualQuantizer: levels is {levels}; needed: 1 or more")
        self.levels = nn.ModuleList(StiefelQuantizer(d, codes, seed=seed + n, **options) for n in range(levels))  # type: ignore[arg-type]

    def forward(self, z: Tensor) -> Quantized:
        return quantize_levels(z, list(self.levels))

    def report(self) -> tuple[CodeReport, ...]:
        """One a level."""
        return tuple(level.report() for level in self._stiefel())

    def freeze(self) -> FrozenResidual:
        """The quantizer for use, in eval mode."""
        return FrozenResidual([level.freeze() for level in self._stiefel()])

    def _stiefel(self) -> list[StiefelQuantizer]:
        return [level for level in self.levels if isinstance(level, StiefelQuantizer)]
