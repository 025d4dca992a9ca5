"""SmoothQuant factors, and the error that quantizing a group of linear layers leaves for a given factor.

`s_j = max_i |X_ij|^alpha / max_o |W_oj|^(1 - alpha)` (Xiao et al. 2023, eq. 4); `X / s` and `W * s` have the same product.
Layers that read one activation share `s`: their weight maxima are joint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from khtst_compile.quant.rotation import rotate_blocks
from khtst_compile.quant.scales import fake_quantize_rows, fake_quantize_weight

FLOOR = 1e-8  # maxima below this count as this: keeps powers and their gradients finite
GRAD_FLOOR = 1e-4  # share of the mean squared sensitivity that every entry keeps, so that no error is free
MAX_ROWS = 256  # tokens of each half an error is measured on
MAX_OUTPUTS = 512  # output channels per group an error is measured on; channels are quantized independently of each other


def weight_maxima(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """weights: each (out_i, features) -> (features,), largest |w| per input channel over all of them."""
    return torch.stack([w.abs().amax(0) for w in weights]).amax(0)


def smooth_factors(x_max: torch.Tensor, w_max: torch.Tensor, alpha: torch.Tensor | float) -> torch.Tensor:
    """x_max, w_max: (features,) largest |x| and |w| per channel -> s: (features,), all positive and finite.

    1 where either maximum is zero or not finite: nothing can be moved between the two there. Differentiable in alpha.
    """
    log_x = x_max.clamp_min(FLOOR).log()
    log_w = w_max.clamp_min(FLOOR).log()
    log_s = alpha * log_x - (1 - alpha) * log_w
    usable = (x_max > 0) & (w_max > 0) & x_max.isfinite() & w_max.isfinite()
    return torch.where(usable, torch.nan_to_num(log_s), torch.zeros_like(log_s)).exp()


def decibels(error: float) -> float | None:
    """A relative squared error in dB, to two digits for a report; None where it is zero or not finite."""
    return round(10 * math.log10(error), 2) if 0 < error < math.inf else None


def zero_channels(x_max: torch.Tensor) -> int:
    """x_max: (features,) -> number of channels that calibration never saw leave zero."""
    return int((x_max == 0).sum())


def error_weights(outputs: torch.Tensor, grads: torch.Tensor | None) -> torch.Tensor:
    """outputs Y, grads g: (tokens, channels) -> v of that shape with `sum(v * Y^2) = 1`: an error is `sum(v * (Yq - Y)^2)`.

    With grads v is proportional to g^2 (floored, and uniform where g vanishes): what an output error does to the model's output.
    Without, every entry weighs the same: the layer's own relative error.
    """
    v = torch.ones_like(outputs)
    if grads is not None:
        squared = torch.nan_to_num(grads, nan=0.0, posinf=0.0, neginf=0.0).to(outputs.dtype).square()
        mean = squared.mean()
        if mean > 0:
            v = squared / mean + GRAD_FLOOR
    total = (v * outputs.square()).sum()
    return v / total if total > 0 else v


class GroupObjective:
    """The error of quantizing linear layers that share an activation, as a function of their smoothing factor.

    rows: (n, features) tokens to fit on, held: (m, features) tokens to judge on; weights: each (out_i, features);
    grads, held_grads: one (n | m, out_i) per weight, or None to weigh by the layers' own relative error;
    block, points: the rotation that follows, or 0, 0.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        held: torch.Tensor,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None = None,
        held_grads: Sequence[torch.Tensor] | None = None,
        block: int = 0,
        points: int = 0,
    ):
        channels = _spread(sum(len(w) for w in weights), MAX_OUTPUTS)
        at_fit, at_held = _spread(len(rows), MAX_ROWS), _spread(len(held), MAX_ROWS)
        self.block, self.points = block, points
        self._fit = len(at_fit)
        self._x = torch.cat([rows[at_fit], held[at_held]]).nan_to_num(0.0, 0.0, 0.0)
        self._w = torch.cat(list(weights))[channels]
        self._y = self._x @ self._w.T
        parts = []
        for y, g, at in ((self._y[: self._fit], grads, at_fit), (self._y[self._fit :], held_grads, at_held)):
            parts.append(error_weights(y, None if g is None else torch.cat(list(g), 1)[at][:, channels]))
        self._v = torch.cat(parts)

    def error(self, s: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """s: (features,) or None for no smoothing -> relative squared error on the fit rows and on the held rows, both scalars.

        Differentiable in s, straight through the rounding. Without held rows the second equals the first.
        """
        x, w = (self._x, self._w) if s is None else (self._x / s, self._w * s)
        if self.block:
            x = rotate_blocks(x, self.block, self.points)
            w = rotate_blocks(w, self.block, self.points, 1.0 / self.points)
        difference = fake_quantize_rows(x) @ fake_quantize_weight(w).T - self._y
        squared = self._v * difference.square()
        fit = squared[: self._fit].sum()
        held = squared[self._fit :].sum() if len(squared) > self._fit else fit.detach()
        return fit, held


def _spread(count: int, most: int) -> torch.Tensor:
    """At most `most` indices below `count`, evenly spread; neither tokens kept nor channels have an order to follow."""
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).round().long()
