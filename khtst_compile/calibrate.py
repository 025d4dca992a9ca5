"""Samples -> running statistics of the activations that reach each linear layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class ActivationStats:
    """What calibration saw of one activation that linear layers read.

    absmax: (features,) float32, largest |x| per channel over all real (unpadded) tokens.
    rows: (n, features) float32, a bounded uniform sample of tokens to calibrate on; held_rows: (m, features), other tokens to judge on.
    grads, held_grads: linear node name -> (n | m, out_features) float32, d(random projection of the outputs) / d(that
    linear's output) for the same tokens.
    tokens: number of real tokens seen; zero_channels: how many channels never left zero.
    """

    absmax: torch.Tensor
    rows: torch.Tensor
    held_rows: torch.Tensor
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    held_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0
    zero_channels: int = 0


@dataclass
class Stats:
    """activations: name of the graph node linear layers read -> its statistics; samples: calibration samples seen.

    held_samples: a few whole batches (public input name -> tensor), not among those `rows` came from, for end-to-end checks.
    """

    activations: dict[str, ActivationStats]
    samples: int
    source: str = ""
    held_samples: list[dict[str, torch.Tensor]] = field(default_factory=list)
