"""The int8 search: whatever the data, the best code is among those left open, and few others are where codes are well apart."""

from __future__ import annotations

import pytest
import torch

from khtst_compile.quant.certify import candidates, left_open


def drawn(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("d", "codes"), [(1, 1), (1, 9), (3, 40), (16, 16), (64, 256)])
@pytest.mark.parametrize("kind", ["plain", "outliers", "near ties", "tiny", "biased"])
def test_the_best_code_is_never_left_out(d: int, codes: int, kind: str) -> None:
    z, c = drawn(500, d, 1), drawn(codes, d, 2)
    bias = None
    if kind == "outliers":
        z[:, 0] *= 1000
        c[0] *= 100
    if kind == "near ties":
        z = c[torch.arange(500) % codes] + 1e-4 * z
    if kind == "tiny":
        z, c = z * 1e-30, c * 1e-30
    if kind == "biased":
        bias = -0.5 * c.square().sum(-1)
    score = z.double() @ c.double().T + (0 if bias is None else bias.double())
    best = score.argmax(-1, keepdim=True)
    assert bool(left_open(z, c, bias).gather(1, best).all())


def test_few_are_left_where_codes_are_apart_and_all_where_they_are_equal() -> None:
    eye = torch.eye(64)
    assert candidates(eye, eye, None).tolist() == [1] * 64
    assert candidates(drawn(5, 64, 1), drawn(1, 64, 2).repeat(7, 1), None).tolist() == [7] * 5


def test_no_rows_and_rows_of_zeros() -> None:
    assert candidates(torch.empty(0, 4), drawn(3, 4, 1), None).shape == (0,)
    assert candidates(torch.zeros(2, 4), drawn(3, 4, 1), None).tolist() == [3, 3]
