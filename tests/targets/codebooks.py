"""Codebooks and rows to look up in them, for the tests of every engine: random, a rounding from a tie, duplicated, lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Book:
    """Arguments of khtst::codebook_lookup: codes (levels, K, d), bias (levels, K) or None, table (levels, K, v)."""

    codes: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor
    running: bool


def book(
    levels: int, count: int, features: int, *, bias: bool = False, values: int | None = None, running: bool = True, seed: int = 0
) -> Book:
    """Normal codes, each level smaller than the one before; the table is the codes', scaled, or of a width of its own."""
    g = torch.Generator().manual_seed(1000 * seed + 31 * count + features)
    codes = torch.randn(levels, count, features, generator=g) * 0.5 ** torch.arange(levels)[:, None, None]
    table = codes * 0.75 if values is None else torch.randn(levels, count, values, generator=g)
    return Book(codes, -0.5 * codes.square().sum(-1) if bias else None, table, running)


def _filled() -> Book:
    """A second level of fewer codes, filled up with rows that cannot be chosen."""
    made = book(2, 20, 24, bias=True)
    assert made.bias is not None
    made.bias[1, 12:] = -float("inf")
    made.codes[1, 12:] = 0.0
    return made


def _duplicated() -> Book:
    """Every code four times, its copies far apart."""
    made = book(2, 12, 20)
    return Book(made.codes.repeat(1, 4, 1), None, torch.cat([made.table] * 4, 1) + 0.0, True)


def _orthonormal() -> Book:
    g = torch.Generator().manual_seed(5)
    q = torch.linalg.qr(torch.randn(64, 64, generator=g))[0]
    return Book(q[None, :48].contiguous(), None, q[None, :48] * 3.0, True)


CASES: dict[str, Callable[[], Book]] = {
    "plain": lambda: book(1, 50, 32),
    "bias": lambda: book(1, 50, 32, bias=True),
    "orthonormal": _orthonormal,
    "large": lambda: book(1, 700, 64, bias=True),
    "residual": lambda: book(4, 40, 24, bias=True),
    "residual-total": lambda: book(4, 40, 24, bias=True, running=False),
    "values": lambda: book(1, 30, 16, values=5),
    "one-code": lambda: book(2, 1, 9),
    "two-codes": lambda: book(1, 2, 16),
    "three-codes": lambda: book(1, 3, 33, bias=True),
    "one-feature": lambda: book(3, 20, 1, bias=True),
    "seventeen": lambda: book(1, 33, 17),
    "wide": lambda: book(1, 9, 200),
    "more-codes": lambda: book(1, 130, 7, bias=True),
    "filled": _filled,
    "duplicated": _duplicated,
}


def random_rows(book: Book, count: int, seed: int = 1) -> torch.Tensor:
    """(count, d) float32 of sizes from 1e-3 to 1e3."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, book.codes.shape[-1], generator=g) * torch.logspace(-3, 3, count)[:, None]


def near_ties(book: Book, count: int, seed: int = 2) -> torch.Tensor:
    """(count, d) float32: rows between two codes of the first level that are near the best of them, where both score the same in exact
    arithmetic, and single elements of them a few ulp off it."""
    g = torch.Generator().manual_seed(seed)
    codes = book.codes[0].double()
    bias = torch.zeros(len(codes), dtype=torch.float64) if book.bias is None else book.bias[0].double()
    alive = torch.isfinite(bias).nonzero()[:, 0]
    z = torch.randn(count, codes.shape[1], generator=g, dtype=torch.float64) * 0.7
    z += codes[alive[torch.randint(0, len(alive), (count,), generator=g)]]
    score = (z @ codes.T + bias)[:, alive]
    first, second = alive[score.topk(min(2, len(alive))).indices].T[[0, -1]]
    apart = codes[first] - codes[second]
    gap = (z * apart).sum(-1) + bias[first] - bias[second]
    length = apart.square().sum(-1)
    z = torch.where((length > 0)[:, None], z - (gap / length.clamp_min(1e-300))[:, None] * apart, z)
    rows = z.float()
    at = torch.randint(0, rows.shape[1], (count,), generator=g)
    steps = torch.randint(-2, 3, (count,), generator=g, dtype=torch.int32)
    bits = rows.view(torch.int32)
    bits[torch.arange(count), at] += steps
    return rows


def bad_rows(book: Book) -> torch.Tensor:
    """(52, d) float32: zeros, negative zeros, NaN first and last, infinities, just beyond the largest and just within, tiny, and 40 so
    small that their products round to the same few denormals."""
    d = book.codes.shape[-1]
    rows = torch.randn(52, d, generator=torch.Generator().manual_seed(3))
    rows[0], rows[1] = 0.0, -0.0
    rows[2, 0], rows[3, -1], rows[4] = float("nan"), float("nan"), float("nan")
    rows[5, d // 2], rows[6, 0], rows[7, -1] = float("inf"), -float("inf"), 1e19
    rows[8], rows[9], rows[10], rows[11] = rows[8] * 1e17, rows[9] * 1e-25, rows[10] * 1e-43, rows[11] * 1e-36
    rows[12:] *= 1e-44
    return rows


@dataclass(frozen=True)
class Grid:
    """Arguments of khtst::step_lookup: thresholds (d, n - 1), steps (d, n), basis (d,) int32."""

    thresholds: torch.Tensor
    steps: torch.Tensor
    basis: torch.Tensor


def grid(features: int, most: int, seed: int = 0) -> Grid:
    """Thresholds of 1 .. most - 1 for each feature, +inf beyond; steps and basis as of a mixed-radix number."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(2, most + 1, (features,), generator=g)
    counts[0] = most
    thresholds = torch.randn(features, most - 1, generator=g).sort(-1).values
    steps = torch.randn(features, most, generator=g)
    for j, n in enumerate(counts.tolist()):
        thresholds[j, n - 1 :] = float("inf")
        steps[j, n:] = steps[j, n - 1]
    weights = torch.cat([torch.ones(1, dtype=torch.int64), counts.cumprod(0)[:-1]]) % (1 << 24)
    return Grid(thresholds, steps, weights.to(torch.int32))


def step_rows(made: Grid, count: int, seed: int = 0) -> torch.Tensor:
    """(count, d): random, each threshold itself, one ulp to either side of it, NaN, infinities, zeros."""
    g = torch.Generator().manual_seed(seed)
    thresholds = made.thresholds
    features = thresholds.shape[0]
    z = torch.randn(count, features, generator=g)
    at = torch.randint(0, thresholds.shape[1], (count, features), generator=g)
    on = thresholds[torch.arange(features), at]
    kind = torch.randint(0, 8, (count, features), generator=g)
    z = torch.where(kind == 1, on, z)
    z = torch.where(kind == 2, torch.nextafter(on, torch.tensor(float("inf"))), z)
    z = torch.where(kind == 3, torch.nextafter(on, torch.tensor(-float("inf"))), z)
    if count > 4:
        z[1], z[2, 0], z[3, -1], z[4, 0] = 0.0, float("nan"), float("inf"), -float("inf")
    return z
