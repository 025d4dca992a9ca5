"""Which steps over k go together: every pair fits int16, nothing is lost, and nearly all of a model's weights find a partner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from khtst_compile.targets.kernels.step_order import LIMIT, step_order

WIDTH, GROUP = 4, 16


def worst(weights: np.ndarray, panel: int, steps: np.ndarray) -> int:
    """The largest magnitude that a lane of int16 can get to with codes of +-127 in these steps."""
    own = np.abs(weights[panel * WIDTH : (panel + 1) * WIDTH].astype(int)).reshape(WIDTH, -1, 2, GROUP // 2)
    return int(127 * own[:, steps].sum(axis=(1, 2)).max())


def check(weights: np.ndarray) -> float:
    """That the order holds; returns the share of steps in pairs."""
    panels, steps = len(weights) // WIDTH, weights.shape[1] // GROUP
    found = step_order(weights, WIDTH, GROUP)
    assert found.shape == (panels, 1 + steps) and found.dtype == np.int16
    for panel, (paired, *order) in enumerate(found):
        assert sorted(order) == list(range(steps)) and paired % 2 == 0 and 0 <= paired <= steps
        for pair in np.array(order[:paired]).reshape(-1, 2):
            assert worst(weights, panel, pair) <= 2**15 - 1
    return float(found[:, 0].sum() / (panels * steps))


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([5.0, 30.0, 45.0, 60.0, 200.0]))
def test_pairs_fit_and_every_step_comes_once(seed: int, steps: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    check(np.clip(rng.normal(0, spread, (2 * WIDTH, steps * GROUP)).round(), -127, 127).astype(np.int8))


def test_the_limit_is_the_largest_that_fits() -> None:
    assert 127 * LIMIT <= 2**15 - 1 < 127 * (LIMIT + 1)
    weights = np.zeros((WIDTH, 2 * GROUP), np.int8)
    weights[1, [3, 11, 16 + 3, 16 + 11]] = [64, -65, 64, -65]  # 258 in one lane
    assert check(weights) == 1
    weights[1, 3] += 1
    assert check(weights) == 0
    weights[1, 3], weights[1, 4] = 64, 127  # another lane
    assert check(weights) == 1


@pytest.mark.parametrize(("steps", "least"), [(24, 0.98), (96, 0.99)])
def test_rounded_weights_nearly_all_find_a_partner(steps: int, least: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64 * WIDTH, steps * GROUP))
    scaled = (weights / np.abs(weights).max(axis=1, keepdims=True) * 127).round().astype(np.int8)
    assert check(scaled) >= least


def test_panels_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    weights = np.clip(rng.normal(0, 40, (7 * WIDTH, 10 * GROUP)).round(), -127, 127).astype(np.int8)
    whole = step_order(weights, WIDTH, GROUP)
    monkeypatch.setattr("khtst_compile.targets.kernels.step_order._CHUNK", 250)
    assert (step_order(weights, WIDTH, GROUP) == whole).all() and (whole[:, 0] > 0).any()
