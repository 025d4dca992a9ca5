"""Layers that several systems share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """`d_in -> 2 d_in -> d_out` with SiLU between: (..., d_in) -> (..., d_out). `hidden` replaces 2 d_in; an expert has no bias."""

    def __init__(self, d_in: int, d_out: int, hidden: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        hidden = 2 * d_in if hidden is None else hidden
        self.up = nn.Linear(d_in, hidden, bias=bias)
        self.down = nn.Linear(hidden, d_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.up(x)))
        return y
