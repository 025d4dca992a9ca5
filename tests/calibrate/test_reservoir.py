"""The reservoir is uniform, bounded, and its gradients stay with their rows."""

from __future__ import annotations

import torch

from khtst_compile.reservoir import Reservoir


def fill(size: int, total: int, chunk: int, seed: int) -> Reservoir:
    """A reservoir that saw rows 0, 1, ... total - 1, each with its negative as "gradient"."""
    generator = torch.Generator().manual_seed(seed)
    reservoir = Reservoir(size, 1)
    for start in range(0, total, chunk):
        rows = torch.arange(start, min(start + chunk, total), dtype=torch.float32)[:, None]
        slots, chosen = reservoir.offer(rows, torch.rand(len(rows), generator=generator))
        reservoir.fill("layer", slots, -rows[chosen])
    return reservoir


def test_every_row_is_equally_likely() -> None:
    counts = torch.zeros(40)
    draws = 600
    for seed in range(draws):
        counts[fill(10, 40, 7, seed).rows.flatten().long()] += 1
    expected = draws * 10 / 40
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 39 degrees of freedom: mean 39, and beyond 85 once in 40 000 draws of uniform counts. Keeping the first rows gives thousands.
    assert chi_square < 85


def test_rows_are_distinct_bounded_and_keep_their_gradient() -> None:
    reservoir = fill(16, 1000, 33, seed=1)
    assert reservoir.rows.shape == (16, 1) and len(set(reservoir.rows.flatten().tolist())) == 16
    assert torch.equal(reservoir.grads["layer"], -reservoir.rows)


def test_fewer_rows_than_room() -> None:
    reservoir = fill(16, 5, 2, seed=1)
    assert sorted(reservoir.rows.flatten().tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(reservoir.grads["layer"], -reservoir.rows)


def test_rows_with_an_infinite_key_never_enter() -> None:
    reservoir = Reservoir(8, 1)
    rows = torch.arange(4.0)[:, None]
    slots, chosen = reservoir.offer(rows, torch.tensor([0.5, torch.inf, 0.1, torch.inf]))
    assert sorted(reservoir.rows.flatten().tolist()) == [0.0, 2.0] and sorted(chosen.tolist()) == [0, 2] and len(slots) == 2


def test_no_room_at_all() -> None:
    assert fill(0, 10, 3, seed=0).rows.shape == (0, 1)
