"""What of each predictor is compiled, after a short training on its real data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from khtst_compile.zoo.catalog import Entry
from khtst_compile.zoo.jepa.training import Settings, train
from khtst_compile.zoo.jepa.variants import VARIANTS
from khtst_compile.zoo.streams import stream

BRIEFLY = Settings(epochs=10, rate=5e-3)  # enough that embeddings are no longer those of birth
MOST = 512  # samples of a catalog entry

# Which parts: all encoders, and predictors where they read something else than an encoder's embedding and a place.
PARTS: dict[str, tuple[str, ...]] = {
    "image": ("encoder",),
    "image-moe": ("encoder",),
    "image-codes": ("codes",),
    "photograph": ("encoder",),
    "video": ("encoder",),
    "action": ("predictor",),
    "audio": ("encoder",),
    "point": ("encoder",),
    "volume": ("encoder",),
    "brain": ("encoder",),
    "series": ("encoder",),
    "crossed": ("first", "second", "predictor"),
    "edited": ("predictor",),
    "bidirectional": ("ahead", "back"),
}


@cache
def _trained(name: str) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    variant = VARIANTS[name]()
    model = variant.build(0)
    train(model, tuple(x[:MOST] for x in variant.patches()), variant.draw, BRIEFLY)
    return variant.compiled(model)


@cache
def _samples(name: str, part: str) -> tuple[Tensor, ...]:
    """The inputs of a part, in an order drawn once: what judges has to be like what calibrates."""
    read = _trained(name)[part][1]
    inputs = VARIANTS[name]().load()
    order = torch.randperm(len(inputs[0]), generator=stream(0, "catalog"))[:MOST]
    return tuple(inputs[i][order] for i in read)


def _build(name: str, part: str) -> nn.Module:
    return copy.deepcopy(_trained(name)[part][0]).eval()


def _inputs(name: str, part: str) -> tuple[Tensor, ...]:
    return tuple(x[:4] for x in _samples(name, part))


def _batches(name: str, part: str) -> Sequence[tuple[Tensor, ...]]:
    return list(zip(*(torch.split(x, 16) for x in _samples(name, part)), strict=True))


ENTRIES: tuple[Entry, ...] = tuple(
    Entry(f"jepa-{name}-{part}", partial(_build, name, part), partial(_inputs, name, part), partial(_batches, name, part))
    for name, parts in PARTS.items()
    for part in parts
)
