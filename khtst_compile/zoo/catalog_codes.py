"""Entries of the codebook quantizers and of the state space model, each trained for a moment on real data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from khtst_compile.zoo import data
from khtst_compile.zoo.autoencoder import CodeAutoencoder, fit
from khtst_compile.zoo.catalog import Entry
from khtst_compile.zoo.gsq import ResidualQuantizer, Schedule, StiefelQuantizer
from khtst_compile.zoo.ssm import ReplayBuffer, ReplaySsm, train_step
from khtst_compile.zoo.streams import stream

STEPS = 100  # of training: enough that codes are used and layers have the outliers of trained ones
PIECES, SIZE = 7, 8  # of the state space model: samples of a piece, pieces of a sequence
_TAU = Schedule(1.0, 0.1, STEPS)


def _quantizer(kind: str) -> tuple[int, StiefelQuantizer | ResidualQuantizer]:
    """Width of the code, and what quantizes it."""
    if kind == "gsq-residual":
        return 64, ResidualQuantizer(64, 64, 3, tau=_TAU)
    if kind == "gsq-frame":
        return 32, StiefelQuantizer(32, 96, mode="ste_ema")
    return 64, StiefelQuantizer(64, 64, tau=_TAU)


@cache
def _autoencoder(kind: str) -> CodeAutoencoder:
    d, quantizer = _quantizer(kind)
    model = CodeAutoencoder(192, d, quantizer, seed=0)
    fit(model, data.photograph_patches("china.jpg"), STEPS, seed=0, batch=128)
    return model.freeze()


@cache
def _ssm() -> ReplaySsm:
    model = ReplaySsm(SIZE, 48, SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    buffer = ReplayBuffer(4096, (PIECES, SIZE), (PIECES, SIZE))
    batches, replays = stream(0, "batches"), stream(0, "replay")
    for series in (data.ecg(), data.sea_temperature()):
        x, target = data.windows(series, PIECES, SIZE)
        for _ in range(STEPS):
            rows = torch.randint(len(x), (16,), generator=batches)
            train_step(model, optimizer, buffer, x[rows], target[rows], alpha=0.5, generator=replays)
    return model.eval()


def _copy(make: Callable[[], nn.Module]) -> nn.Module:
    return copy.deepcopy(make())


def _patches() -> tuple[Tensor]:
    return (data.photograph_patches("china.jpg")[:4],)


def _patch_samples() -> Sequence[tuple[Tensor]]:
    both = torch.cat([data.photograph_patches(name) for name in ("china.jpg", "flower.jpg")])
    return [(part,) for part in torch.split(_shuffled(both)[:1024], 16)]


def _pieces() -> tuple[Tensor]:
    return (data.windows(data.ecg(), PIECES, SIZE)[0][:4],)


def _piece_samples() -> Sequence[tuple[Tensor]]:
    both = torch.cat([data.windows(series, PIECES, SIZE)[0] for series in (data.ecg(), data.sea_temperature())])
    return [(part,) for part in torch.split(_shuffled(both), 16)]


def _shuffled(rows: Tensor) -> Tensor:
    """What judges has to be like what calibrates."""
    return rows[torch.randperm(len(rows), generator=stream(0, "samples"))]


ENTRIES: tuple[Entry, ...] = (
    *(
        Entry(name, partial(_copy, partial(_autoencoder, name)), _patches, _patch_samples)
        for name in ("gsq", "gsq-frame", "gsq-residual")
    ),
    Entry("ssm", partial(_copy, _ssm), _pieces, _piece_samples),
)
