"""Trains any of the predictors: AdamW, a cosine, clipped gradients, a fresh mask every epoch, one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa.bandit import Bandit
from khtst_compile.zoo.jepa.core import Learner
from khtst_compile.zoo.jepa.losses import Losses
from khtst_compile.zoo.jepa.masks import Mask
from khtst_compile.zoo.streams import stream


@dataclass(frozen=True)
class Settings:
    """epochs: as many masks; batch: samples a step; rate: AdamW's at the start, decay its weight decay; momentum: the target encoder's;
    fractions: of the patches to mask, one fixed or several that a bandit chooses among; clip: the gradient's norm at most."""

    epochs: int = 40
    batch: int = 64
    rate: float = 2e-3
    momentum: float = 0.99
    fractions: tuple[float, ...] = (0.5,)
    clip: float = 1.0
    decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Epoch:
    """Means over an epoch's samples. arm: which fraction was masked; norm: the largest norm of a gradient before clipping."""

    total: float
    predictive: float
    variance: float
    arm: int
    norm: float


def cosine(step: int, steps: int) -> float:
    """1/2 (1 + cos(pi step/steps)): 1 at the first step, 0 after the last (Loshchilov and Hutter, 2017, without restarts)."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    model: Learner,
    data: Sequence[Tensor],
    draw: Callable[[float, torch.Generator], Mask] | None,
    settings: Settings,
    bandit: Bandit | None = None,
) -> list[Epoch]:
    """Train in place. data: the model's inputs, samples first, on its device; draw: (fraction, generator) -> a mask, None for a model
    that takes none. `bandit` defaults to one over `settings.fractions`, if there are several.

    Masks, batches and the bandit have streams of their own under the seed: what one draws moves no other. The last samples of an epoch that
    fill no batch are left out. Raises UsageError where none would be left.
    """
    samples, device = data[0].shape[0], data[0].device
    size = min(settings.batch, samples)
    if size < 2 or settings.epochs < 1:
        raise UsageError(f"train: {samples} samples, batches of {settings.batch}, {settings.epochs} epochs; needed: 2, 2 and 1")
    masks, batches = stream(settings.seed, "masks"), stream(settings.seed, "batches")
    if bandit is None and len(settings.fractions) > 1:
        bandit = Bandit(settings.fractions, settings.seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.rate, weight_decay=settings.decay)
    rounds = samples // size
    steps = rounds * settings.epochs
    history = []
    model.train()
    for epoch in range(settings.epochs):
        arm = 0 if bandit is None else bandit.choose()
        fraction = settings.fractions[0] if bandit is None else bandit.fractions[arm]
        keywords = {} if draw is None else {"mask": draw(fraction, masks).to(device)}
        order = torch.randperm(samples, generator=batches).to(device)
        sums, norm = torch.zeros(3, device=device), torch.zeros((), device=device)
        for i in range(rounds):
            chosen = order[i * size : (i + 1) * size]
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * cosine(epoch * rounds + i, steps)
            losses: Losses = model(*(x[chosen] for x in data), **keywords)
            optimizer.zero_grad()
            losses.total.backward()  # type: ignore[no-untyped-call]
            norm = torch.maximum(norm, nn.utils.clip_grad_norm_(trained, settings.clip))
            optimizer.step()
            model.follow(settings.momentum)
            sums += torch.stack([losses.total, losses.predictive, losses.variance]).detach()
        total, predictive, variance = (sums / rounds).tolist()
        history.append(Epoch(total, predictive, variance, arm, float(norm)))
        if bandit is not None:
            bandit.learn(arm, predictive)
    model.eval()
    return history
