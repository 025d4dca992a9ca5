"""Models small enough to take the whole way in seconds: `tests.tiny:mlp` on the command line."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """(..., 32) float32 -> (..., 32): one normalized, gated two-layer network with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + inner


class Mlp(nn.Module):
    """(batch, 32) float32 -> (batch, 8) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.block(x))
        return found


class Unsupported(nn.Module):
    """Sorts, which no target can do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x)
        return torch.linalg.svdvals(found)


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Mlp(), (torch.randn(4, 32),)


def unsupported() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Unsupported(), (torch.randn(4, 32),)


def broken() -> tuple[nn.Module, tuple[torch.Tensor]]:
    raise RuntimeError("no weights today")
