"""Entries of the mixtures of experts, each trained for a moment on real data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from khtst_compile.zoo import data
from khtst_compile.zoo.catalog import Entry
from khtst_compile.zoo.moe import DECODER, ENCODER, Output, RedirectableMoe, Refinement, SonicMoe, fair_capacity, k_means, refine
from khtst_compile.zoo.moe.bytes import ByteModel, train, windows
from khtst_compile.zoo.streams import fresh, stream

STEPS = 100  # of training: enough that experts differ and layers have the outliers of trained ones
BATCH, D = 64, 64
SEQUENCE = 8  # patches of a photograph in a row


def byte_model(batch: int, d: int = D, experts: int = 8, top_k: int = 2, seed: int = 0) -> ByteModel:
    """A byte model of two SonicMoE layers whose capacity is 5/4 of an even load at `batch` texts; not trained."""
    with fresh(seed, "weights"):
        capacity = fair_capacity(batch, experts, top_k)
        return ByteModel(d, [SonicMoe(d, experts, top_k, capacity) for _ in range(2)]).eval()


@cache
def _bytes() -> ByteModel:
    model = byte_model(BATCH)
    train(model, data.text_bytes(), STEPS, batch=BATCH, seed=0)
    return model


@cache
def _patches() -> Tensor:
    """(n, SEQUENCE, 192) float32, neighbors in a row of the picture."""
    patches = data.photograph_patches("china.jpg")
    return patches[: len(patches) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE, patches.shape[1])


@cache
def _redirectable() -> RedirectableMoe:
    """Trained to give back a sequence of patches of which one is missing: the encoder's pass, then the decoder's."""
    x, draws = _patches(), stream(0, "batches")
    with fresh(0, "weights"):
        block = RedirectableMoe(x.shape[-1], 4, 1, fair_capacity(16 * SEQUENCE, 2, 1), heads=4)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(STEPS):
        whole = x[torch.randint(len(x), (16,), generator=draws)]
        missing = torch.randint(SEQUENCE, (16, 1), generator=draws) == torch.arange(SEQUENCE)
        encoded = block(whole.masked_fill(missing.unsqueeze(-1), 0.0), ENCODER)
        decoded = block(encoded.output, DECODER)
        loss = (decoded.output - whole).square().mean() + 0.01 * (encoded.auxiliary + decoded.auxiliary)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return block.eval()


@cache
def _refinement() -> Refinement:
    images = data.digits()[0].flatten(1)
    return refine(images[:1300], images[1300:], k_means(images[:1300], 6, seed=0), 12, seed=0, steps=STEPS)


def _role(make: Callable[[], nn.Module], role: str) -> nn.Module:
    return Output(copy.deepcopy(make()), role).eval()


def _bytes_samples() -> Sequence[tuple[Tensor]]:
    text = data.text_bytes()
    starts = torch.randint(len(text) - 16, (8, BATCH), generator=stream(0, "samples"))
    return [(windows(text, s, 16)[0],) for s in starts]


def _patch_samples(role: str) -> Sequence[tuple[Tensor]]:
    x = _patches()[torch.randperm(len(_patches()), generator=stream(0, "samples"))][:128]
    if role == DECODER:
        with torch.no_grad():
            x = _redirectable()(x, ENCODER).output
    return [(part,) for part in torch.split(x, 16)]


def _digit_samples() -> Sequence[tuple[Tensor]]:
    images = data.digits()[0].flatten(1)
    chosen = images[torch.randperm(len(images), generator=stream(0, "samples"))][:512]
    return [(part,) for part in torch.split(chosen, 64)]


def _first(samples: Callable[[], Sequence[tuple[Tensor]]]) -> tuple[Tensor]:
    return samples()[0]


def _entry(name: str, build: Callable[[], nn.Module], samples: Callable[[], Sequence[tuple[Tensor]]]) -> Entry:
    return Entry(name, build, partial(_first, samples), samples)


ENTRIES: tuple[Entry, ...] = (
    _entry("sonic-moe", lambda: copy.deepcopy(_bytes()), _bytes_samples),
    *(_entry(f"redirectable-{r}", partial(_role, _redirectable, r), partial(_patch_samples, r)) for r in (ENCODER, DECODER)),
    _entry("prototype-corrector", partial(_role, lambda: _refinement().corrector, ENCODER), _digit_samples),
    _entry("prototype-decoder", partial(_role, lambda: _refinement().redirected, DECODER), _digit_samples),
)
