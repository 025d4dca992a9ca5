"""Mixtures and codebooks inside a predictor: the arms are comparable, and all of them train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from khtst_compile.zoo.gsq import StiefelQuantizer
from khtst_compile.zoo.jepa.arms import ARMS, EXPERTS, TOP_K, Residual
from khtst_compile.zoo.jepa.core import Encoder, Jepa, Predictor
from khtst_compile.zoo.jepa.masks import Mask
from khtst_compile.zoo.jepa.variants import VARIANTS
from khtst_compile.zoo.moe import ENCODER, RedirectableMoe

Arm = Callable[[int], nn.Module]
MASK = Mask(torch.tensor([0, 1]), (torch.tensor([2]), torch.tensor([3])))


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def as_large_as_the_mixture(dense: Arm) -> bool:
    return all(size(dense(d)) == size(ARMS["moe"](d)) for d in (8, 32, 64))


def planted_without_the_router(d: int) -> nn.Module:
    """As large as the experts alone, which is what is easily called equal."""
    from khtst_compile.zoo.layers import Mlp

    return Residual(Mlp(d, d, EXPERTS * 2 * d, bias=False))


def test_dense_is_as_large_as_the_mixture_to_the_parameter() -> None:
    assert as_large_as_the_mixture(ARMS["dense"])
    assert not as_large_as_the_mixture(planted_without_the_router)
    assert EXPERTS // TOP_K * size(ARMS["small"](32)) + EXPERTS * 32 == size(ARMS["moe"](32))


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_stands_in_encoder_and_predictor(arm: str) -> None:
    model = VARIANTS[f"image-{arm}"]().build(0)
    assert isinstance(model, Jepa) and model.encoder.body is not None and model.predictor.body is not None
    losses = model(torch.randn(64, 9, 9, generator=torch.Generator().manual_seed(0)), mask=MASK)
    losses.total.backward()
    for part in (model.encoder.body, model.predictor.body):
        reached = {n for n, p in part.named_parameters() if p.grad is not None and bool(p.grad.any())}
        if arm == "moe":  # an expert that no token chose has none
            assert "layer.router.weight" in reached and len(reached) >= 1 + 2 * TOP_K
        else:
            assert reached == {n for n, _ in part.named_parameters()}
    # A mixture's loss is E sum f p, 1 if tokens spread evenly, for encoder and predictor each; the others have none.
    assert (losses.auxiliary > 1.5) if arm == "moe" else (losses.auxiliary == 0)


def test_a_redirectable_mixture_encodes_with_one_role_and_predicts_with_the_other() -> None:
    torch.manual_seed(0)
    mixture = RedirectableMoe(8, 4, 1)

    class Role(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.mixture, self.role = mixture, name

        def forward(self, x: torch.Tensor) -> object:
            return self.mixture(x, self.role)

    model = Jepa(Encoder(5, 8, Role(ENCODER)), Predictor(8, 3, 8, body=Role("decoder")), 4, 3)
    losses = model(torch.randn(6, 4, 5), mask=MASK)
    assert losses.auxiliary > 0 and losses.total.isfinite()
    losses.total.backward()
    assert mixture.router.weight.grad is not None


def test_a_codebook_between_encoder_and_predictor_trains_and_counts() -> None:
    variant = VARIANTS["image-codes"]()
    model = variant.build(0).train()
    assert isinstance(model, Jepa) and isinstance(model.bottleneck, StiefelQuantizer)
    (patches,) = (x[:32] for x in variant.patches())
    losses = model(patches, mask=MASK)
    losses.total.backward()
    assert all(p.grad is not None for p in model.encoder.parameters())
    assert model.bottleneck.report().counts != (0,) * 32 and sum(model.bottleneck.report().counts) == 32 * 2
    module, _ = variant.compiled(model.eval())["codes"]
    values, ids = module(variant.load()[0][:4])
    assert values.shape == (4, 9, 32) and ids.shape == (4, 9) and ids.dtype is torch.int64
