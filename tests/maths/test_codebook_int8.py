"""A codebook in int8: its bounds hold, its sums fit, and how many codes it leaves open."""

from __future__ import annotations

import numpy as np
import pytest

from khtst_compile.quant.codebook_int8 import LEVELS, NARROW_LEVELS, lanes, quantize_codebook, scored_exactly
from tests.targets.close_calls import normal

FORMS = pytest.mark.parametrize("int16_sums", [True, False], ids=["int16", "int32"])


def test_lanes_take_pairs_of_four() -> None:
    parts = lanes(np.arange(40)[None])
    assert parts.shape == (1, 2, 2, 16)
    assert parts[0, 0, 0, :4].tolist() == [0, 1, 4, 5] and parts[0, 0, 1, :4].tolist() == [2, 3, 6, 7]
    assert parts[0, 1, 0].tolist() == [32, 33, 36, 37] + [0] * 12


@FORMS
def test_distances_are_those_of_all_pairs(int16_sums: bool) -> None:
    rng = np.random.default_rng(0)
    codes = normal(rng, 50, 24) + 3
    used = np.arange(50) < 40
    book = quantize_codebook(codes, used, int16_sums)
    wide = codes[used].astype(np.float64)
    rest = wide - book.mean - book.scale[used, None].astype(np.float64) * book.weights[used]
    for rows, radius, diameter in ((wide - book.mean, book.radius, book.diameter), (rest, book.off, book.apart)):
        pairs = np.linalg.norm(rows[:, None] - rows, axis=-1).max()
        assert pairs <= diameter <= pairs * 1.00001
        assert radius == pytest.approx(np.linalg.norm(rows, axis=-1).max(), rel=1e-12)
    assert np.abs(book.weights).max() == LEVELS and book.mean.any()


def test_a_small_mean_stays_in() -> None:
    codes = normal(np.random.default_rng(0), 500, 24)
    assert not quantize_codebook(codes, None, True).mean.any()


@pytest.mark.parametrize("kind", ["normal", "signs", "one feature", "equal"])
def test_int16_sums_fit(kind: str) -> None:
    rng = np.random.default_rng(1)
    codes = {
        "normal": normal(rng, 80, 64),
        "signs": np.sign(normal(rng, 80, 64)),
        "one feature": np.eye(64, dtype=np.float32),
    }.get(kind, np.ones((3, 64), np.float32))
    book = quantize_codebook(codes, None, True)
    # The codes as they are without the mean, which no row can be more aligned with; and noise.
    rows = np.concatenate([codes - book.mean, normal(rng, 100, 64), codes]).astype(np.float64)
    rows = rows[np.abs(rows).max(1) > 0]
    parts = np.sqrt(np.square(lanes(rows)).sum(-1)).max((1, 2))
    scale = np.maximum(np.abs(rows).max(1) / NARROW_LEVELS, parts * book.part)
    given = lanes(np.rint(rows / scale[:, None]).astype(np.int32))
    sums = np.einsum("nbls,kbls->nkbl", given, lanes(book.weights))
    assert np.abs(sums).max() <= 32767
    if kind == "signs":
        assert np.abs(sums).max() > 30000, "the bound is not far from what is needed"


@FORMS
def test_one_code_is_enough_where_rows_are_codes(int16_sums: bool) -> None:
    rng = np.random.default_rng(2)
    codes = normal(rng, 200, 64)
    assert (scored_exactly(codes, codes, -0.5 * np.square(codes).sum(1), int16_sums) == 1).all()
    noise = scored_exactly(normal(rng, 500, 64), codes, None, int16_sums)
    assert 1.0 < noise.mean() < 8.0 and (noise >= 1).all()


def test_rows_of_zeros_leave_all_open() -> None:
    assert scored_exactly(np.zeros((2, 4), np.float32), normal(np.random.default_rng(4), 3, 4), None).tolist() == [3, 3]


def test_duplicates_are_all_scored() -> None:
    codes = np.repeat(normal(np.random.default_rng(3), 20, 32), 3, 0)
    assert (scored_exactly(codes, codes, -0.5 * np.square(codes).sum(1)) == 3).all()
    assert scored_exactly(codes[:0], codes, None).shape == (0,)
