from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa.patches import Patches, pieces

SHAPES = [
    ((8, 8), (4, 4), 3),
    ((8, 8), (3, 3), 1),
    ((7, 5), (2, 3), 2),
    ((4, 9, 8), (2, 4, 3), 1),
    ((5, 6, 7), (5, 4, 2), 2),
    ((3, 31), (1, 8), 1),
    ((9,), (4,), 2),
]


def written_out(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """x: (B, C, ...): every number of every patch looked up; 0 where it lies beyond the edge."""
    batch, channels, *shape = x.shape
    grid = [math.ceil(s / p) for s, p in zip(shape, patch, strict=True)]
    rows = []
    for corner in itertools.product(*(range(g) for g in grid)):
        values = []
        for channel in range(channels):
            for inside in itertools.product(*(range(p) for p in patch)):
                at = [c * p + i for c, p, i in zip(corner, patch, inside, strict=True)]
                beyond = any(a >= s for a, s in zip(at, shape, strict=True))
                values.append(torch.zeros(batch) if beyond else x[(slice(None), channel, *at)])
        rows.append(torch.stack(values, 1))
    return torch.stack(rows, 1)


def equals_what_is_written_out(make: type[nn.Module]) -> bool:
    for shape, patch, channels in SHAPES:
        x = torch.randn(2, channels, *shape, generator=torch.Generator().manual_seed(0))
        if not torch.equal(make(shape, patch, channels)(x), written_out(x, patch)):
            return False
    return True


class PlantedFlatPad(Patches):
    """The mistake of padding the end of the flat vector: patches at the edge take numbers of the next row."""

    def forward(self, x: Tensor) -> Tensor:
        flat = functional.pad(
            x.flatten(1), (0, self.channels * math.prod(g * p for g, p in zip(self.grid, self.patch, strict=True)))
        )
        whole = flat[:, : self.count * self.width].reshape(
            -1, self.channels, *(g * p for g, p in zip(self.grid, self.patch, strict=True))
        )
        return Patches(whole.shape[2:], self.patch, self.channels)(whole)


class PlantedOrder(Patches):
    """Patches of the wrong place: the first axis fastest."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        order = torch.arange(self.count).reshape(self.grid).permute(*reversed(range(len(self.grid)))).reshape(-1)
        return found[:, order]


def test_patches_are_what_is_written_out() -> None:
    assert equals_what_is_written_out(Patches)
    assert not equals_what_is_written_out(PlantedFlatPad)
    assert not equals_what_is_written_out(PlantedOrder)


def test_overhang_lies_at_the_edge() -> None:
    cut = Patches((8, 8), (3, 3))
    assert cut.grid == (3, 3) and cut.count == 9 and cut.width == 9
    corner = cut(torch.ones(1, 8, 8))[0, 8].reshape(3, 3)
    assert torch.equal(corner, torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]]))


def test_pieces_of_channels() -> None:
    x = torch.arange(24.0).reshape(1, 3, 8)
    cut = pieces(3, 8, 4)
    assert cut.grid == (3, 2)
    assert cut(x)[0].tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
        [20, 21, 22, 23],
    ]


def test_one_channel_may_be_left_out() -> None:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Patches((5, 6), (2, 2))(x), Patches((5, 6), (2, 2))(x.unsqueeze(1)))


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"patches: found \(2, 8, 7\); needed: \(batch, 1, 8, 8\)"):
        Patches((8, 8), (2, 2))(torch.zeros(2, 8, 7))
    with pytest.raises(UsageError, match="needed: a size >= 1 for each axis"):
        Patches((8, 8), (2,))
    with pytest.raises(UsageError, match="needed: a size >= 1 for each axis"):
        Patches((8, 8), (2, 0))
