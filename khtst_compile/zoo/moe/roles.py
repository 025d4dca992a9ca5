"""Who encodes and who decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from khtst_compile.errors import UsageError

ENCODER, DECODER = "encoder", "decoder"


@dataclass(frozen=True)
class Roles:
    """The role of each expert, in order. Changing roles makes another Roles; no weight is touched."""

    names: tuple[str, ...]

    @classmethod
    def alternating(cls, experts: int) -> Roles:
        """Encoder, decoder, encoder and so on. Raises UsageError for an odd number, with which the roles could not be exchanged."""
        if experts < 2 or experts % 2:
            raise UsageError(f"roles: {experts} experts; needed: an even number, so that both roles have as many")
        return cls((ENCODER, DECODER) * (experts // 2))

    def of(self, role: str) -> tuple[int, ...]:
        """The experts that have `role`, ascending. Raises UsageError for another word."""
        if role not in (ENCODER, DECODER):
            raise UsageError(f"role {role!r}; needed: {ENCODER!r} or {DECODER!r}")
        return tuple(i for i, name in enumerate(self.names) if name == role)

    def state(self) -> Tensor:
        """(E,) bool: who decodes; how a state dict keeps roles."""
        return torch.tensor([name == DECODER for name in self.names])

    @classmethod
    def from_state(cls, state: Tensor) -> Roles:
        """What `state` returned. Raises UsageError where one role has more than the other."""
        if state.dtype is not torch.bool or state.dim() != 1 or 2 * int(state.sum()) != len(state):
            raise UsageError(f"roles: a state of {tuple(state.shape)} {state.dtype}; needed: one axis of bool, half of them true")
        return cls(tuple(DECODER if decodes else ENCODER for decodes in state.tolist()))

    def redirected(self, permutation: Sequence[int]) -> Roles:
        """Expert i gets the role of expert permutation[i]. Raises UsageError for what is no permutation of all experts."""
        if sorted(permutation) != list(range(len(self.names))):
            raise UsageError(f"redirect: {list(permutation)} is no permutation of the experts 0 to {len(self.names) - 1}")
        return Roles(tuple(self.names[i] for i in permutation))

    def exchange(self) -> tuple[int, ...]:
        """The permutation that gives every expert the other role: the first encoder's for the first decoder's, and so on."""
        pairs = list(zip(self.of(ENCODER), self.of(DECODER), strict=True))
        partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        return tuple(partner[i] for i in range(len(self.names)))
