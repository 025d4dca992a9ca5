"""Sizes that vary, compared without fixing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def same_shape(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Whether two shapes are equal as expressions.

    `==` would ask each size that varies whether it is the other shape's, and where the traced size happens to be, torch fixes it there;
    Python compares tuples of unequal length entry by entry, too.
    """
    return [str(s) for s in first] == [str(s) for s in second]
