"""A uniform random sample, of bounded size, of the rows that stream by."""

from __future__ import annotations

import torch


class Reservoir:
    """Keeps the `size` rows with the smallest random keys: every row seen so far is kept with equal probability.

    rows: (size, features) float32; grads: name -> (size, out_features) float32, filled for the same rows by `fill`.
    """

    def __init__(self, size: int, features: int):
        self.size, self.count = size, 0
        self._keys = torch.full((size,), torch.inf)
        self._rows = torch.zeros(size, features)
        self._grads: dict[str, torch.Tensor] = {}

    @property
    def rows(self) -> torch.Tensor:
        return self._rows[: self.count].clone()

    @property
    def grads(self) -> dict[str, torch.Tensor]:
        return {k: v[: self.count].clone() for k, v in self._grads.items()}

    def offer(self, rows: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows: (n, features) float32; keys: (n,) float32, uniform in [0, 1).

        Returns (slots, chosen), both (k,) int64: row `chosen[i]` went into place `slots[i]`, over what was there.
        """
        joined = torch.cat([self._keys, keys])
        kept = torch.topk(joined, self.size, largest=False).indices if joined.numel() else joined.long()
        fresh = kept[kept >= self.size]
        # A padding key is infinite: such a row never enters, even where there is room.
        fresh = fresh[torch.isfinite(joined[fresh])]
        chosen = torch.sort(fresh).values - self.size
        leaving = torch.ones(self.size, dtype=torch.bool)
        leaving[kept[kept < self.size]] = False
        free = torch.isinf(self._keys)
        slots = torch.cat([torch.nonzero(leaving & ~free).flatten(), torch.nonzero(free).flatten()])[: chosen.numel()]
        self._keys[slots] = keys[chosen]
        self._rows[slots] = rows[chosen]
        self.count = int(torch.isfinite(self._keys).sum())
        for grads in self._grads.values():
            grads[slots] = 0
        return slots, chosen

    def fill(self, name: str, slots: torch.Tensor, grads: torch.Tensor) -> None:
        """grads: (k, out_features) float32, for the rows that `offer` put into `slots`."""
        if name not in self._grads:
            self._grads[name] = torch.zeros(self.size, grads.shape[-1])
        self._grads[name][slots] = grads
