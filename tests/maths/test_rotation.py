"""Rotations: which fits, and that folding undoes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khtst_compile.ops.rotate import check_rotation, rotate_reference
from khtst_compile.quant.rotation import fit_rotation, rotate_blocks, rotate_columns


@pytest.mark.parametrize(
    ("features", "block", "points", "expected"),
    [
        (384, 128, None, (128, 128)),
        (384, 128, 128, (128, 128)),
        (384, 128, 8, (128, 8)),
        (96, 128, None, (32, 32)),
        (96, 128, 8, (32, 2)),
        (48, 128, 8, (16, 16)),  # the cheap form of 16 would have one point
        (24, 128, None, None),
        (7, 128, None, None),
    ],
)
def test_fit(features: int, block: int, points: int | None, expected: tuple[int, int] | None) -> None:
    assert fit_rotation(features, block, points) == expected


@given(st.integers(1, 700), st.sampled_from([16, 32, 64, 128, 256]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_fits_is_allowed(features: int, block: int, cheap: bool) -> None:
    fitted = fit_rotation(features, block, max(block // 16, 1) if cheap else None)
    if fitted is None:
        assert features % 16
    else:
        check_rotation(*fitted, features)


@given(st.sampled_from([(16, 16), (32, 2), (64, 64), (128, 8), (128, 128)]), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_folding_undoes_the_rotation(form: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 256, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 256, generator=generator, dtype=torch.float64)
    # float64 throughout: 256 products of order 1.
    torch.testing.assert_close(rotate_reference(x, *form) @ rotate_columns(weight, *form).T, x @ weight.T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", [(16, 16), (128, 8), (128, 128)])
def test_the_estimate_agrees_with_the_operator(form: tuple[int, int]) -> None:
    x = torch.randn(3, 256, dtype=torch.float64)
    torch.testing.assert_close(rotate_blocks(x, *form), rotate_reference(x, *form), rtol=0, atol=1e-12)


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(1, 128)
    x[0, 3] = 100.0
    assert rotate_blocks(x, 128, 128).abs().unique().tolist() == [100.0]
