"""A cloud of points -> groups of neighbors (Point-BERT: Yu et al., 2022; Point-JEPA: Saito et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from khtst_compile.errors import UsageError


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances. a: (B, N, c), b: (B, M, c) -> (B, N, M). From differences: |a|^2 - 2ab + |b|^2 would cancel."""
    return (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(-1)


def farthest(points: Tensor, count: int) -> Tensor:
    """points: (B, N, c) -> (B, count) int64: point 0, then each time the point whose nearest chosen one is farthest (Eldar et al., 1997).

    Of equally far ones the lowest number. Raises UsageError for more than there are.
    """
    batch, total, _ = points.shape
    if not 1 <= count <= total:
        raise UsageError(f"farthest points: {count} of {total}; needed: 1 to {total}")
    rows = torch.arange(batch, device=points.device)
    chosen = [torch.zeros(batch, dtype=torch.int64, device=points.device)]
    nearest = torch.full((batch, total), torch.inf, dtype=points.dtype, device=points.device)
    for _ in range(count - 1):
        nearest = torch.minimum(nearest, distances(points, points[rows, chosen[-1]].unsqueeze(1)).squeeze(2))
        chosen.append(first_largest(nearest))
    return torch.stack(chosen, 1)


def first_largest(x: Tensor) -> Tensor:
    """x: (B, N) -> (B,) the lowest index of the largest. argmax promises no order among equals."""
    numbers = torch.arange(x.shape[1], device=x.device)
    return torch.where(x == x.amax(1, keepdim=True), numbers, x.shape[1]).amin(1)


def sequence(centers: Tensor) -> Tensor:
    """centers: (B, G, c) -> (B, G) an order in which neighbors follow each other: from the first, always the nearest not yet visited."""
    batch, count, _ = centers.shape
    rows = torch.arange(batch, device=centers.device)
    apart = distances(centers, centers)
    visited = torch.zeros(batch, count, dtype=torch.bool, device=centers.device)
    order = [torch.zeros(batch, dtype=torch.int64, device=centers.device)]
    for _ in range(count - 1):
        visited[rows, order[-1]] = True
        order.append(first_largest(-apart[rows, order[-1]].masked_fill(visited, torch.inf)))
    return torch.stack(order, 1)


def groups(points: Tensor, count: int, size: int) -> Tensor:
    """points: (B, N, c) -> (B, count, (1 + size) c): each group's center, then its `size` nearest points relative to it, nearest first.

    Centers are the farthest points, in the order of `sequence`; a center is its own nearest point. Raises UsageError for sizes beyond N.
    """
    total, coordinates = points.shape[1:]
    if not 1 <= size <= total:
        raise UsageError(f"groups: {size} of {total} points each; needed: 1 to {total}")
    rows = torch.arange(points.shape[0], device=points.device).unsqueeze(1)
    centers = points[rows, farthest(points, count)]
    centers = centers[rows, sequence(centers)]
    near = distances(centers, points).sort(dim=2, stable=True).indices[..., :size]
    members = points[rows.unsqueeze(2), near] - centers.unsqueeze(2)
    return torch.cat([centers.unsqueeze(2), members], 2).reshape(points.shape[0], count, (1 + size) * coordinates)
