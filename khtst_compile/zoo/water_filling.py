"""Experts for those who need them: a number to each of several errors, so that what is left is least."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

from khtst_compile.errors import UsageError


def water_fill(errors: Sequence[float], experts: int) -> tuple[int, ...]:
    """The c_i >= 1 with sum `experts` that minimize sum q_i^2 / c_i, q_i the `errors`; of equal ones the earlier gets more.

    One more where c are takes q^2 / (c (c + 1)) away. Gains of one place fall as it fills, so taking the largest each time is the optimum
    in integers (Federgruen and Groenevelt, 1986: separable convex costs). They are compared as fractions, so rounding decides nothing.
    Raises UsageError for fewer experts than errors, and for an error that is negative, NaN or infinite.
    """
    if not errors or experts < len(errors):
        raise UsageError(f"water filling: {experts} experts for {len(errors)} errors; needed: one each at least, and one error")
    if wrong := [q for q in errors if not (math.isfinite(q) and q >= 0)]:
        raise UsageError(f"water filling: an error is {wrong[0]}; needed: finite numbers from 0 on")
    squares = [Fraction(q) ** 2 for q in errors]
    counts = [1] * len(errors)
    gains = [(-square / 2, i) for i, square in enumerate(squares)]
    heapq.heapify(gains)
    for _ in range(experts - len(errors)):
        _, i = gains[0]
        counts[i] += 1
        heapq.heapreplace(gains, (-squares[i] / (counts[i] * (counts[i] + 1)), i))
    return tuple(counts)


def even(errors: int, experts: int) -> tuple[int, ...]:
    """`experts` over `errors` places as evenly as they go, the earlier ones first: what water filling is compared with."""
    each, more = divmod(experts, errors)
    return tuple(each + (i < more) for i in range(errors))
