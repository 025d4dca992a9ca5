"""What stands behind the MLPs of encoder and predictor, to compare: a small layer, a mixture of experts, a dense layer as large as it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from khtst_compile.zoo.jepa.core import through
from khtst_compile.zoo.layers import Mlp
from khtst_compile.zoo.moe import SonicMoe

EXPERTS, TOP_K = 4, 2


class Balanced(NamedTuple):
    """output: (..., d); auxiliary: () the loss of what is inside."""

    output: Tensor
    auxiliary: Tensor


class Residual(nn.Module):
    """x + layer(x): (..., d) -> Balanced. A token that no expert took stays what it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Balanced:
        y, auxiliary = through(self.layer, x)
        return Balanced(x + y, auxiliary)


def small(d: int) -> nn.Module:
    """As wide as the experts that work on a token: the mixture's arithmetic, and TOP_K/EXPERTS of its parameters."""
    return Residual(Mlp(d, d, TOP_K * 2 * d, bias=False))


def mixture(d: int) -> nn.Module:
    """EXPERTS experts and a router: EXPERTS 4 d^2 + EXPERTS d parameters, TOP_K/EXPERTS of the experts' at work on a token."""
    return Residual(SonicMoe(d, EXPERTS, TOP_K))


def dense(d: int) -> nn.Module:
    """One layer with exactly the mixture's parameters, all of them at work: 2 d hidden = EXPERTS 4 d^2 + EXPERTS d."""
    return Residual(Mlp(d, d, EXPERTS * 2 * d + EXPERTS // 2, bias=False))


ARMS: dict[str, Callable[[int], nn.Module]] = {"small": small, "dense": dense, "moe": mixture}
