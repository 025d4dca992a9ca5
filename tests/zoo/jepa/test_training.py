from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa import training
from khtst_compile.zoo.jepa.bandit import Bandit
from khtst_compile.zoo.jepa.core import Encoder, Jepa, Predictor
from khtst_compile.zoo.jepa.losses import Losses
from khtst_compile.zoo.jepa.masks import Mask, blocks, draw_mask
from khtst_compile.zoo.jepa.training import Epoch, Settings, cosine, train
from khtst_compile.zoo.streams import stream

SHORT = Settings(epochs=4, batch=16)


def model() -> Jepa:
    torch.manual_seed(0)
    return Jepa(Encoder(6, 8), Predictor(8, 4, 8), 9, 4)


def data(count: int = 70) -> tuple[Tensor]:
    return (torch.randn(count, 9, 6, generator=torch.Generator().manual_seed(1)),)


def draw(fraction: float, generator: torch.Generator) -> Mask:
    return draw_mask(blocks, (3, 3), fraction, generator)


def run(settings: Settings = SHORT, bandit: Bandit | None = None) -> tuple[list[Epoch], dict[str, Tensor]]:
    made = model()
    return train(made, data(), draw, settings, bandit), made.state_dict()


def same(a: tuple[list[Epoch], dict[str, Tensor]], b: tuple[list[Epoch], dict[str, Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


Draw = Callable[[float, torch.Generator], Mask]


def repeats(drawing: Draw) -> bool:
    """Two runs agree to the bit, whatever state torch's own generator is in, and leave that as it was."""
    runs = []
    for disturbance in (1, 2):
        made = model()
        torch.rand(disturbance)
        state = torch.get_rng_state()
        runs.append((train(made, data(), drawing, SHORT), made.state_dict()))
        if not torch.equal(torch.get_rng_state(), state):
            return False
    return same(*runs)


def planted_own_generator(fraction: float, generator: torch.Generator) -> Mask:
    """Masks from torch's own generator."""
    return draw_mask(blocks, (3, 3), fraction, torch.default_generator)


def test_two_runs_of_one_seed_agree_to_the_bit() -> None:
    assert repeats(draw)
    assert not repeats(planted_own_generator)
    assert not same(run(), run(replace(SHORT, seed=1)))


def one_arm_is_the_fixed_fraction(arms: type[Bandit]) -> bool:
    return same(run(replace(SHORT, fractions=(0.4,))), run(replace(SHORT, fractions=(0.4,)), arms((0.4,), SHORT.seed)))


class PlantedStream(Bandit):
    """Draws from the stream that masks are drawn from: as if both had one generator."""

    current: torch.Generator

    def choose(self) -> int:
        torch.rand(1, generator=self.current)
        return super().choose()


def test_one_arm_is_the_fixed_fraction_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_arm_is_the_fixed_fraction(Bandit)

    def remembering(seed: int, name: str) -> torch.Generator:
        made = stream(seed, name)
        if name == "masks":
            PlantedStream.current = made
        return made

    monkeypatch.setattr(training, "stream", remembering)
    assert not one_arm_is_the_fixed_fraction(PlantedStream)


def test_several_arms_are_all_tried_and_each_knows_its_loss() -> None:
    bandit = Bandit((0.3, 0.6), 0)
    history, _ = run(replace(SHORT, epochs=12), bandit)
    assert {e.arm for e in history} == {0, 1}
    assert bandit.last == [next(e.predictive for e in reversed(history) if e.arm == a) for a in (0, 1)]
    again, _ = run(replace(SHORT, epochs=12, fractions=(0.3, 0.6)))  # the same bandit, made by `train`
    assert again == history


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.optim.AdamW]]:
    made: list[torch.optim.AdamW] = []

    class Watched(torch.optim.AdamW):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            self.rates: list[float] = []
            self.norms: list[float] = []
            made.append(self)

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.rates.append(self.param_groups[0]["lr"])
            gradients = [p.grad for g in self.param_groups for p in g["params"]]
            self.norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    yield made


def test_adamw_and_a_cosine(optimizers: list[torch.optim.AdamW]) -> None:
    run(replace(SHORT, rate=0.01))
    (watched,) = optimizers
    assert watched.defaults["weight_decay"] == 0.01
    steps = 4 * (70 // 16)
    rates: list[float] = watched.rates  # type: ignore[attr-defined]
    assert rates == [0.01 * 0.5 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]


def clipped(optimizers: list[torch.optim.AdamW]) -> bool:
    """No step has a gradient beyond the limit, and some would have had. clip_grad_norm_ divides by norm + 1e-6."""
    history, _ = run(replace(SHORT, clip=0.05))
    norms: list[float] = optimizers[-1].norms  # type: ignore[attr-defined]
    return 0.0499 < max(norms) <= 0.05 * (1 + 1e-5) and max(e.norm for e in history) > 0.05


def test_gradients_are_clipped(optimizers: list[torch.optim.AdamW], monkeypatch: pytest.MonkeyPatch) -> None:
    assert clipped(optimizers)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", planted_norm_alone)
    assert not clipped(optimizers)


def planted_norm_alone(parameters: list[Tensor], limit: float) -> Tensor:
    """The norm, and no clipping."""
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


def test_clipping_is_off_where_gradients_are_small(optimizers: list[torch.optim.AdamW]) -> None:
    history, _ = run(replace(SHORT, clip=1e6))
    assert max(e.norm for e in history) == pytest.approx(max(optimizers[0].norms), rel=1e-5)  # type: ignore[attr-defined]


def test_cosine_goes_from_one_to_nothing() -> None:
    assert cosine(0, 10) == 1 and cosine(5, 10) == pytest.approx(0.5) and cosine(10, 10) == pytest.approx(0, abs=1e-15)


def fresh_every_epoch(drawing: Draw) -> bool:
    """Epochs differ in their masks, steps of an epoch do not."""
    seen: list[tuple[int, ...]] = []

    class Watching(Jepa):
        def forward(self, patches: Tensor, condition: Tensor | None = None, *, mask: Mask) -> Losses:
            seen.append(tuple(mask.context.tolist()))
            return super().forward(patches, condition, mask=mask)

    torch.manual_seed(0)
    train(Watching(Encoder(6, 8), Predictor(8, 4, 8), 9, 4), data(), drawing, replace(SHORT, epochs=8))
    epochs = [seen[i : i + 4] for i in range(0, len(seen), 4)]
    return len(epochs) == 8 and all(len(set(e)) == 1 for e in epochs) and len({e[0] for e in epochs}) > 3


def planted_stale(fraction: float, generator: torch.Generator) -> Mask:
    """The same mask every time."""
    return draw(fraction, torch.Generator().manual_seed(0))


def test_a_fresh_mask_every_epoch_and_one_within_it() -> None:
    assert fresh_every_epoch(draw)
    assert not fresh_every_epoch(planted_stale)


def test_every_sample_once_an_epoch() -> None:
    seen: list[Tensor] = []

    class Watching(Jepa):
        def forward(self, patches: Tensor, condition: Tensor | None = None, *, mask: Mask) -> Losses:
            seen.append(patches[:, 0, 0].clone())
            return super().forward(patches, condition, mask=mask)

    torch.manual_seed(0)
    train(Watching(Encoder(6, 8), Predictor(8, 4, 8), 9, 4), data(64), draw, replace(SHORT, epochs=2))
    assert len(seen) == 8
    first, second = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert torch.equal(first.sort().values, data(64)[0][:, 0, 0].sort().values) and not torch.equal(first, second)


def test_the_target_follows_after_every_step_and_ends_in_eval_mode() -> None:
    made = model()
    train(made, data(), draw, replace(SHORT, momentum=0.0))
    assert all(torch.equal(a, b) for a, b in zip(made.target.copy.parameters(), made.encoder.parameters(), strict=True))
    assert not made.training
    kept = model()
    before = {n: p.clone() for n, p in kept.target.copy.named_parameters()}
    train(kept, data(), draw, replace(SHORT, momentum=1.0))
    assert all(torch.equal(before[n], p) for n, p in kept.target.copy.named_parameters())


def test_training_lowers_v_and_keeps_features_apart() -> None:
    history, _ = run(replace(SHORT, epochs=40, rate=5e-3))
    assert history[-1].variance < 0.5 * history[0].variance


@pytest.mark.parametrize("settings, count", [(replace(SHORT, epochs=0), 70), (replace(SHORT, batch=1), 70), (SHORT, 1)])
def test_refusals(settings: Settings, count: int) -> None:
    with pytest.raises(UsageError, match=r"train: .*needed: 2, 2 and 1"):
        train(model(), data(count), draw, settings)
