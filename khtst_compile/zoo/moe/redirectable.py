"""A mixture of experts whose experts have roles, which can be exchanged without touching a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.errors import UsageError
from khtst_compile.zoo.moe.experts import Experts, Routed, check_sizes
from khtst_compile.zoo.moe.roles import DECODER, ENCODER, Roles
from khtst_compile.zoo.moe.routing import route


class SelfAttention(nn.Module):
    """Attention of every token to every other of its sequence (Vaswani et al., 2017), `heads` at a time: (B, N, d) -> (B, N, d)."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or d % heads:
            raise UsageError(f"attention: {heads} heads for {d} features; needed: a number that divides them")
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, heads, N, d/heads). A head is a part of a token's features: the axis is split first, then moved."""
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        y: Tensor = self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return y


class RedirectableMoe(nn.Module):
    """y = x + g attn(x), then out = y + sum_e p_e f_e(y) over the experts of one role. (n, d), one sequence, or (B, N, d) -> Routed.

    g starts at 0, so that at birth y = x (the sign of a zero aside). The router's probabilities are over the experts of the role alone;
    top_k, capacity and the weights are those of `route`. `load` counts the role's experts in ascending order. What the roles are is part
    of the state dict.
    """

    def __init__(self, d: int, experts: int, top_k: int, capacity: int | None = None, *, heads: int = 1) -> None:
        super().__init__()
        self.roles = Roles.alternating(experts)
        check_sizes("RedirectableMoe", experts // 2, top_k, capacity)
        self.top_k, self.capacity = top_k, capacity
        self.attention = SelfAttention(d, heads)
        self.gain = nn.Parameter(torch.zeros(()))
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = Experts(d, experts)

    def attend(self, x: Tensor) -> Tensor:
        """x + g attn(x), shaped like x."""
        batched = x if x.dim() == 3 else x.unsqueeze(0)
        attended: Tensor = self.attention(batched)
        return x + self.gain * attended.reshape(x.shape)

    def forward(self, x: Tensor, role: str = ENCODER) -> Routed:
        y = self.attend(x)
        tokens = y.reshape(-1, y.shape[-1])
        numbers = self.roles.of(role)
        logits = self.router(tokens)[:, list(numbers)]
        routing = route(logits, self.top_k, self.capacity)
        output = y + self.experts(tokens, routing.weights, numbers).reshape(y.shape)
        return Routed(output, *routing[1:])

    def both(self, encoded: Tensor, decoded: Tensor) -> tuple[Routed, Routed]:
        """The encoder's pass over one tensor and the decoder's over another: no expert serves both, so neither moves the other."""
        return self(encoded, ENCODER), self(decoded, DECODER)

    def redirect(self, permutation: Sequence[int]) -> None:
        """Expert i takes the role that expert permutation[i] has; `self.roles.exchange()` exchanges all."""
        self.roles = self.roles.redirected(permutation)

    def get_extra_state(self) -> Tensor:
        """(E,) bool: who decodes."""
        return self.roles.state()

    def set_extra_state(self, state: Tensor) -> None:
        self.roles = Roles.from_state(state)
