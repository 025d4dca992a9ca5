from __future__ import annotations

import torch

from khtst_compile.zoo import data
from khtst_compile.zoo.jepa.probe import linear_probe


def test_the_probe_reads_what_is_linear_and_nothing_else() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 5, generator=random)
    linear = (x[:, 0] + 0.5 * x[:, 3] > 0).long()
    product = (x[:, 0] * x[:, 1] > 0).long()
    assert linear_probe(x[:1500], linear[:1500], x[1500:], linear[1500:]) > 0.95
    assert linear_probe(x[:1500], product[:1500], x[1500:], product[1500:]) < 0.7


def test_scale_and_dead_features_change_nothing() -> None:
    x, y = data.digits()
    flat = x.flatten(1).double()  # some pixels of the digits are always 0
    plain = linear_probe(flat[:1200], y[:1200], flat[1200:], y[1200:])
    shifted = flat * 8 + 3
    assert plain > 0.85 and linear_probe(shifted[:1200], y[:1200], shifted[1200:], y[1200:]) == plain
