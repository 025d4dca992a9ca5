"""SonicMoE: a mixture of experts with top-k routing and a capacity."""

from __future__ import annotations

from torch import Tensor, nn

from khtst_compile.zoo.moe.experts import Experts, Routed, check_sizes
from khtst_compile.zoo.moe.routing import route


class SonicMoe(nn.Module):
    """(n, d) or (B, N, d) -> Routed of the same shape; see `route` for who takes what. A token that no expert took gives 0.

    d: features; experts: how many there are; top_k: how many a token asks for; capacity: tokens an expert takes at most of one call's
    n = B N, or None for all. Raises UsageError for sizes that cannot be.
    """

    def __init__(self, d: int, experts: int, top_k: int, capacity: int | None = None) -> None:
        super().__init__()
        check_sizes("SonicMoe", experts, top_k, capacity)
        self.top_k, self.capacity = top_k, capacity
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = Experts(d, experts)

    def forward(self, x: Tensor) -> Routed:
        tokens = x.reshape(-1, x.shape[-1])
        routing = route(self.router(tokens), self.top_k, self.capacity)
        output = self.experts(tokens, routing.weights, range(self.router.out_features))
        return Routed(output.reshape(x.shape), *routing[1:])
