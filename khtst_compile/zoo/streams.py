"""Named streams of random numbers: one seed, and no use of one stream moves another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of `name` under `seed`. The first eight bytes of SHA-256 of "seed/name" seed it, so that a new stream (a bandit's,
    say) leaves the numbers of the others (masks, batches, noise) as they were."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@contextmanager
def fresh(seed: int, name: str) -> Iterator[None]:
    """Within it torch's own generator is `name`'s under `seed`, for layers that initialize themselves; after it, what it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(stream(seed, name).get_state())
        yield
