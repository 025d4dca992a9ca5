"""What a lookup in a codebook should have written, from the vectors it really had, or where these are known but for roundings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from khtst_compile.ops.codebook import codebook_lookup_reference, lost_rows, step_lookup_reference
from khtst_compile.parity import Row

khtst = torch.ops.khtst
LOOKUPS = {khtst.codebook_lookup.default: "codebook_lookup", khtst.step_lookup.default: "step_lookup"}
EXACT = "the same vectors have the same ids and values on every engine, to the bit"
OF_IDS = "values are rows of the table, to the bit, those of the ids that were found"
REGRET = 1e-3
REGRET_REASON = (
    "the vectors come from other orders of float32 sums: a code that scores the same but for that may be taken for the best"
)
SHARE_REASON = "the same, where no ids were kept to judge by"
NEAR = 1e-4  # of a row's largest element: how far other orders of sums may move a feature


def reference(node: fx.Node, operands: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of a lookup's node on these operands."""
    if node.target is khtst.codebook_lookup.default:
        return codebook_lookup_reference(*operands[:5])
    return step_lookup_reference(*operands)


def judge_exact(site: str, what: str, got: torch.Tensor, want: torch.Tensor, reason: str = EXACT) -> Row:
    """Every element the same, floats to the bit."""
    if got.dtype.is_floating_point:
        got, want = got.contiguous().view(torch.int32), want.contiguous().view(torch.int32)
    return Row(site, what, "share that differs", float((got != want).double().mean()) if got.numel() else 0.0, 0.0, reason)


def judge_lookup(
    site: str,
    what: str,
    node: fx.Node,
    output: int,
    got: torch.Tensor,
    ids: torch.Tensor | None,
    operands: list[Any],
    exact: bool,
) -> list[Row]:
    """output: 0 for values, 1 for ids; got: what was written; ids: the ids it belongs to, where they were kept; operands: of the node;
    exact: whether z is, to the bit, what the kernel read."""
    want = reference(node, operands)[output]
    if exact:
        return [judge_exact(site, what, got, want)]
    if node.target is khtst.step_lookup.default:
        return [_judge_steps(site, what, output, got, operands)]
    z, codes, bias, table, running = operands[:5]
    if output == 1:
        return [Row(site, what, "score lost, of the largest", regret(z, codes, bias, table, running, got), REGRET, REGRET_REASON)]
    if ids is not None:
        return [judge_exact(site, what, got, values_of(ids, table).masked_fill(got.isnan(), float("nan")), OF_IDS)]
    rows = (got != want).any(-1) & ~want.isnan().any(-1)
    share = float(rows.double().mean()) if rows.numel() else 0.0
    return [Row(site, what, "share of rows that differ", share, max(0.01, 1.0 / max(1, rows.numel())), SHARE_REASON)]


def values_of(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids: (.., levels) int32, table: (levels, K, v) float32 -> (.., v): the sum of the levels' rows, in order. Ids beyond the table give
    NaN."""
    levels, count, width = table.shape
    within = ((ids >= 0) & (ids < count)).all(-1)
    safe = ids.long().clamp(0, count - 1)
    total = table[0][safe[..., 0]]
    for level in range(1, levels):
        total = total + table[level][safe[..., level]]
    return total.masked_fill(~within[..., None], float("nan")).reshape(*ids.shape[:-1], width)


def regret(
    z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor, running: bool, ids: torch.Tensor
) -> float:
    """How much less than the best any chosen code scores, in units of |z| max|c| + max|bias|, 0 to 2; infinite for an id that no code has.

    Each level is judged on what the ids chosen before leave of z (..., d). Lost rows are left out.
    """
    flat, chosen = z.reshape(-1, z.shape[-1]), ids.reshape(-1, ids.shape[-1]).long()
    kept = ~lost_rows(flat)
    flat, chosen = flat[kept].double(), chosen[kept]
    if not chosen.numel():
        return 0.0
    if bool(((chosen < 0) | (chosen >= codes.shape[1])).any()):
        return float("inf")
    left, total, worst = flat, torch.zeros(len(flat), table.shape[-1], dtype=torch.float64), 0.0
    for level in range(codes.shape[0]):
        added = torch.zeros(codes.shape[1]).double() if bias is None else bias[level].double()
        scores = left @ codes[level].double().T + added
        most = codes[level].double().norm(dim=-1).max()
        size = flat.norm(dim=-1) * most + added[added.isfinite()].abs().max()
        lost = scores.amax(-1) - scores.gather(-1, chosen[:, level, None])[:, 0]
        worst = max(worst, float((lost / size.clamp_min(1e-30)).max()))
        value = table[level].double()[chosen[:, level]]
        total = total + value
        if level + 1 < codes.shape[0]:
            left = left - value if running else flat - total
    return worst


def _judge_steps(site: str, what: str, output: int, got: torch.Tensor, operands: list[Any]) -> Row:
    """What differs lies where a feature is next to a threshold."""
    z, *tables = operands
    slack = NEAR * z.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    low, middle, high = (step_lookup_reference(moved, *tables) for moved in (z - slack, z, z + slack))
    near = low[0] != high[0]
    if output == 1:
        wrong = (got != middle[1]) & ~near.any(-1)
    else:
        wrong = (got != middle[0]) & ~(near & ((got == low[0]) | (got == high[0]))) & ~(got.isnan() & middle[0].isnan())
    share = float(np.mean(wrong.numpy())) if wrong.numel() else 0.0
    return Row(site, what, "share off beside a threshold's rounding", share, 0.0, REGRET_REASON)
