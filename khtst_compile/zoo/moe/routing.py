"""Which expert takes which token. Everything here is a tensor of fixed shape: no list, no index whose size depends on the data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_WEIGHT = 1e-6  # what the probabilities of a token's experts are at least divided by


class Routing(NamedTuple):
    """weights: (n, E), what each expert's result counts in each token's, 0 where it did not take the token; auxiliary: (), see `balance`;
    dropped: () int64, tokens that no expert took; load: (E,) int64, tokens that each took."""

    weights: Tensor
    auxiliary: Tensor
    dropped: Tensor
    load: Tensor


def route(logits: Tensor, top_k: int, capacity: int | None = None, allowed: Tensor | None = None) -> Routing:
    """logits: (n, E) float, n >= 1 tokens; allowed: (n, E) bool, the experts each token may go to (default: all), at least one a token.

    Each token asks for the `top_k` experts of highest probability, of equal ones those with lower numbers; each expert takes at most
    `capacity` tokens (default: all), those of highest probability, of equal ones the earlier. The weights are p_e / max(sum of p_e, 1e-6)
    over the experts that took the token. Gradients reach the logits through them and through the auxiliary loss.
    """
    if allowed is not None:  # the lowest number, not -inf: a probability of exactly 0, and no NaN on the way
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    probabilities = logits.softmax(-1)
    scores = probabilities.detach()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -1.0)  # behind an allowed expert whose probability came out as 0
    place = preference(scores)
    chosen = place < top_k
    if allowed is not None:
        chosen = chosen & allowed
    taken = chosen if capacity is None else chosen & (queue(scores.masked_fill(~chosen, -1.0)) < capacity)
    kept = torch.where(taken, probabilities, 0.0)
    weights = kept / kept.sum(-1, keepdim=True).clamp(min=LEAST_WEIGHT)
    first = (place == 0).to(logits.dtype)
    dropped = (~taken.any(-1)).to(torch.int64).sum()
    return Routing(weights, balance(first.mean(0), probabilities.mean(0)), dropped, taken.to(torch.int64).sum(0))


def balance(share: Tensor, mean: Tensor) -> Tensor:
    """The auxiliary loss E sum_e share_e mean_e of Switch Transformers (Fedus et al., 2021, eq. 4): () from two of (E,).

    share: which part of the tokens has each expert as first choice; mean: its mean probability. Where both are one distribution it is at
    least 1, and 1 only where that is uniform. Minimized through `mean`; no gradient goes through `share`.
    """
    return share.shape[0] * (share * mean).sum()


def preference(scores: Tensor) -> Tensor:
    """The place of each expert in each token's list, from 0: (n, E) int64. Highest score first, of equal ones the lower number.

    The experts before it are counted instead of sorted: experts are few, and a count means the same to every compiler.
    """
    mine, theirs = scores.unsqueeze(-1), scores.unsqueeze(-2)
    number = torch.arange(scores.shape[-1], device=scores.device)
    ahead = (theirs > mine) | ((theirs == mine) & (number < number.unsqueeze(-1)))
    return ahead.to(torch.int64).sum(-1)


def queue(scores: Tensor) -> Tensor:
    """The place of each token in each expert's queue, from 0: (n, E) int64. Highest score first, of equal ones the earlier token."""
    order = scores.argsort(dim=0, descending=True, stable=True)  # the token at each place
    return order.argsort(dim=0)  # the place of each token: the inverse of a permutation
