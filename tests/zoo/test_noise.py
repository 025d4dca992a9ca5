"""Numbers counted out of a seed: uniform, never 0 or 1, one draw unlike another, the same in a compiled function."""

from __future__ import annotations

import torch
from torch import Tensor

from khtst_compile.zoo.noise import gumbel, uniform


def draw(seed: int, count: int, size: int = 100_000) -> Tensor:
    return uniform(seed, torch.tensor(count), (size,), torch.zeros(()))


def test_a_number_is_its_seed_its_draw_and_its_place() -> None:
    assert torch.equal(draw(3, 5), draw(3, 5)) and torch.equal(draw(3, 5)[:10], draw(3, 5, 10))
    assert not (draw(3, 5) == draw(3, 6)).double().mean() > 1e-5 and not (draw(3, 5) == draw(4, 5)).double().mean() > 1e-5


def test_uniform_and_independent() -> None:
    u = torch.stack([draw(0, 0), draw(0, 1), draw(1, 0)]).double()
    assert float(u.min()) > 0 and float(u.max()) < 1
    # Kolmogorov-Smirnov at 1e-6: 2.7 / sqrt(n). Correlations of n pairs have a deviation of 1 / sqrt(n); five of them.
    n = u.shape[1]
    steps = torch.arange(1, n + 1).double() / n
    assert all(float((row.sort().values - steps).abs().max()) < 2.7 / n**0.5 for row in u)
    neighbors = torch.stack([*u[:, :-1], u[0, 1:]])
    assert float((torch.corrcoef(neighbors) - torch.eye(4)).abs().max()) < 5 / n**0.5


def test_the_extremes_have_finite_gumbels() -> None:
    ends = torch.tensor([0.5, 2.0**23 - 0.5]) * 2.0**-23
    assert torch.isfinite(gumbel(ends)).all()
    assert abs(float(gumbel(draw(0, 0)).mean()) - 0.5772) < 5 * 1.2825 / 100_000**0.5  # Euler's constant, deviation pi / sqrt(6)


def test_compiled() -> None:
    compiled = torch.compile(draw, backend="eager", fullgraph=True)
    assert torch.equal(compiled(3, 5, 64), draw(3, 5, 64))
