"""Prototypes refined: experts correct what a codebook of centroids leaves over, and then, redirected, decode it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.moe.experts import Experts
from khtst_compile.zoo.moe.roles import DECODER, ENCODER, Roles
from khtst_compile.zoo.moe.routing import route
from khtst_compile.zoo.streams import fresh, stream
from khtst_compile.zoo.water_filling import even, water_fill


def nearest(x: Tensor, prototypes: Tensor) -> Tensor:
    """The best matching unit: (n,) int64, of x (n, d) among (P, d), of equally near ones the first.

    Differences are squared one by one: no product of matrices, which the compiler would round to int8, where the whole result hangs on it.
    """
    return (x.unsqueeze(-2) - prototypes).square().sum(-1).argmin(-1)


def k_means(x: Tensor, count: int, seed: int, rounds: int = 30) -> Tensor:
    """`count` centroids (count, d) of x (n, d): k-means++ (Arthur and Vassilvitskii, 2007), then `rounds` of Lloyd's algorithm; one that
    lost all its points stays where it is. Drawn from the stream "k-means"."""
    draws = stream(seed, "k-means", x.device)
    centers = x[torch.randint(len(x), (1,), generator=draws, device=x.device)]
    for _ in range(count - 1):
        distance = torch.cdist(x, centers).square().amin(-1)
        centers = torch.cat([centers, x[torch.multinomial(distance, 1, generator=draws)]])
    for _ in range(rounds):
        members = nn.functional.one_hot(nearest(x, centers), count).to(x.dtype)
        sizes = members.sum(0).unsqueeze(-1)
        centers = torch.where(sizes > 0, members.T @ x / sizes.clamp(min=1), centers)
    return centers


class Refiner(nn.Module):
    """Encoders add what a prototype lacks, x -> w_bmu + E(x); decoders know the prototype alone, x -> E(w_bmu). (n, d) -> (n, d).

    prototypes: (P, d). placement: how many encoders each prototype has, and as many decoders; a token goes to its prototype's experts
    alone, of which `top_k` at most share it. `redirect` exchanges the roles: who corrected then decodes, with the weights it has.
    """

    prototypes: Tensor
    owner: Tensor

    def __init__(self, prototypes: Tensor, placement: Sequence[int], top_k: int = 2) -> None:
        super().__init__()
        if len(placement) != len(prototypes) or min(placement) < 1:
            raise UsageError(
                f"refiner: placement {tuple(placement)} for {len(prototypes)} prototypes; needed: 1 or more for each"
            )
        d, pairs = prototypes.shape[1], sum(placement)
        self.top_k, self.roles = min(top_k, pairs), Roles.alternating(2 * pairs)
        self.register_buffer("prototypes", prototypes.clone())
        owner = torch.arange(len(placement)).repeat_interleave(torch.tensor(placement))
        self.register_buffer("owner", owner.repeat_interleave(2))  # of both of a pair, encoder and decoder
        self.router = nn.Linear(d, 2 * pairs, bias=False)
        self.experts = Experts(d, 2 * pairs)

    def forward(self, x: Tensor, role: str = ENCODER) -> Tensor:
        unit = nearest(x, self.prototypes)
        prototype = self.prototypes[unit]
        seen = x if role == ENCODER else prototype
        numbers = self.roles.of(role)
        allowed = self.owner[list(numbers)] == unit.unsqueeze(-1)
        routing = route(self.router(seen)[:, list(numbers)], self.top_k, allowed=allowed)
        made: Tensor = self.experts(seen, routing.weights, numbers)
        return prototype + made if role == ENCODER else made

    def redirect(self) -> None:
        """Every expert takes the other role; no weight is touched."""
        self.roles = self.roles.redirected(self.roles.exchange())

    def get_extra_state(self) -> Tensor:
        """(E,) bool: who decodes."""
        return self.roles.state()

    def set_extra_state(self, state: Tensor) -> None:
        self.roles = Roles.from_state(state)


@dataclass(frozen=True)
class Refinement:
    """Mean squared errors per feature on held-out data. before: of the prototypes; after: corrected by experts where water filling puts
    them; uniform: by as many experts placed evenly, from the same seed; decoder: of the redirected experts, which see the prototype alone;
    placement: encoders of each prototype; refiner: after the last step, decoders trained."""

    before: float
    after: float
    uniform: float
    decoder: float
    placement: tuple[int, ...]
    refiner: Refiner


def refine(data: Tensor, held: Tensor, prototypes: Tensor, experts: int, *, seed: int, steps: int = 300) -> Refinement:
    """data: (n, d) to learn from; held: (m, d) to judge on; prototypes: (P, d); experts: correctors in all; steps: of each training."""
    spread = data - prototypes[nearest(data, prototypes)]
    cells = nn.functional.one_hot(nearest(data, prototypes), len(prototypes)).to(data.dtype)
    errors = (spread.square().sum(-1) @ cells).sqrt().tolist()
    placement = water_fill(errors, experts)
    refiner, control = (_trained(data, prototypes, p, seed, steps) for p in (placement, even(len(errors), experts)))
    after, uniform = (_error(r, held, ENCODER) for r in (refiner, control))
    refiner.redirect()
    _train(refiner, data, DECODER, seed, steps)
    before = float((held - prototypes[nearest(held, prototypes)]).square().mean())
    return Refinement(before, after, uniform, _error(refiner, held, DECODER), placement, refiner)


def _trained(data: Tensor, prototypes: Tensor, placement: Sequence[int], seed: int, steps: int) -> Refiner:
    with fresh(seed, "weights"):
        refiner = Refiner(prototypes.cpu(), placement).to(data.device)
    _train(refiner, data, ENCODER, seed, steps)
    return refiner


def _train(refiner: Refiner, data: Tensor, role: str, seed: int, steps: int, batch: int = 128) -> None:
    """Adam on the mean squared error; batches from the stream "batches/<role>"."""
    optimizer = torch.optim.Adam(refiner.parameters(), lr=2e-3)
    draws = stream(seed, f"batches/{role}", data.device)
    for _ in range(steps):
        x = data[torch.randint(len(data), (batch,), generator=draws, device=data.device)]
        loss = (refiner(x, role) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def _error(refiner: Refiner, x: Tensor, role: str) -> float:
    return float((refiner(x, role) - x).square().mean())
