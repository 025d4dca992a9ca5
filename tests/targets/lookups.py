"""One module with every codebook and grid of the tests, for engines that are compared as a whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from khtst_compile.capture.factory import capture_module
from khtst_compile.program import Program
from tests.targets.codebooks import CASES, Book, Grid, bad_rows, grid, near_ties, random_rows, step_rows

LOOKUP, STEPS = torch.ops.khtst.codebook_lookup.default, torch.ops.khtst.step_lookup.default
ROWS = 240
BOOKS = {name: make() for name, make in CASES.items()}
GRIDS = {f"grid-{width}-{count}": grid(width, count) for width, count in ((1, 2), (9, 5), (33, 64))}
FORMS = (False, True)
"""Both values of `certified`."""


class Everything(nn.Module):
    """z (batch, all features side by side) -> values and ids of each codebook in both forms, then of each grid."""

    def __init__(self, books: dict[str, Book], grids: dict[str, Grid]):
        super().__init__()
        self.books = [(b.codes.shape[-1], b.running) for b in books.values()]
        self.grids = [g.basis.numel() for g in grids.values()]
        for i, b in enumerate(books.values()):
            for name in ("codes", "bias", "table"):
                self.register_buffer(f"{name}{i}", getattr(b, name))
        for i, g in enumerate(grids.values()):
            for name in ("thresholds", "steps", "basis"):
                self.register_buffer(f"{name}_grid{i}", getattr(g, name))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        at = 0
        for i, (width, running) in enumerate(self.books):
            codes, bias, table = (getattr(self, f"{name}{i}") for name in ("codes", "bias", "table"))
            for certified in FORMS:
                found += LOOKUP(z[:, at : at + width], codes, bias, table, running, certified)
            at += width
        for i, width in enumerate(self.grids):
            tables = (getattr(self, f"{name}_grid{i}") for name in ("thresholds", "steps", "basis"))
            found += STEPS(z[:, at : at + width], *tables)
            at += width
        return tuple(found)


def names(books: dict[str, Book], grids: dict[str, Grid]) -> list[str]:
    """What each output is."""
    kinds = [*(f"{name}, certified {form}" for name in books for form in FORMS), *grids]
    return [f"{kind}: {what}" for kind in kinds for what in ("values", "ids")]


def rows(books: dict[str, Book], grids: dict[str, Grid]) -> torch.Tensor:
    """(ROWS, all features) float32: for each codebook rows of its own, random, near ties, and lost; then for each grid."""
    parts = []
    for b in books.values():
        bad = bad_rows(b)
        half = (ROWS - len(bad)) // 2
        parts.append(torch.cat([bad, near_ties(b, ROWS - len(bad) - half), random_rows(b, half)]))
    return torch.cat([*parts, *(step_rows(g, ROWS) for g in grids.values())], -1)


def program(books: dict[str, Book], grids: dict[str, Grid]) -> Program:
    """It captured, its batch dynamic."""
    module = Everything(books, grids).eval()
    return capture_module(module, (rows(books, grids)[-3:].contiguous(),), shapes={"batch": (1, 4096)}, source="lookups")


def wanted(made: Program, z: torch.Tensor) -> list[np.ndarray]:
    """What torch's operators say."""
    with torch.no_grad():
        return [v.numpy() for v in made.run({made.inputs[0].name: z}).values()]


def check(label: str, got: list[np.ndarray], want: list[np.ndarray], kinds: list[str]) -> None:
    """Every id equal, every value to the bit."""
    for kind, g, w in zip(kinds, got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape, (label, kind, g.dtype, g.shape)
        differ = g.view(np.int32) != w.view(np.int32)
        assert not differ.any(), (
            f"{label}, {kind}: {int(differ.sum())} of {differ.size} differ, first in row {np.argwhere(differ)[0][0]}"
        )
