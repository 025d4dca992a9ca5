"""Rounding weights so that their errors cancel in what a layer computes, instead of each to its nearest code.

Rounding a weight moves every output by its error times an activation. Activations of a model are correlated, so weights that are rounded
later can take most of that back. Column by column, with the inverse of the activations' second moments saying how much of an error which
remaining column absorbs: GPTQ (Frantar et al. 2023, algorithm 1), which is the optimal brain surgeon (Hassibi and Stork 1993) for a grid.
"""

from __future__ import annotations

import torch

from khtst_compile.ops.quantize_rows import LEVELS
from khtst_compile.quant.smoothing import error_weights

DAMPING = 0.1  # of the mean second moment, added to each: what the activations' own rounding and few tokens leave uncertain
BLOCK = 64  # columns whose errors are spread over the rest in one product
ROWS = 2048  # output channels at a time; they are independent of each other


class Compensation:
    """How the error of rounding one input column is best spread over those not rounded yet, for all layers that read one activation.

    moments: (features, features), the sum or mean over tokens of x x^T; damping: see DAMPING. Columns go in falling order of their moments.
    `usable` is False where the moments say nothing: all zero, or not finite.
    """

    def __init__(self, moments: torch.Tensor, damping: float = DAMPING):
        hessian = moments.double()
        diagonal = hessian.diagonal().clone()
        mean = float(diagonal.mean()) if diagonal.numel() else 0.0
        self.usable = 0 < mean < float("inf") and bool(torch.isfinite(hessian).all())
        if not self.usable:
            return
        self._order = torch.argsort(diagonal, descending=True, stable=True)
        hessian = hessian[self._order][:, self._order]
        hessian.diagonal().add_(damping * mean)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        upper = torch.linalg.cholesky(inverse, upper=True)
        self._spread = upper / upper.diagonal()[:, None]

    def round(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """weight: (out_features, in_features) float32; scales: (out_features,), positive -> codes of the weight's shape, int8 in
        [-127, 127]."""
        codes = torch.empty(weight.shape, dtype=torch.int8)
        for first in range(0, len(weight), ROWS):
            part = slice(first, first + ROWS)
            wanted = weight[part][:, self._order].double() / scales[part, None].double()
            codes[part, self._order] = _round_columns(wanted, self._spread)
        return codes


def _round_columns(wanted: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """wanted: (rows, columns) float64 in units of a code, overwritten; spread: (columns, columns), unit upper triangular -> int8 codes."""
    # One column after the other is read and written: transposed, each of them is contiguous.
    wanted = wanted.T.contiguous()
    codes = torch.empty(wanted.shape, dtype=torch.int8)
    for start in range(0, len(wanted), BLOCK):
        stop = min(start + BLOCK, len(wanted))
        errors = torch.empty(stop - start, wanted.shape[1], dtype=wanted.dtype)
        for at in range(start, stop):
            code = torch.round(wanted[at]).clamp_(-LEVELS, LEVELS)
            codes[at] = code.to(torch.int8)
            torch.sub(wanted[at], code, out=errors[at - start])
            wanted[at + 1 : stop].addr_(spread[at, at + 1 : stop], errors[at - start], alpha=-1)
        wanted[stop:].addmm_(spread[start:stop, stop:].T, errors, alpha=-1)
    return codes.T


def output_error(weight: torch.Tensor, rounded: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor | None = None) -> float:
    """weight, rounded: (out_features, in_features); rows: (tokens, in_features); grads: (tokens, out_features) or None -> relative squared
    error of the layer's outputs that rounding alone leaves, weighed by what it does to the model's output where gradients are given."""
    outputs = rows @ weight.T
    return float((error_weights(outputs, grads) * (rows @ (rounded - weight).T).square()).sum())
