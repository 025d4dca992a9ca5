"""Experts, and what a layer of them returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.layers import Mlp


class Routed(NamedTuple):
    """output: the layer's result, shaped like its input; auxiliary: () the loss that balances the experts; dropped: () int64, tokens that
    no expert took; load: (E,) int64, tokens that each expert took."""

    output: Tensor
    auxiliary: Tensor
    dropped: Tensor
    load: Tensor


class Experts(nn.Module):
    """`count` maps W2 silu(W1 x), d -> 2d -> d, without bias. Each is a module of its own, so that each has its own scales in int8."""

    def __init__(self, d: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(d, d, bias=False) for _ in range(count))

    def forward(self, x: Tensor, weights: Tensor, numbers: Sequence[int]) -> Tensor:
        """x: (n, d); weights: (n, m), those of the m experts `numbers` -> sum_e weights_e f_e(x): (n, d), added in that order.

        All of them see all tokens, and a weight of 0 takes out what did not take one: shapes do not depend on the data.
        """
        output = torch.zeros_like(x)
        for column, number in enumerate(numbers):
            output = output + weights[:, column : column + 1] * self.experts[number](x)
        return output


class Output(nn.Module):
    """A layer's output alone, of one role where it has roles: tensors in, a tensor out, as the compiler takes it."""

    def __init__(self, layer: nn.Module, role: str | None = None) -> None:
        super().__init__()
        self.layer, self.role = layer, role

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, d) or (B, N, d) -> the same shape."""
        routed: Routed = self.layer(x) if self.role is None else self.layer(x, self.role)
        return routed.output


def check_sizes(name: str, experts: int, top_k: int, capacity: int | None) -> None:
    """Raise UsageError where no token, or not every token, could be routed. experts: those a token may go to."""
    if not 1 <= top_k <= experts:
        raise UsageError(f"{name}: top_k is {top_k}; needed: 1 to {experts}, the experts a token may go to")
    if capacity is not None and capacity < 1:
        raise UsageError(f"{name}: capacity is {capacity} tokens; needed: 1 or more, or None for no limit")


def fair_capacity(tokens: int, experts: int, top_k: int, slack: float = 1.25) -> int:
    """Tokens an expert takes at most if the load may be `slack` times even: ceil(slack tokens top_k / experts)."""
    return -int(-slack * tokens * top_k // experts)
