"""khtst::codebook_lookup and khtst::step_lookup: vectors into ids of a codebook, and the values these ids stand for.

Which code is nearest is decided by float32 arithmetic in one written order, so that a kernel, ONNX and torch give the same ids also where
two codes are a rounding apart. How an engine gets there is its own affair: whatever narrows the choice down has a bound on its error, and
what is left is scored in that order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from khtst_compile.scores import LANES, LARGEST, TINY, score_error

__all__ = ["LANES", "LARGEST", "TINY", "codebook_lookup", "exact_scores", "lost_rows", "nearest", "score_error", "step_lookup"]

_CHUNK = 1 << 22  # elements of float64 scores at a time


def lost_rows(z: torch.Tensor) -> torch.Tensor:
    """z: (..., d) -> (...) bool: rows that hold a NaN, an infinity or a magnitude above LARGEST. They have id 0 and values NaN."""
    lost: torch.Tensor = ~(z.abs() <= LARGEST).all(-1)
    return lost


def exact_scores(z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The scores ids are decided by, to the bit. z, codes: (n, d) float32, row by row; bias: (n,) float32 or None -> (n,) float32.

    Products, each rounded, are summed over every 16th feature from 0, 1, .. 15 in order (features end with zeros); the 16 sums by halves,
    s[i] + s[i + 8] and so on; then the bias is added. Every step rounds to float32.
    """
    products = F.pad(z * codes, (0, -z.shape[-1] % LANES)).reshape(len(z), -1, LANES)
    total = products[:, 0]
    for part in products.unbind(1)[1:]:
        total = total + part
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[:, :half] + total[:, half:]
    score: torch.Tensor = total[:, 0]
    return score if bias is None else score + bias


def nearest(z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """z: (n, d), codes: (K, d), bias: (K,) or None, all float32 -> (n,) int32: the code of the highest score, of equal ones the first.

    Rows of `lost_rows` get 0.
    """
    ids = torch.zeros(len(z), dtype=torch.int32, device=z.device)
    wide = codes.double()
    lengths, most = wide.square().sum(-1).sqrt().max(), 0.0
    if bias is not None:  # a row that fills up has -inf, which no sum changes
        most = float(bias.abs().masked_fill(bias.isinf(), 0.0).max())
    step = max(1, _CHUNK // max(1, len(codes)))
    for first in range(0, len(z), step):
        part = z[first : first + step]
        lost = lost_rows(part)
        part = part.masked_fill(lost[:, None], 0.0)
        score = part.double() @ wide.T
        size = part.double().square().sum(-1).sqrt() * lengths
        error = size * score_error(z.shape[1]) + (size + most) * 2.0**-24 + z.shape[1] * TINY
        if bias is not None:
            score = score + bias.double()
        open_ = score >= (score.amax(-1) - 2 * error)[:, None]
        found = open_.to(torch.int8).argmax(-1)
        several = open_.sum(-1) > 1
        if bool(several.any()):
            row, code = (open_ & several[:, None]).nonzero(as_tuple=True)
            again = torch.full_like(score, float("-inf"), dtype=torch.float32)
            again[row, code] = exact_scores(part[row], codes[code], None if bias is None else bias[code])
            found = torch.where(several, _first_largest(again), found)
        ids[first : first + step] = found.masked_fill(lost, 0).to(torch.int32)
    return ids


def _first_largest(scores: torch.Tensor) -> torch.Tensor:
    """(n, K) -> (n,): the first place of the largest; torch leaves open which of equal ones argmax returns."""
    return (scores == scores.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)


def codebook_lookup_reference(
    z: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor, running: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `codebook_lookup`."""
    flat = z.reshape(-1, z.shape[-1])
    lost = torch.zeros(len(flat), dtype=torch.bool, device=z.device)
    left, total, ids = flat, None, []
    for level in range(codes.shape[0]):
        lost = lost | lost_rows(left)
        left = left.masked_fill(lost[:, None], 0.0)
        ids.append(nearest(left, codes[level], None if bias is None else bias[level]).masked_fill(lost, 0))
        value = table[level][ids[-1].long()]
        total = value if total is None else total + value
        if level + 1 < codes.shape[0]:
            left = left - value if running else flat - total
    assert total is not None
    values = total.masked_fill(lost[:, None], float("nan"))
    return values.reshape(*z.shape[:-1], table.shape[-1]), torch.stack(ids, -1).reshape(*z.shape[:-1], codes.shape[0])


@torch.library.custom_op("khtst::codebook_lookup", mutates_args=())
def codebook_lookup(
    z: torch.Tensor,
    codes: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    running: bool,
    certified: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors through a codebook, or through the levels of a residual one.

    z: (..., d) float32. codes: (levels, K, d) float32, all within LARGEST_CODE. bias: (levels, K) float32, added to the scores, -inf for a
    row that fills up a smaller codebook; or None. table: (levels, K, v) float32, the values; v is d where there are several levels.

    Level by level, on what is left of z: id = the first largest of `exact_scores` + bias, value = table[level, id]. `total` is the sum of
    values in order. What is left for the next level is (what was left) - value where `running`, else z - total.
    A row that `lost_rows` finds at any level has id 0 from there on, and values NaN.

    certified: whether a kernel may narrow the choice down in int8 first; the result does not depend on it.

    Returns values (..., v) float32, ids (..., levels) int32.
    """
    return codebook_lookup_reference(z, codes, bias, table, running)


@codebook_lookup.register_fake
def _(
    z: torch.Tensor,
    codes: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    running: bool,
    certified: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    lead = z.shape[:-1]
    return z.new_empty((*lead, table.shape[-1])), z.new_empty((*lead, codes.shape[0]), dtype=torch.int32)


def step_lookup_reference(
    z: torch.Tensor, thresholds: torch.Tensor, steps: torch.Tensor, basis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `step_lookup`."""
    digits = (z.unsqueeze(-1) >= thresholds).sum(-1, dtype=torch.int64)
    values = steps.expand(*z.shape, steps.shape[-1]).gather(-1, digits.unsqueeze(-1)).squeeze(-1)
    ids = (digits * basis).sum(-1, dtype=torch.int64).to(torch.int32)
    return values.masked_fill(z.isnan(), float("nan")), ids


@torch.library.custom_op("khtst::step_lookup", mutates_args=())
def step_lookup(
    z: torch.Tensor, thresholds: torch.Tensor, steps: torch.Tensor, basis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each feature through its own step function: the codebook of FSQ and LFQ, which is a grid and never written out.

    z: (..., d) float32. thresholds: (d, n - 1) float32, rising, ending with NaN where a feature has fewer steps. steps: (d, n) float32,
    the value of each step (beyond a feature's own the last one again). basis: (d,) int32.

    digit_j = how many thresholds of feature j are <= z_j (0 for NaN); value_j = steps[j, digit_j], NaN for NaN; id = sum_j digit_j basis_j.
    Comparisons alone: the same everywhere.

    Returns values (..., d) float32, ids (...) int32.
    """
    return step_lookup_reference(z, thresholds, steps, basis)


@step_lookup.register_fake
def _(z: torch.Tensor, thresholds: torch.Tensor, steps: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(z), z.new_empty(z.shape[:-1], dtype=torch.int32)
