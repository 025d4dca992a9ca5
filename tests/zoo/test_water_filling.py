from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product

import pytest

from khtst_compile.errors import UsageError
from khtst_compile.zoo.water_filling import even, water_fill

Fill = Callable[[Sequence[float], int], tuple[int, ...]]


def placements(places: int, total: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `total` to `places`, 1 or more each."""
    if places == 1:
        yield (total,)
        return
    for first in range(1, total - places + 2):
        for rest in placements(places - 1, total - first):
            yield (first, *rest)


def cost(errors: Sequence[float], counts: Sequence[int]) -> Fraction:
    return sum((Fraction(q) ** 2 / c for q, c in zip(errors, counts, strict=True)), Fraction(0))


def check_fill(fill: Fill) -> None:
    for places in (1, 2, 3, 4):
        for errors in product((0.0, 0.3, 1.0, 2.0, 7.5), repeat=places):
            for experts in range(places, 9):
                counts = fill(errors, experts)
                assert len(counts) == places and min(counts) >= 1 and sum(counts) == experts
                assert cost(errors, counts) == min(cost(errors, c) for c in placements(places, experts))


def by_error_over_count(errors: Sequence[float], experts: int) -> tuple[int, ...]:
    """The fault: the next goes where q / c is largest."""
    counts = [1] * len(errors)
    for _ in range(experts - len(errors)):
        most = max(range(len(errors)), key=lambda i: errors[i] / counts[i])
        counts[most] += 1
    return tuple(counts)


def test_water_filling_is_the_best_of_all_placements() -> None:
    check_fill(water_fill)


@pytest.mark.parametrize("fault", [by_error_over_count, lambda q, c: even(len(q), c)])
def test_other_placements_are_caught(fault: Fill) -> None:
    with pytest.raises(AssertionError):
        check_fill(fault)


def test_equal_errors_share_evenly_the_earlier_first() -> None:
    assert water_fill([1.0, 1.0, 1.0], 8) == even(3, 8) == (3, 3, 2)


@pytest.mark.parametrize(
    "errors, experts", [([1.0, 2.0], 1), ([], 3), ([1.0, -1.0], 4), ([float("nan")], 2), ([float("inf")], 2)]
)
def test_refusals(errors: list[float], experts: int) -> None:
    with pytest.raises(UsageError, match="water filling"):
        water_fill(errors, experts)
