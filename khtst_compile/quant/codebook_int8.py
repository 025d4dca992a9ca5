"""A codebook in int8, and how far that narrows the choice of a code down: what the codebook kernels and `freeze_codebook` share.

Two forms: sums of products in int32, and (`int16_sums`) in int16 over parts of 16 products, which a row's scale has to leave room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.scores import score_error

Floats = npt.NDArray[np.float32]

LEVELS = 127
"""Largest code of a codebook, and of a vector where sums are int32."""
NARROW_LEVELS = 63
"""Largest of a vector where sums are int16: vpmaddubsw adds 2 * (63 + 64) * 127, and the offset of 64 makes it unsigned."""
STEPS = 8
"""Steps summed in int16, of GROUP features each; one lane takes half of them. Of 16 steps, scales would have to be larger; of 4, a tile
takes a sixth longer."""
GROUP = 4
DIAMETER_CODES = 8192
"""Codebooks of more have their diameter bounded by twice the radius: measured, it takes the square of their size."""
CENTERED = 0.1
"""Least length of the mean of a codebook's codes, in units of the longest, to take it off: it costs a product for each row."""
_INT16 = 32767
_UNIT = 2.0**-24
_CHUNK = 1 << 22  # scores at a time


@dataclass(frozen=True)
class Int8Codebook:
    """One codebook in int8: a code is about mean + scale * weights.

    weights: (K, d) int8. scale: (K,) float32. mean: (d,) float32; what it adds is the same for all codes. part: a row's scale is at least
    this times the length of any of its parts that are summed in int16; 0 where sums are int32.
    off, apart: largest |code - mean - scale * weights|, and the largest distance of two such differences. radius, diameter: largest
    |code - mean|, and distance of two codes. All float64, to be rounded up.
    """

    weights: npt.NDArray[np.int8]
    scale: Floats
    mean: Floats
    part: float
    off: float
    apart: float
    radius: float
    diameter: float


def quantize_codebook(codes: Floats, used: npt.NDArray[np.bool_] | None, int16_sums: bool) -> Int8Codebook:
    """codes: (K, d) float32, finite; used: (K,), rows that can be chosen, None for all."""
    used = np.ones(len(codes), np.bool_) if used is None else used
    mean = codes[used].astype(np.float64).mean(0).astype(np.float32)
    if _radius(mean[None].astype(np.float64)) < CENTERED * _radius(codes[used].astype(np.float64)):
        mean[:] = 0
    wide = np.where(used[:, None], codes.astype(np.float64) - mean, 0.0)
    peak = np.abs(wide).max(1)
    scale = np.where(peak > 0, peak / LEVELS, 1.0).astype(np.float32)
    weights = np.clip(np.rint(wide / scale[:, None]), -LEVELS, LEVELS).astype(np.int8)
    part = 0.0
    if int16_sums:
        longest = float(np.sqrt(np.square(lanes(weights)).sum(-1).max()))
        # Rounding adds half to each code of a part, so 2 to its length of 16. 2^-10 pays for float32.
        part = (1 + 2.0**-10) / (_INT16 / max(1.0, longest) - 0.5 * (STEPS * GROUP / 2) ** 0.5)
    rest = wide - scale[:, None].astype(np.float64) * weights
    return Int8Codebook(weights, scale, mean, part, _radius(rest), _diameter(rest[used]), _radius(wide), _diameter(wide[used]))


def lanes(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(n, d) -> (n, blocks, 2, 16), int32 or wider: what each of two lanes of int16 sums in a block of steps, zeros behind the features."""
    block = STEPS * GROUP
    padded = np.zeros((len(rows), -(-rows.shape[1] // block) * block), np.result_type(rows.dtype, np.int32))
    padded[:, : rows.shape[1]] = rows
    split = padded.reshape(len(rows), -1, STEPS, 2, GROUP // 2)
    return split.transpose(0, 1, 3, 2, 4).reshape(len(rows), split.shape[1], 2, -1)


def scored_exactly(z: Floats, codes: Floats, bias: Floats | None, int16_sums: bool = True) -> npt.NDArray[np.int64]:
    """z: (n, d), codes: (K, d), bias: (K,) or None -> (n,), how many codes of each row a kernel scores in float32: 1 where int8 leaves
    one open. The form with int16 sums leaves more open than the other. See targets/kernels/codebook.py for the bounds."""
    book = quantize_codebook(codes, None if bias is None else ~np.isneginf(bias), int16_sums)
    step = max(1, _CHUNK // max(1, len(codes)))
    parts = [_scored(z[i : i + step], codes, bias, book) for i in range(0, len(z), step)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _scored(z: Floats, codes: Floats, bias: Floats | None, book: Int8Codebook) -> npt.NDArray[np.int64]:
    rows, wide, start = z.astype(np.float64), codes.astype(np.float64), 0.0 if bias is None else bias.astype(np.float64)
    peak = np.maximum(np.abs(rows).max(1), 1e-300)
    scale = peak / LEVELS
    if book.part:
        parts = np.sqrt(np.square(lanes(rows)).sum(-1)).max((1, 2))
        scale = np.maximum(peak / NARROW_LEVELS, parts * book.part)
    given = np.rint(rows / scale[:, None])
    left = rows / scale[:, None] - given
    length, rest = np.sqrt(np.square(given).sum(1)), np.sqrt(np.square(left).sum(1))
    rounding = scale * (length + rest) * float(np.sqrt(np.square(wide).sum(1).max())) * (12 * _UNIT + 2 * score_error(z.shape[1]))
    pair = scale * (length * book.apart + rest * book.diameter) + 2 * rounding
    single = scale * (length * book.off + rest * book.radius) + rounding
    coarse = (given @ (book.weights.T * book.scale.astype(np.float64))) * scale[:, None] + start
    best = coarse.argmax(1)
    open_ = coarse >= (np.take_along_axis(coarse, best[:, None], 1)[:, 0] - pair)[:, None]
    # The best is scored exactly, less what the mean adds to all; others have to come within the bound of a single code.
    exact = np.einsum("nd,nd->n", rows, wide[best] - book.mean) + (0.0 if bias is None else bias.astype(np.float64)[best])
    near = open_ & (coarse >= (exact - single)[:, None])
    np.put_along_axis(near, best[:, None], True, 1)
    return np.where(open_.sum(1) > 1, near.sum(1), 1)


def _radius(rows: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(rows).sum(1).max()))


def _diameter(rows: npt.NDArray[np.float64]) -> float:
    """Largest distance of two rows, or twice the radius where these are too many; never less than it is."""
    if len(rows) > DIAMETER_CODES:
        return 2 * _radius(rows)
    squares, largest = np.square(rows).sum(1), 0.0
    for first in range(0, len(rows), 1024):
        part = squares[first : first + 1024, None] + squares - 2 * rows[first : first + 1024] @ rows.T
        largest = max(largest, float(part.max()))
    return float(np.sqrt(largest + 1e-12 * squares.max()))
