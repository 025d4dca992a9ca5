"""Named streams of random numbers: one seed, and no use of one stream moves another."""

from __future__ import annotations

import hashlib

import torch


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of `name` under `seed`. The first eight bytes of SHA-256 of "seed/name" seed it, so that a new stream (a bandit's,
    say) leaves the numbers of the others (masks, batches, noise) as they were."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
