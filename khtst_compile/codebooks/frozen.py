"""From a codebook as it was found to the tensors of its lookup: retracted, pruned, and what the int8 search is worth."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from khtst_compile.codebooks.found import Level, Vectors
from khtst_compile.errors import PassError
from khtst_compile.ops.codebook import lost_rows, nearest
from khtst_compile.quant.codebook_int8 import scored_exactly
from khtst_compile.quant.stiefel import delta_ort, polar

_SAME = 2.0**-20  # relative: a table is R times its codes where it is so up to the rounding of a few products


@dataclass(frozen=True)
class Tables:
    """codes: (levels, K, d), bias: (levels, K) or None, table: (levels, K, v), all float32: what codebook_lookup is given."""

    codes: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor


def stacked(levels: Sequence[Level]) -> Tables:
    """Levels of one lookup; smaller ones are filled up with rows that never win."""
    most = max(len(level.codes) for level in levels)
    fills = any(len(level.codes) < most for level in levels)
    codes = torch.stack([_filled(level.codes, most, 0.0) for level in levels])
    table = torch.stack([_filled(level.table, most, 0.0) for level in levels])
    if not fills and all(level.bias is None for level in levels):
        return Tables(codes, None, table)
    biases = [torch.zeros(len(level.codes)) if level.bias is None else level.bias for level in levels]
    return Tables(codes, torch.stack([_filled(b, most, -torch.inf) for b in biases]), table)


def _filled(rows: torch.Tensor, most: int, value: float) -> torch.Tensor:
    return torch.cat([rows, rows.new_full((most - len(rows), *rows.shape[1:]), value)])


def digest(tensors: Sequence[torch.Tensor | None]) -> str:
    """SHA-256 of the tensors' bytes in order: ids mean the same only where this is the same."""
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def retract(site: str, level: Level, euclidean: bool) -> Level:
    """The level with its codes replaced by their polar factor, worked out in float64; its table, R times the codes, follows.

    Raises PassError where the codes have lost rank, or the table is no multiple of them.
    """
    factor = _multiple(level.codes, level.table)
    if factor is None:
        raise PassError(
            f"codebook {site!r}: its values are no multiple of its codes, so projecting the codes leaves them open; train it again"
        )
    made = polar(level.codes.double())
    if not delta_ort(made) <= 1e-9:
        raise PassError(
            f"codebook {site!r}: it has lost rank: its projection is {delta_ort(made):.1e} from orthonormal; train it again with fewer "
            "codes or another seed"
        )
    bias = level.bias
    if bias is not None:
        norms = made.square().sum(-1)
        before = level.codes.double().square().sum(-1)
        size = factor if _close(bias.double(), -0.5 * factor * before) else 1.0 if euclidean else None
        bias = bias if size is None else (-0.5 * size * norms).float()
    return replace(level, codes=made.float(), bias=bias, table=(factor * made).float())


def _multiple(codes: torch.Tensor, table: torch.Tensor) -> float | None:
    """R where table = R codes."""
    if codes.shape != table.shape or not bool(codes.any()):
        return None
    wide, values = codes.double(), table.double()
    factor = float((wide * values).sum() / wide.square().sum())
    return factor if _close(values, factor * wide) else None


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= _SAME * wanted.abs().max())


def pruned(level: Level, counts: torch.Tensor) -> tuple[Level, list[int]]:
    """The level without codes that were never chosen, and the old id of each that is left."""
    kept = counts.nonzero().flatten()
    bias = None if level.bias is None else level.bias[kept]
    return replace(level, codes=level.codes[kept], bias=bias, table=level.table[kept]), kept.tolist()


def lookup(book: Vectors, rows: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """rows: (n, d) -> for each level, what it is given (m, d) (rows without a code left out) and the ids it chooses (m,)."""
    given, chosen = [], []
    left, total = rows, torch.zeros(len(rows), book.levels[0].table.shape[1])
    for number, level in enumerate(book.levels):
        good = ~lost_rows(left)
        left, rows, total = left[good], rows[good], total[good]
        ids = nearest(left, level.codes, level.bias).long()
        given.append(left)
        chosen.append(ids)
        value = level.table[ids]
        total = value if number == 0 else total + value
        if number + 1 < len(book.levels):
            left = left - value if book.running else rows - total
    return given, chosen


def narrowed(book: Vectors, rows: torch.Tensor) -> tuple[float, float]:
    """rows: (n, d) a sample of vectors -> the share of rows, over levels, for which int8 scores leave more than one code open, and the mean
    number of codes that are scored in float32 (1 where one is left). Of the coarsest kernel: that of AVX2."""
    left = []
    for z, level in zip(lookup(book, rows)[0], book.levels, strict=True):
        bias = None if level.bias is None else level.bias.numpy()
        left.append(scored_exactly(z.numpy(), level.codes.numpy(), bias))
    every = np.concatenate(left)
    if not len(every):
        return 0.0, 0.0
    return float((every > 1).mean()), float(every.mean())
