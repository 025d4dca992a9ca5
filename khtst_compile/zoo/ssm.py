"""ReplaySSM: a diagonal gated state space model that goes on learning, and rehearses old pairs so that it does not forget them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.errors import UsageError
from khtst_compile.zoo.layers import Mlp
from khtst_compile.zoo.streams import fresh


def scan(a: Tensor, u: Tensor) -> Tensor:
    """All states of h_t = a h_{t-1} + u_t from h = 0 in log2(T) steps: a (d,), u (..., T, d) -> (..., T, d).

    After step k, entry t holds the last 2**k terms of sum_s a^(t-s) u_s; another 2**k terms come from 2**k places before (Hillis and
    Steele 1986). T is fixed where the model is exported, as the number of steps follows from it.
    """
    reach, length = 1, u.shape[-2]
    while reach < length:
        u = u + a * functional.pad(u[..., :-reach, :], (0, 0, reach, 0))
        a, reach = a * a, 2 * reach
    return u


class ReplaySsm(nn.Module):
    """x (B, T, d_in) -> (B, T, d_out): h_t = g h_{t-1} + (1 - g) B x_t with g = sigmoid(a) per feature of d, then an MLP of each h_t.

    Gates start between .5 and .98, so that features remember 1 to 50 steps.
    """

    def __init__(self, d_in: int, d: int, d_out: int, *, seed: int = 0) -> None:
        super().__init__()
        with fresh(seed, "ssm/init"):
            self.inward = nn.Linear(d_in, d, bias=False)
            self.readout = Mlp(d, d_out)
        self.a = nn.Parameter(torch.linspace(0.0, 4.0, d))

    def states(self, x: Tensor) -> Tensor:
        """x (B, T, d_in) -> h (B, T, d)."""
        gate = torch.sigmoid(self.a)
        return scan(gate, (1 - gate) * self.inward(x))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.readout(self.states(x))
        return y


class ReplayBuffer(nn.Module):
    """The last `capacity` pairs, first in, first out: x and target of the shapes given, float32. A module, so that it moves and is saved
    with the model it belongs to."""

    def __init__(self, capacity: int, x_shape: tuple[int, ...], target_shape: tuple[int, ...]) -> None:
        super().__init__()
        if capacity < 1:
            raise UsageError(f"ReplayBuffer: capacity is {capacity}; needed: 1 or more")
        self.x: Tensor
        self.target: Tensor
        self.added: Tensor
        self.register_buffer("x", torch.zeros(capacity, *x_shape))
        self.register_buffer("target", torch.zeros(capacity, *target_shape))
        self.register_buffer("added", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return min(int(self.added), len(self.x))

    @torch.no_grad()
    def push(self, x: Tensor, target: Tensor) -> None:
        """x (n, ...), target (n, ...): take them in, in their order; the oldest go."""
        if len(x) != len(target) or x.shape[1:] != self.x.shape[1:] or target.shape[1:] != self.target.shape[1:]:
            raise UsageError(
                f"ReplayBuffer: x is {tuple(x.shape)}, target {tuple(target.shape)}; needed: (n, *{tuple(self.x.shape[1:])}) and "
                f"(n, *{tuple(self.target.shape[1:])})"
            )
        count, capacity = len(x), len(self.x)
        kept = min(count, capacity)
        places = (int(self.added) + torch.arange(count - kept, count, device=self.x.device)) % capacity
        self.x[places], self.target[places] = x[count - kept :].to(self.x), target[count - kept :].to(self.target)
        self.added.add_(count)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`count` pairs, each of those held with equal chance, drawn with replacement. Raises UsageError where it is empty."""
        if not len(self):
            raise UsageError("ReplayBuffer: nothing to sample from; push pairs first")
        chosen = torch.randint(len(self), (count,), generator=generator, device=generator.device).to(self.x.device)
        return self.x[chosen], self.target[chosen]


class Losses(NamedTuple):
    """new: mean squared error on the new pairs; replay: on the old ones, 0 where there were none."""

    new: float
    replay: float


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    buffer: ReplayBuffer,
    x: Tensor,
    target: Tensor,
    *,
    alpha: float,
    generator: torch.Generator,
) -> Losses:
    """One step on (1 - alpha) L_new + alpha L_replay, L the mean squared error; then the new pairs are kept.

    x, target: (n, ...), new pairs; as many old ones are drawn. While the buffer is empty, or with alpha = 0, the step is on L_new alone
    and draws nothing.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"train_step: alpha is {alpha}; needed: 0 to 1")
    new, replay = functional.mse_loss(model(x), target), None
    if alpha and len(buffer):
        old_x, old_target = buffer.sample(len(x), generator)
        replay = functional.mse_loss(model(old_x), old_target)
    optimizer.zero_grad()
    (new if replay is None else (1 - alpha) * new + alpha * replay).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    buffer.push(x, target)
    return Losses(float(new.detach()), 0.0 if replay is None else float(replay.detach()))
