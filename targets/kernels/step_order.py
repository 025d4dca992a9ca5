"""The order of steps over k in which NEON may sum the products of two of them in int16.

A lane of smull takes two products of a step, so four of two steps: with codes within +-127 they fit where the magnitudes of their weights
sum to 258 or less. Of weights rounded to a scale per column some percent of such fours do not fit when steps are taken as they come, and
a tile takes 32 of them at once; but which steps meet is free, and a partner that fits is found for 99 % of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LIMIT = (2**15 - 1) // 127
"""Most that magnitudes of weights may sum to in a lane."""
_CHUNK = 1 << 22
"""Pairs of steps looked at together."""


def step_order(weights: npt.NDArray[np.int8], width: int, group: int) -> npt.NDArray[np.int16]:
    """Which steps go together, for each panel.

    weights: (panels * width, steps * group) int8 within +-127, in whose steps codes `group / 2` apart share a lane.
    returns: (panels, 1 + steps) int16: how many steps come in pairs, then those pairs, one step after the other, then all other steps.
    """
    columns, k = weights.shape
    panels, steps, lanes = columns // width, k // group, group // 2
    sizes = np.abs(weights.astype(np.int16)).reshape(panels, width, steps, 2, lanes).sum(axis=3, dtype=np.int16)
    loads = sizes.transpose(0, 2, 1, 3).reshape(panels, steps, width * lanes)
    found = np.empty((panels, 1 + steps), np.int16)
    most = max(1, _CHUNK // steps**2)
    for first in range(0, panels, most):
        found[first : first + most] = _ordered(loads[first : first + most])
    return found


def _ordered(loads: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """Greedily: the step with fewest partners left takes the partner with fewest."""
    panels, steps, lanes = loads.shape
    fits = np.ones((panels, steps, steps), bool)
    for lane in range(lanes):
        fits &= loads[:, :, None, lane] + loads[:, None, :, lane] <= LIMIT
    fits[:, np.arange(steps), np.arange(steps)] = False
    partners, each, none = fits.sum(axis=2), np.arange(panels), steps + 1
    partner_of = np.full((panels, steps), -1, np.int64)
    for _ in range(steps // 2):
        first = np.where(partners > 0, partners, none).argmin(axis=1)
        possible = fits[each, first]
        second = np.where(possible, partners, none).argmin(axis=1)
        taken = possible[each, second]
        if not taken.any():
            break
        partner_of[each[taken], first[taken]], partner_of[each[taken], second[taken]] = second[taken], first[taken]
        for step in (first, second):
            partners[taken] -= fits[each[taken], :, step[taken]]
            fits[each[taken], :, step[taken]] = False
            fits[each[taken], step[taken], :] = False
            partners[each[taken], step[taken]] = 0
    # Pairs by their lower step, so that memory is read forward as far as it can be; then what is alone.
    alone, own = partner_of < 0, np.arange(steps)
    key = np.where(alone, 2 * steps * steps + own, 2 * np.minimum(own, partner_of) + (own > partner_of))
    order = np.argsort(key, axis=1, kind="stable")
    return np.concatenate([(~alone).sum(axis=1)[:, None], order], axis=1).astype(np.int16)
