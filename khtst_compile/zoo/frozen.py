"""A codebook that is trained no more: one product, an argmax and a table, which is what the compiler is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.errors import UsageError
from khtst_compile.quant.stiefel import DELTA_ORT, delta_ort


class Quantized(NamedTuple):
    """values: (..., d) float, what stands for z; ids: (...) int64, or (..., levels), which codes those are."""

    values: Tensor
    ids: Tensor


class FrozenQuantizer(nn.Module):
    """(..., d) float32 -> Quantized((..., d) float32, (...) int64): the code nearest to z, R c_k.

    c: (K, d) float64, orthonormal on the smaller side; scale: R. |z - R c|² = |z|² - 2R (<z, c> - R |c|² / 2), so the largest inner
    product is the nearest code only where all rows have one norm; for K > d they do not, and -R |c_k|² / 2 is added to the scores.
    Raises UsageError where c is further than DELTA_ORT from orthonormal.
    """

    def __init__(self, c: Tensor, scale: float) -> None:
        super().__init__()
        codes, table = c.float(), (scale * c).float()
        off = delta_ort(codes)
        if not off <= DELTA_ORT:
            raise UsageError(
                f"freezing a codebook of shape {tuple(c.shape)}: its Gram matrix is {off:.1e} from the identity; needed: {DELTA_ORT:g} or "
                "less. Its weight has lost rank, or is not finite: begin again with another seed or fewer codes"
            )
        self.codes: Tensor
        self.table: Tensor
        self.bias: Tensor | None
        self.register_buffer("codes", codes)
        self.register_buffer("table", table)
        tight_frame = c.shape[0] > c.shape[1]
        self.register_buffer("bias", (-0.5 * scale * c.square().sum(-1)).float() if tight_frame else None)
        self.eval()

    def forward(self, z: Tensor) -> Quantized:
        ids = functional.linear(z, self.codes, self.bias).argmax(-1)
        return Quantized(functional.embedding(ids, self.table), ids)


class FrozenResidual(nn.Module):
    """Frozen levels one after the other: (..., d) float32 -> Quantized((..., d) float32, (..., levels) int64)."""

    def __init__(self, levels: Sequence[FrozenQuantizer]) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)
        self.eval()

    def forward(self, z: Tensor) -> Quantized:
        return quantize_levels(z, list(self.levels))


def quantize_levels(z: Tensor, levels: Sequence[Callable[[Tensor], Quantized]]) -> Quantized:
    """z (..., d) through `levels`, each given what is left: the sum of values (..., d), and ids (..., levels)."""
    total, ids = torch.zeros_like(z), []
    for level in levels:
        found = level(z - total)
        total = total + found.values
        ids.append(found.ids)
    return Quantized(total, torch.stack(ids, -1))
