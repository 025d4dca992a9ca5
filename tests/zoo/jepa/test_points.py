from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa import samples
from khtst_compile.zoo.jepa.points import farthest, groups, sequence

Farthest = Callable[[Tensor, int], Tensor]


def cloud(count: int, seed: int, batch: int = 3) -> Tensor:
    """Small integers: distances are exact, and many are equal."""
    return torch.randint(-4, 5, (batch, count, 3), generator=torch.Generator().manual_seed(seed)).float()


def squared_distance(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def brute_force(points: list[list[float]], count: int) -> list[int]:
    chosen = [0]
    while len(chosen) < count:
        far = [min(squared_distance(p, points[c]) for c in chosen) for p in points]
        chosen.append(far.index(max(far)))
    return chosen


def equals_brute_force(find: Farthest) -> bool:
    for seed, (total, count) in enumerate([(1, 1), (5, 5), (17, 6), (40, 12), (64, 31)]):
        points = cloud(total, seed)
        if find(points, count).tolist() != [brute_force(p, count) for p in points.tolist()]:
            return False
    return True


def planted_last_only(points: Tensor, count: int) -> Tensor:
    """Farthest from the last chosen point instead of from all of them."""
    chosen = [torch.zeros(points.shape[0], dtype=torch.int64)]
    for _ in range(count - 1):
        last = points[torch.arange(points.shape[0]), chosen[-1]].unsqueeze(1)
        chosen.append((points - last).square().sum(-1).argmax(1))
    return torch.stack(chosen, 1)


def test_farthest_points() -> None:
    assert equals_brute_force(farthest)
    assert not equals_brute_force(planted_last_only)


def test_neighbors_follow_each_other() -> None:
    centers = cloud(12, 9)
    for points, order in zip(centers.tolist(), sequence(centers).tolist(), strict=True):
        assert sorted(order) == list(range(12)) and order[0] == 0
        for i in range(11):
            rest = order[i + 1 :]
            nearest = min(squared_distance(points[order[i]], points[j]) for j in rest)
            assert squared_distance(points[order[i]], points[order[i + 1]]) == nearest


def test_groups_hold_a_center_and_its_nearest() -> None:
    points = cloud(20, 3)
    found = groups(points, 5, 4).reshape(3, 5, 5, 3)
    for cloud_points, found_groups, chosen in zip(points.tolist(), found.tolist(), farthest(points, 5).tolist(), strict=True):
        assert sorted(g[0] for g in found_groups) == sorted(cloud_points[c] for c in chosen)
        for center, *members in found_groups:
            apart = [squared_distance(m, [0, 0, 0]) for m in members]
            assert apart == sorted(squared_distance(p, center) for p in cloud_points)[:4] and apart[0] == 0
            assert all([a + b for a, b in zip(m, center, strict=True)] in cloud_points for m in members)


def test_real_land() -> None:
    (land,) = samples.land()
    assert land.shape == (480, 16, 51) and bool(land.isfinite().all())


def test_refusals() -> None:
    with pytest.raises(UsageError, match="farthest points: 6 of 5; needed: 1 to 5"):
        farthest(cloud(5, 0), 6)
    with pytest.raises(UsageError, match="groups: 6 of 5 points each"):
        groups(cloud(5, 0), 2, 6)
