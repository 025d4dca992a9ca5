"""Each variant trains on its real data, and what is compiled of it computes what was trained."""

from __future__ import annotations

import pytest
import torch

from khtst_compile.zoo.jepa.core import Jepa
from khtst_compile.zoo.jepa.training import Settings, train
from khtst_compile.zoo.jepa.variants import VARIANTS

TEN = {"image", "video", "audio", "point", "volume", "brain", "series", "crossed", "edited", "bidirectional"}


def test_all_ten_are_there() -> None:
    assert set(VARIANTS) >= TEN


@pytest.mark.parametrize("name", VARIANTS)
def test_trains_and_repeats(name: str) -> None:
    variant = VARIANTS[name]()
    patches = tuple(x[:128] for x in variant.patches())
    runs = []
    for _ in range(2):
        model = variant.build(0)
        history = train(model, patches, variant.draw, Settings(epochs=16, batch=32))
        runs.append((history, model.state_dict()))
    assert runs[0][0] == runs[1][0] and all(torch.equal(runs[0][1][n], runs[1][1][n]) for n in runs[0][1])
    history = runs[0][0]
    # Predictions begin near those of nothing, so V is what falls first. Each epoch has a mask of its own, and V with it.
    assert min(e.total for e in history[-4:]) < 0.9 * history[0].total
    assert any(not torch.equal(a, b) for a, b in zip(variant.build(0).parameters(), variant.build(1).parameters(), strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_compiled_exports_for_any_batch(name: str) -> None:
    variant = VARIANTS[name]()
    inputs = tuple(x[:3] for x in variant.load())
    patches = tuple(x[:3] for x in variant.patches())
    model = variant.build(0).eval()
    for part, (module, read) in variant.compiled(model).items():
        chosen = tuple(inputs[i] for i in read)
        batch = torch.export.Dim("batch", min=1, max=1024)
        exported = torch.export.export(module, chosen, dynamic_shapes=[{0: batch}] * len(chosen), strict=False)
        for count in (1, 2, 3):
            some = tuple(x[:count] for x in chosen)
            found = exported.module()(*some)
            # A product of other sizes may be summed in another order.
            torch.testing.assert_close(found, module(*some), rtol=1e-5, atol=1e-6)
        if part == "encoder":
            assert torch.equal(module(*chosen), model.encoder(patches[0]))  # type: ignore[operator]


def test_the_action_is_read_by_what_is_compiled() -> None:
    variant = VARIANTS["action"]()
    model = variant.build(0).eval()
    module, read = variant.compiled(model)["predictor"]
    clips, moves = (variant.load()[i][:4] for i in read)
    found = module(clips, moves)
    assert isinstance(model, Jepa) and found.shape == (4, 32, 32) and not torch.equal(found, module(clips, moves + 1))
