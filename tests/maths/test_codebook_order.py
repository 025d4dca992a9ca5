"""The reference of khtst::codebook_lookup narrows codes down in float64: what it leaves out must never be what the written order picks."""

from __future__ import annotations

import pytest
import torch

from khtst_compile.ops import codebook
from khtst_compile.ops.codebook import exact_scores, nearest
from tests.targets.codebooks import CASES, bad_rows, near_ties, random_rows


def by_all_scores(z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    row, code = (i.reshape(-1) for i in torch.meshgrid(torch.arange(len(z)), torch.arange(len(codes)), indexing="ij"))
    scores = exact_scores(z[row], codes[code], None if bias is None else bias[code]).reshape(len(z), len(codes))
    return (scores == scores.amax(-1, keepdim=True)).int().argmax(-1).int()


@pytest.mark.parametrize("name", CASES)
def test_nearest_is_the_first_largest_of_all_scores(name: str) -> None:
    book = CASES[name]()
    z = torch.cat([random_rows(book, 60), near_ties(book, 100), bad_rows(book)])
    z = z[(z.abs() <= 1e18).all(-1)]
    bias = None if book.bias is None else book.bias[0]
    assert torch.equal(nearest(z, book.codes[0], bias), by_all_scores(z, book.codes[0], bias))


@pytest.mark.parametrize("scale", [1e-45, 1e-44, 1e-43, 1e-38])
def test_products_below_the_normal_floats(scale: float) -> None:
    """They round to a few values, so that codes tie which exact arithmetic tells apart."""
    g = torch.Generator().manual_seed(0)
    z, codes = torch.randn(500, 24, generator=g) * scale, torch.randn(50, 24, generator=g)
    assert torch.equal(nearest(z, codes, None), by_all_scores(z, codes, None))


def test_a_row_that_fills_up_makes_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf is no reason to score every code again."""
    g = torch.Generator().manual_seed(0)
    z, codes, bias = torch.randn(300, 64, generator=g), torch.randn(256, 64, generator=g), torch.randn(256, generator=g)
    bias[255] = -float("inf")
    scored = []

    def counted(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        scored.append(len(rows))
        return exact_scores(rows, *rest)

    monkeypatch.setattr(codebook, "exact_scores", counted)
    nearest(z, codes, bias)
    assert sum(scored) < 30
