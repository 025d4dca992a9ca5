"""Real data that installed packages carry, as tensors: nothing is fetched. `pip install khtst-compile[zoo]` brings the packages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits: (n, 1, 8, 8) float32 in [0, 1], (n,) int64 labels. scikit-learn's `load_digits`: the test set of the UCI
    "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak), CC BY 4.0."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels).long()


def photograph_patches(name: str, size: int = 8) -> Tensor:
    """Patches of a color photograph, in rows from its top left: (n, size * size * 3) float32, brightness less its mean and over its
    standard deviation, over the whole photograph.

    name: "china.jpg" or "flower.jpg" of scikit-learn's `load_sample_image`, 427 x 640 (CC BY 2.0, by danielbuechele and by vultilion on
    flickr.com). What does not fill a patch is cut off.
    """
    from sklearn.datasets import load_sample_image

    image = _standard(load_sample_image(name))
    rows, columns = image.shape[0] // size, image.shape[1] // size
    cut = image[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return cut.transpose(1, 2).reshape(rows * columns, size * size * 3)


def ecg() -> Tensor:
    """An electrocardiogram of a few beats: (1024,) float32, mean 0, deviation 1. `pywt.data.ecg`, which comes under the license of
    PyWavelets (MIT) and does not name the record."""
    from pywt.data import ecg as read

    return _standard(read())


def sea_temperature() -> Tensor:
    """Sea surface temperature of the eastern Pacific, 264 quarters of a year from 1950: (264,) float32, mean 0, deviation 1.

    `pywt.data.nino`: the NINO3 index of NOAA's ERSSTv4, in the public domain.
    """
    from pywt.data import nino

    return _standard(nino()[1])


def windows(series: Tensor, pieces: int, size: int) -> tuple[Tensor, Tensor]:
    """Every run of `pieces` + 1 adjoining pieces of `size` samples: series (n,) -> x (m, pieces, size) and, one piece later each,
    target (m, pieces, size); m = n - (pieces + 1) size + 1."""
    runs = series.unfold(0, (pieces + 1) * size, 1).unflatten(1, (pieces + 1, size))
    return runs[:, :-1].contiguous(), runs[:, 1:].contiguous()


def _standard(values: npt.NDArray[np.generic]) -> Tensor:
    found = torch.from_numpy(np.asarray(values, np.float64))
    return ((found - found.mean()) / found.std()).float()
