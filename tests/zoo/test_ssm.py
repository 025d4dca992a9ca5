"""What the state space model claims: the scan is the loop, the buffer is first in first out, and rehearsal keeps an old task."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.errors import UsageError
from khtst_compile.zoo import data
from khtst_compile.zoo.ssm import ReplayBuffer, ReplaySsm, scan, train_step
from khtst_compile.zoo.streams import stream

PIECES, SIZE = 7, 8
Step = Callable[..., object]


def loop(a: Tensor, u: Tensor) -> Tensor:
    """The definition, one step after the other."""
    states, h = [], torch.zeros_like(u[..., 0, :])
    for t in range(u.shape[-2]):
        h = a * h + u[..., t, :]
        states.append(h)
    return torch.stack(states, -2)


def check_scan(function: Callable[[Tensor, Tensor], Tensor], length: int) -> None:
    torch.manual_seed(0)
    a, u = torch.rand(5, dtype=torch.float64), torch.randn(2, 3, length, 5, dtype=torch.float64)
    # Sums of `length` terms of size about 1, in another order.
    assert torch.allclose(function(a, u), loop(a, u), rtol=0, atol=length * 2.0**-50)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 33, 200])
def test_the_scan_is_the_loop(length: int) -> None:
    check_scan(scan, length)


def unsquared(a: Tensor, u: Tensor) -> Tensor:
    """The fault: every step with the same factor."""
    reach = 1
    while reach < u.shape[-2]:
        u = u + a * functional.pad(u[..., :-reach, :], (0, 0, reach, 0))
        reach *= 2
    return u


def test_a_wrong_scan_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_scan(unsquared, 3)


def test_the_model_is_its_recurrence_with_gates() -> None:
    model = ReplaySsm(4, 6, 3, seed=1).double()
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    gate = torch.sigmoid(model.a)
    expected = loop(gate, (1 - gate) * (x @ model.inward.weight.T))
    assert torch.allclose(model.states(x), expected, rtol=0, atol=1e-14)
    assert torch.allclose(model(x), model.readout(expected), rtol=0, atol=1e-14) and model(x).shape == (2, 9, 3)
    assert torch.autograd.gradcheck(lambda a: torch.func.functional_call(model, {"a": a}, (x,)), model.a)


def test_no_step_sees_what_comes_after_it() -> None:
    model, x = ReplaySsm(4, 6, 3), torch.randn(2, 9, 4)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(model(x)[:, :5], model(changed)[:, :5]) and not torch.equal(model(x)[:, 5], model(changed)[:, 5])


def test_compiled_and_seeded() -> None:
    model, x = ReplaySsm(4, 6, 3, seed=5), torch.randn(2, 9, 4)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
    state = torch.get_rng_state()
    assert torch.equal(ReplaySsm(4, 6, 3, seed=5)(x), model(x)) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(ReplaySsm(4, 6, 3, seed=6)(x), model(x))


def test_no_device_is_written_down() -> None:
    """On "meta" anything made on another device fails."""
    assert ReplaySsm(4, 6, 3).to("meta")(torch.zeros(2, 9, 4, device="meta")).shape == (2, 9, 3)


def numbered(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Pairs that say their number: x (n, 2), target (n,) = x * 10."""
    numbers = torch.arange(first, last).float()
    return numbers[:, None].repeat(1, 2), numbers * 10


def check_first_in_first_out(buffer: ReplayBuffer, parts: list[int]) -> None:
    """A buffer for 5 such pairs holds the last 5, x with its target, and draws all of them."""
    total = 0
    for n in parts:
        buffer.push(*numbered(total, total + n))
        total += n
    expected = list(range(max(0, total - 5), total))
    assert len(buffer) == len(expected) and sorted(buffer.x[: len(buffer), 0].tolist()) == expected
    x, target = buffer.sample(500, stream(0, "replay"))
    assert torch.equal(target, x[:, 0] * 10), "a target stays with its x"
    assert sorted(set(x[:, 0].tolist())) == expected


@pytest.mark.parametrize("parts", [[3], [5], [7], [2, 2, 2], [5, 1], [4, 9, 1], [1] * 12])
def test_the_oldest_pairs_go_first(parts: list[int]) -> None:
    check_first_in_first_out(ReplayBuffer(5, (2,), ()), parts)


class Full(ReplayBuffer):
    """The fault: once it is full, the last place alone is written again."""

    def push(self, x: Tensor, target: Tensor) -> None:
        for pair in zip(x.split(1), target.split(1), strict=True):
            self.added.clamp_(max=len(self.x) - 1)
            super().push(*pair)


def test_another_order_is_noticed() -> None:
    check_first_in_first_out(Full(5, (2,), ()), [5])
    with pytest.raises(AssertionError):
        check_first_in_first_out(Full(5, (2,), ()), [5, 2])


def test_what_the_buffer_refuses() -> None:
    with pytest.raises(UsageError, match="nothing to sample"):
        ReplayBuffer(5, (2,), ()).sample(1, stream(0, "replay"))
    with pytest.raises(UsageError, match=r"x is \(3, 2\), target \(2,\)"):
        ReplayBuffer(5, (2,), ()).push(torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(UsageError, match="capacity is 0"):
        ReplayBuffer(0, (2,), ())
    with pytest.raises(UsageError, match=r"alpha is 1\.5"):
        model = nn.Linear(2, 1)
        train_step(model, torch.optim.SGD(model.parameters()), ReplayBuffer(5, (2,), (1,)), *numbered(0, 2), alpha=1.5,
                   generator=stream(0, "replay"))  # fmt: skip


def test_a_step_descends_the_weighted_sum_of_both_losses() -> None:
    torch.manual_seed(0)
    model, alpha, lr = nn.Linear(2, 1).double(), 0.3, 0.1
    buffer = ReplayBuffer(8, (2,), (1,)).double()
    old, new = (torch.randn(6, 3, dtype=torch.float64).split([2, 1], 1) for _ in range(2))
    buffer.push(*old)
    expected = copy.deepcopy(model)
    x, target = buffer.sample(6, stream(0, "replay"))
    losses = [functional.mse_loss(expected(a), b) for a, b in (new, (x, target))]
    ((1 - alpha) * losses[0] + alpha * losses[1]).backward()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr)
    found = train_step(model, optimizer, buffer, *new, alpha=alpha, generator=stream(0, "replay"))
    assert found == pytest.approx(tuple(float(v.detach()) for v in losses)) and len(buffer) == 8
    for moved, still in zip(model.parameters(), expected.parameters(), strict=True):
        assert still.grad is not None
        assert torch.allclose(moved, still - lr * still.grad, rtol=0, atol=1e-15)


def tasks() -> list[tuple[Tensor, Tensor]]:
    """To foretell the next piece of an electrocardiogram, then of sea temperatures."""
    return [data.windows(series, PIECES, SIZE) for series in (data.ecg(), data.sea_temperature())]


def losses_of_the_old_task(alpha: float, seed: int, capacity: int = 4096, step: Step = train_step) -> tuple[float, float]:
    """(after it was learned, after the new one was learned too). Seeds decide all else."""
    model = ReplaySsm(SIZE, 24, SIZE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    buffer = ReplayBuffer(capacity, (PIECES, SIZE), (PIECES, SIZE))
    replays, batches, (old_x, old_target), found = stream(seed, "replay"), stream(seed, "batches"), tasks()[0], []
    for x, target in tasks():
        for _ in range(100):
            rows = torch.randint(len(x), (16,), generator=batches)
            step(model, optimizer, buffer, x[rows], target[rows], alpha=alpha, generator=replays)
        with torch.no_grad():
            found.append(float(functional.mse_loss(model(old_x), old_target)))
    return found[0], found[1]


def check_remembers(seed: int, capacity: int = 4096, step: Step = train_step) -> None:
    """With replay less than two thirds of the error without, which learned the task as well before it forgot it."""
    (learned, forgotten), (_, kept) = (losses_of_the_old_task(a, seed, capacity, step) for a in (0.0, 0.5))
    assert learned < 0.6 * forgotten, "without replay the old task is forgotten"
    assert kept < 2 / 3 * forgotten, f"{kept:.3f} with replay, {forgotten:.3f} without"


class Untargeted(ReplayBuffer):
    """The fault: only x is kept, and the model is pulled to zero on it."""

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, target = super().sample(count, generator)
        return x, torch.zeros_like(target)


def untargeted(
    model: nn.Module, optimizer: torch.optim.Optimizer, buffer: ReplayBuffer, *pairs: Tensor, **options: object
) -> None:
    buffer.__class__ = Untargeted
    train_step(model, optimizer, buffer, *pairs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_replay_forgets_less(seed: int) -> None:
    check_remembers(seed)


def test_replay_without_targets_or_of_new_pairs_alone_is_noticed() -> None:
    with pytest.raises(AssertionError, match="with replay"):
        check_remembers(0, step=untargeted)
    with pytest.raises(AssertionError, match="with replay"):
        check_remembers(0, capacity=16)
