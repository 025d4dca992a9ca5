"""Sums of table rows (words, positions, token types), and what follows them: the first norm and its quantizer.

An id outside its table is an error in torch; a kernel reads the first or the last row. Artifacts check ids before they run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from khtst_compile.ops.fused import norm_reference
from khtst_compile.ops.quantize_rows import quantize_rows_reference

Ids = torch.Tensor | None


def embed_reference(ids0: torch.Tensor, table0: torch.Tensor, ids1: Ids, table1: Ids, ids2: Ids, table2: Ids) -> torch.Tensor:
    """ids0: (..., length) integers; ids1, ids2: the same or (1, .., length), or None; tables: (rows, features) float32.

    Returns ((table0[ids0] + table1[ids1]) + table2[ids2]) (..., length, features).
    """
    total = F.embedding(ids0, table0)
    for ids, table in ((ids1, table1), (ids2, table2)):
        if ids is not None and table is not None:
            total = total + F.embedding(ids, table)
    return total


@torch.library.custom_op("khtst::embed", mutates_args=())
def embed(
    ids0: torch.Tensor,
    table0: torch.Tensor,
    ids1: torch.Tensor | None,
    table1: torch.Tensor | None,
    ids2: torch.Tensor | None,
    table2: torch.Tensor | None,
) -> torch.Tensor:
    """See `embed_reference`."""
    return embed_reference(ids0, table0, ids1, table1, ids2, table2)


@embed.register_fake
def _(
    ids0: torch.Tensor,
    table0: torch.Tensor,
    ids1: torch.Tensor | None,
    table1: torch.Tensor | None,
    ids2: torch.Tensor | None,
    table2: torch.Tensor | None,
) -> torch.Tensor:
    return table0.new_empty((*ids0.shape, table0.shape[1]))


@torch.library.custom_op("khtst::embed_norm", mutates_args=())
def embed_norm(
    ids0: torch.Tensor,
    table0: torch.Tensor,
    ids1: torch.Tensor | None,
    table1: torch.Tensor | None,
    ids2: torch.Tensor | None,
    table2: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> torch.Tensor:
    """`embed`, then `norm`."""
    return norm_reference(embed_reference(ids0, table0, ids1, table1, ids2, table2), gamma, beta, eps, rms)


@embed_norm.register_fake
def _(
    ids0: torch.Tensor,
    table0: torch.Tensor,
    ids1: torch.Tensor | None,
    table1: torch.Tensor | None,
    ids2: torch.Tensor | None,
    table2: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    rms: bool,
) -> torch.Tensor:
    return table0.new_empty((*ids0.shape, table0.shape[1]))


@torch.library.custom_op("khtst::embed_norm_quantize", mutates_args=())
def embed_norm_quantize(
    ids0: torch.Tensor,
    table0: torch.Tensor,
    ids1: torch.Tensor | None,
    table1: torch.Tensor | None,
    ids2: torch.Tensor | None,
    table2: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    rms: bool,
    inv_smooth: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    block: int,
    points: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`embed_norm`, then `quantize_rows` of its result -> (y float32, codes int8, scale float32)."""
    y = norm_reference(embed_reference(ids0, table0, ids1, table1, ids2, table2), gamma, beta, eps, rms)
    codes, scale = quantize_rows_reference(y, inv_smooth, static_scale, block, points)
    return y, codes, scale


@embed_norm_quantize.register_fake
def _(
    ids0: torch.Tensor,
    table0: torch.Tensor,
    ids1: torch.Tensor | None,
    table1: torch.Tensor | None,
    ids2: torch.Tensor | None,
    table2: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float,
    rms: bool,
    inv_smooth: torch.Tensor | None,
    static_scale: torch.Tensor | None,
    block: int,
    points: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = table0.new_empty((*ids0.shape, table0.shape[1]))
    return y, torch.empty_like(y, dtype=torch.int8), y.new_empty(y.shape[:-1])
