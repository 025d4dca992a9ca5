from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa.core import Encoder, Follower, Jepa, Learner, Predictor, through
from khtst_compile.zoo.jepa.losses import AUXILIARY, Losses
from khtst_compile.zoo.jepa.masks import Mask, blocks, draw_mask
from khtst_compile.zoo.jepa.pairs import Bidirectional, CrossModal, Edited
from khtst_compile.zoo.moe import RedirectableMoe


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


MASK = Mask(torch.tensor([0, 1, 4]), (torch.tensor([2, 3]), torch.tensor([5])))


def jepa(**options: object) -> Jepa:
    return Jepa(Encoder(7, 6), Predictor(6, 3, 6), 6, 3, **options)  # type: ignore[arg-type]


def patches(batch: int = 5) -> Tensor:
    return torch.randn(batch, 6, 7)


def learners() -> list[tuple[Learner, tuple[Tensor, ...], dict[str, Mask]]]:
    """One of each kind, its inputs and keywords."""
    conditioned = Jepa(Encoder(7, 6), Predictor(6, 3, 6, 2), 6, 3)
    x, y = patches(), patches()
    return [
        (jepa(), (x,), {"mask": MASK}),
        (conditioned, (x, torch.randn(5, 2)), {"mask": MASK}),
        (CrossModal(Encoder(7, 6), Encoder(4, 9), Predictor(6, 0, 9), Predictor(9, 0, 6)), (x, torch.randn(5, 3, 4)), {}),
        (Edited(Encoder(7, 6), Predictor(6, 0, 6, 2)), (x, y, torch.randn(5, 2)), {}),
        (Bidirectional(Encoder(7, 6), Predictor(6, 0, 6), Predictor(6, 0, 6)), (x, y), {}),
    ]


def test_the_loss_is_its_formula() -> None:
    model, x = jepa(weight=0.7, gamma=1.5), patches()
    z = model.encoder(x[:, [0, 1, 4]])
    errors = []
    for block in ([2, 3], [5]):
        wanted = model.target.copy(x)[:, block].mean(1)
        question = model.positions[block].mean(0).expand(5, 3)
        predicted = model.predictor.predict(torch.cat([z.mean(1), question], 1))
        errors.append((predicted - wanted).square().sum(1).mean() / 6)
    found = model(x, mask=MASK)
    # The same sums in another order, in float32.
    torch.testing.assert_close(found.predictive, torch.stack(errors).mean(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.total, found.predictive + 0.7 * found.variance, rtol=1e-6, atol=0)


def hides_the_targets(model: Jepa) -> bool:
    """What is hidden changes the targets and not the predictions."""
    x = patches()
    other = x.clone()
    other[:, [2, 3, 5]] += 1
    said: list[Tensor] = []
    answer = model.predictor.answer

    def listening(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        made = answer(*inputs)  # type: ignore[arg-type]
        said.append(made[0].detach())
        return made

    model.predictor.answer = listening  # type: ignore[method-assign, assignment]
    losses = [model(v, mask=MASK).predictive.item() for v in (x, other)]
    return torch.equal(*said) and losses[0] != losses[1]


class PlantedPeek(Jepa):
    """Sees everything."""

    def forward(self, patches: Tensor, condition: Tensor | None = None, *, mask: Mask) -> Losses:
        return super().forward(patches, condition, mask=mask._replace(context=torch.arange(patches.shape[1])))


def test_the_context_sees_nothing_hidden() -> None:
    assert hides_the_targets(jepa())
    assert not hides_the_targets(PlantedPeek(Encoder(7, 6), Predictor(6, 3, 6), 6, 3))


def leaves_targets_alone(model: Learner, inputs: tuple[Tensor, ...], keywords: dict[str, Mask]) -> bool:
    """Every parameter outside the targets gets a gradient, none inside does."""
    model(*inputs, **keywords).total.backward()
    inside = {id(p) for target, _ in model.followed() for p in target.parameters()}
    return all((p.grad is None) if id(p) in inside else (p.grad is not None and bool(p.grad.any())) for p in model.parameters())


class PlantedGradient(Follower):
    """A target which learns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.copy.requires_grad_(True)

    def forward(self, *inputs: Tensor) -> Tensor:
        made: Tensor = self.copy(*inputs)
        return made


def test_no_gradient_reaches_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, inputs, keywords in learners():
        assert leaves_targets_alone(model, inputs, keywords), type(model).__name__
    monkeypatch.setattr("khtst_compile.zoo.jepa.core.squared", lambda p, t: (p - t).square().mean())
    model = jepa()
    model.target = PlantedGradient(model.encoder)
    assert not leaves_targets_alone(model, (patches(),), {"mask": MASK})


Follow = Callable[[nn.Module, nn.Module, float], None]


def follows(step: Follow) -> bool:
    """Equal stays equal to the bit at any momentum; 0 is equal at once, 1 never moves; between, the formula."""
    module = Encoder(7, 6)
    for momentum in (0.0, 0.3, 0.9, 0.99, 0.996, 1.0):
        target = copy.deepcopy(module).requires_grad_(False)
        step(target, module, momentum)
        if not all(torch.equal(a, b) for a, b in zip(target.parameters(), module.parameters(), strict=True)):
            return False
        other = Encoder(7, 6).requires_grad_(False)
        before = [p.double() for p in other.parameters()]
        step(other, module, momentum)
        for old, new, wanted in zip(before, other.parameters(), module.parameters(), strict=True):
            formula = momentum * old + (1 - momentum) * wanted.double()
            if not bool(((new.double() - formula).abs() <= 2**-23 * (old.abs() + wanted.abs())).all()):  # a rounding or two
                return False
    return True


def ours(target: nn.Module, module: nn.Module, momentum: float) -> None:
    follower = Follower(module)
    follower.copy = target
    follower.follow(module, momentum)


@torch.no_grad()
def planted_products(target: nn.Module, module: nn.Module, momentum: float) -> None:
    """m t + (1 - m) p: close, but equal does not stay equal."""
    for mine, other in zip(target.parameters(), module.parameters(), strict=True):
        mine.copy_(momentum * mine + (1 - momentum) * other)


@torch.no_grad()
def planted_exchanged(target: nn.Module, module: nn.Module, momentum: float) -> None:
    for mine, other in zip(target.parameters(), module.parameters(), strict=True):
        mine.lerp_(other, momentum)


def test_the_target_follows() -> None:
    assert follows(ours)
    assert not follows(planted_products)
    assert not follows(planted_exchanged)


def test_targets_start_equal_and_each_follows_its_own_encoder() -> None:
    for model, _, _ in learners():
        for target, encoder in model.followed():
            assert all(torch.equal(a, b) for a, b in zip(target.copy.parameters(), encoder.parameters(), strict=True))
            with torch.no_grad():
                for p in encoder.parameters():
                    p += 1
        model.follow(0.0)
        for target, encoder in model.followed():
            assert all(torch.equal(a, b) for a, b in zip(target.copy.parameters(), encoder.parameters(), strict=True))


def test_buffers_are_taken_over_and_training_mode_is_not() -> None:
    module = nn.BatchNorm1d(3)
    follower = Follower(module)
    module(torch.randn(8, 3))
    follower.follow(module, 0.5)
    assert torch.equal(follower.copy.running_mean, module.running_mean)  # type: ignore[arg-type]
    assert not follower.train().copy.training


@pytest.mark.parametrize("momentum", [-0.1, 1.1])
def test_refuses_a_momentum_outside_its_range(momentum: float) -> None:
    with pytest.raises(UsageError, match="needed: 0"):
        jepa().follow(momentum)


def predicts_the_other(model: CrossModal) -> bool:
    """A change in one modality changes what the other's predictor is asked for, and nothing of what its own is."""
    a, b = torch.randn(5, 3, 7), torch.randn(5, 2, 4)
    there, back = model.wanted(a, b)
    other_there, other_back = model.wanted(a, b + 1)
    right = torch.equal(there, model.second_target(b).mean(1)) and torch.equal(back, model.first_target(a).mean(1))
    return right and not torch.equal(there, other_there) and torch.equal(back, other_back)


class PlantedCross(CrossModal):
    """Each predicts its own target: what the first implementation did."""

    def wanted(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.first_target(a).mean(1), self.second_target(b).mean(1)


def test_each_modality_predicts_the_others_own_target() -> None:
    def parts() -> tuple[nn.Module, ...]:
        return Encoder(7, 6), Encoder(4, 9), Predictor(6, 0, 9), Predictor(9, 0, 6)

    model = CrossModal(*parts())  # type: ignore[arg-type]
    assert predicts_the_other(model)
    assert not predicts_the_other(PlantedCross(*parts()))  # type: ignore[arg-type]
    losses = model(torch.randn(5, 3, 7), torch.randn(5, 2, 4))
    assert losses.total.isfinite()
    with pytest.raises(RuntimeError, match="must match the size"):  # widths that differ catch the crossing by themselves
        PlantedCross(*parts())(torch.randn(5, 3, 7), torch.randn(5, 2, 4))  # type: ignore[arg-type]


def test_edits_and_actions_reach_the_prediction() -> None:
    conditioned = learners()[1]
    edited = learners()[3]
    for (model, inputs, keywords), at in ((conditioned, 1), (edited, 2)):
        changed = tuple(x + 1 if i == at else x for i, x in enumerate(inputs))
        assert model(*inputs, **keywords).predictive != model(*changed, **keywords).predictive


def test_there_and_back_again() -> None:
    """With predictors that undo each other the cycle costs nothing, and the total is the other parts alone."""
    torch.manual_seed(1)
    model = Bidirectional(Encoder(7, 6), Predictor(6, 0, 6), Predictor(6, 0, 6), cycle=0.5)
    past, future = patches(), patches()
    losses = model(past, future)
    around = losses.total - losses.predictive - losses.variance
    z_p, z_f = model.encoder(past).mean(1), model.encoder(future).mean(1)
    back = model.back(model.ahead(z_p, None).squeeze(1), None).squeeze(1)
    ahead = model.ahead(model.back(z_f, None).squeeze(1), None).squeeze(1)
    wanted = 0.5 * ((back - z_p).square().mean() + (ahead - z_f).square().mean())
    torch.testing.assert_close(around, wanted, rtol=1e-5, atol=1e-6)  # a difference of float32 sums of order 1

    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :6]

    model.ahead.predict = model.back.predict = Same()  # type: ignore[assignment]
    losses = model(past, future)
    assert losses.total == losses.predictive + losses.variance


class Balanced(NamedTuple):
    output: Tensor
    auxiliary: Tensor


class Quantized(NamedTuple):
    values: Tensor
    ids: Tensor


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Balanced:
        return Balanced(2 * x, x.new_tensor(3.0))


class Rounding(nn.Module):
    def forward(self, x: Tensor) -> Quantized:
        return Quantized(x + (x.round() - x).detach(), x.argmax(-1))


def test_layers_of_any_kind_go_between() -> None:
    x = torch.randn(2, 6)
    assert through(None, x) == (x, 0) and torch.equal(through(nn.Identity(), x)[0], x)
    assert torch.equal(through(Doubling(), x)[0], 2 * x) and through(Doubling(), x)[1] == 3
    assert torch.equal(through(Rounding(), x)[0], x.round()) and through(Rounding(), x)[1] == 0
    model = Jepa(Encoder(7, 6, Doubling()), Predictor(6, 3, 6, body=Doubling()), 6, 3, bottleneck=Rounding())
    losses = model(patches(), mask=MASK)
    assert losses.auxiliary == 6
    torch.testing.assert_close(losses.total, losses.predictive + losses.variance + 6 * AUXILIARY, rtol=1e-6, atol=0)
    losses.total.backward()
    assert all(p.grad is not None for p in model.encoder.parameters())  # straight through the bottleneck


def test_the_bottleneck_stands_before_the_predictor_and_not_before_the_targets() -> None:
    model, x = jepa(), patches()
    rounded = copy.deepcopy(model)
    rounded.bottleneck = Rounding()
    assert torch.equal(model.target(x), rounded.target(x))
    a, b = (m(x, mask=MASK) for m in (model, rounded))
    assert a.predictive != b.predictive and a.variance == b.variance


@pytest.mark.parametrize("number", range(5))
def test_compiles_without_a_break(number: int) -> None:
    model, inputs, keywords = learners()[number]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, wanted = compiled(*inputs, **keywords), model(*inputs, **keywords)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums may be taken in another order


def test_stays_on_its_device() -> None:
    """The meta device computes shapes alone, and refuses any tensor from elsewhere."""
    model = jepa().to("meta")
    mask = draw_mask(blocks, (2, 3), 0.5, torch.Generator().manual_seed(0))
    context = model.encoder.encode(torch.empty(5, 6, 7, device="meta")[:, mask.to("meta").context])[0]
    assert context.device.type == "meta"
    assert model(torch.empty(5, 6, 7, device="meta"), mask=mask.to("meta")).total.device.type == "meta"


def test_roles_are_taken_over() -> None:
    """They are no parameter and no buffer, and a target whose experts have other roles would be another model."""
    module = RedirectableMoe(8, 4, 1)
    follower = Follower(module)
    module.redirect(module.roles.exchange())
    follower.follow(module, 0.5)
    assert follower.copy.roles == module.roles
