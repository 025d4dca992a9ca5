"""How much of what a label says is in features, for a linear map to read."""

from __future__ import annotations

import torch
from torch import Tensor

from khtst_compile.zoo.data import digits


def linear_probe(train: Tensor, labels: Tensor, test: Tensor, wanted: Tensor, penalty: float = 1.0) -> float:
    """Accuracy on `test` of ridge regression from `train` onto one-hot labels, in float64.

    train: (n, f), labels: (n,) int64, test: (m, f), wanted: (m,). Features are taken relative to the mean of `train` and over their
    standard deviation there (those that do not vary count nothing); `penalty` is in units of the features' variance.
    """
    mean, std = train.double().mean(0), train.double().std(0)
    scale = torch.where(std > 0, 1 / torch.where(std > 0, std, 1.0), 0.0)
    x, y = (train.double() - mean) * scale, (test.double() - mean) * scale
    hot = torch.nn.functional.one_hot(labels, int(max(labels.max(), wanted.max())) + 1).double()
    bias = hot.mean(0)
    weights = torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1], dtype=torch.float64), x.T @ (hot - bias))
    return float(((y @ weights + bias).argmax(1) == wanted).double().mean())


def digits_probe(features: Tensor) -> float:
    """features: (1797, ...) of `data.digits()`, in their order -> accuracy on every fourth, with the others to fit."""
    held_out, labels = torch.arange(len(features)) % 4 == 3, digits()[1]
    flat = features.flatten(1)
    return linear_probe(flat[~held_out], labels[~held_out], flat[held_out], labels[held_out])
