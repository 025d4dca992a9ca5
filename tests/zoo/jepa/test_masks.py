from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa import masks
from khtst_compile.zoo.jepa.masks import Block, Grid, Mask, draw_mask

Draw = Callable[[Block, Grid, float, torch.Generator, int], Mask]
KINDS: dict[str, tuple[Block, tuple[Grid, ...]]] = {
    "blocks": (masks.blocks, ((4, 4), (1, 2), (3, 5, 2), (2,), (1, 1, 2))),
    "tubes": (masks.tubes, ((2, 4, 4), (3, 1, 2), (2, 1, 1), (1, 2, 2))),
    "bands": (masks.bands, ((8, 4), (1, 2), (2, 1), (3, 3))),
    "channels": (masks.channels, ((4, 8), (1, 2), (2, 1), (1, 9))),
    "intervals": (masks.intervals, ((16,), (2,), (4, 8), (2, 1))),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def never_empty(draw: Draw) -> bool:
    """Over all kinds, small and odd grids, small and large fractions: something to see, something to predict, nothing in both."""
    for block, grids in KINDS.values():
        for grid in grids:
            for fraction in (0.01, 0.3, 0.5, 0.9, 0.99):
                random = generator()
                for count in (1, 2, 4):
                    for _ in range(10):
                        mask = draw(block, grid, fraction, random, count)
                        hidden = set(torch.cat(mask.targets).tolist()) if mask.targets else set()
                        seen = mask.context.tolist()
                        if not seen or not mask.targets or not all(len(t) for t in mask.targets) or hidden & set(seen):
                            return False
                        if hidden | set(seen) != set(range(math.prod(grid))):
                            return False
    return True


def planted_unguarded(block: Block, grid: Grid, fraction: float, random: torch.Generator, count: int) -> Mask:
    """All blocks taken as they come."""
    numbers = torch.arange(math.prod(grid)).reshape(grid)
    targets = [numbers[torch.meshgrid(*block(grid, fraction / count, random), indexing="ij")].reshape(-1) for _ in range(count)]
    hidden = torch.zeros(math.prod(grid), dtype=torch.bool)
    hidden[torch.cat(targets)] = True
    return Mask((~hidden).nonzero().squeeze(1), tuple(targets))


def planted_overlap(block: Block, grid: Grid, fraction: float, random: torch.Generator, count: int) -> Mask:
    """A context that still sees what it should predict."""
    return draw_mask(block, grid, fraction, random, count)._replace(context=torch.arange(math.prod(grid)))


def test_never_empty() -> None:
    assert never_empty(draw_mask)
    assert not never_empty(planted_unguarded)
    assert not never_empty(planted_overlap)


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_every_time_and_the_same_for_a_seed(kind: str) -> None:
    block, grids = KINDS[kind]
    first, second = ([draw_mask(block, grids[0], 0.4, g) for _ in range(8)] for g in (generator(), generator()))
    assert all(torch.equal(a.context, b.context) for a, b in zip(first, second, strict=True))
    assert len({tuple(m.context.tolist()) for m in first}) > 2


def places(target: torch.Tensor, grid: Grid) -> list[set[int]]:
    """Per axis, which of its places a block has; the block has to be their product."""
    axes = [set(a.tolist()) for a in torch.unravel_index(target, grid)]
    assert math.prod(len(a) for a in axes) == len(target)
    return axes


def contiguous(axis: set[int]) -> bool:
    return max(axis) - min(axis) + 1 == len(axis)


def drawn(kind: str, grid: Grid, fraction: float = 0.5) -> list[list[set[int]]]:
    random = generator()
    return [places(t, grid) for _ in range(60) for t in draw_mask(KINDS[kind][0], grid, fraction, random).targets]


def test_blocks_are_boxes_with_the_same_share_of_each_axis() -> None:
    for y, x in drawn("blocks", (8, 8)):
        assert contiguous(y) and contiguous(x) and len(y) == len(x) == 4  # sqrt(1/4) of 8
    assert {len(a) for box in drawn("blocks", (8, 8, 8)) for a in box} == {5}  # cube root of 1/4, of 8: 5.04


def test_tubes_last_through_all_of_time() -> None:
    assert all(t == {0, 1, 2} and contiguous(y) and contiguous(x) and len(y) < 4 for t, y, x in drawn("tubes", (3, 4, 4)))


def test_bands_of_frequency_and_of_time() -> None:
    found = drawn("bands", (8, 4))
    of_frequency = [b for b in found if len(b[1]) == 4]
    of_time = [b for b in found if len(b[0]) == 8]
    assert of_frequency and of_time and len(of_frequency) + len(of_time) == len(found)
    assert all(len(f) == 2 and contiguous(f) for f, _ in of_frequency) and all(len(t) == 1 for _, t in of_time)


def test_whole_channels_or_windows_of_time() -> None:
    found = drawn("channels", (4, 8), 0.9)
    whole, windows = [b for b in found if len(b[1]) == 8], [b for b in found if len(b[0]) == 4]
    assert whole and windows and len(whole) + len(windows) == len(found)
    assert any(not contiguous(c) for c, _ in whole) and all(contiguous(t) for _, t in windows)


def test_intervals_stay_in_one_channel() -> None:
    assert all(len(c) == 1 and contiguous(t) and len(t) == 4 for c, t in drawn("intervals", (2, 8)))
    assert all(contiguous(t) and len(t) == 4 for (t,) in drawn("intervals", (16,)))


def test_more_is_hidden_for_a_larger_fraction() -> None:
    for block, grids in KINDS.values():
        sizes = []
        for fraction in (0.2, 0.5, 0.8):
            random = generator()
            sizes.append(sum(len(draw_mask(block, grids[0], fraction, random).context) for _ in range(40)))
        assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("grid, fraction, count", [((1, 1), 0.5, 1), ((4, 4), 0.0, 1), ((4, 4), 1.0, 1), ((4, 4), 0.5, 0)])
def test_refusals(grid: Grid, fraction: float, count: int) -> None:
    with pytest.raises(UsageError, match=r"mask: .*needed:"):
        draw_mask(masks.blocks, grid, fraction, generator(), count)
