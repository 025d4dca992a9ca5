"""Real data: of the shapes said, standardized, and cut without losing a place."""

from __future__ import annotations

import torch

from khtst_compile.zoo import data


def test_digits() -> None:
    images, labels = data.digits()
    assert images.shape == (1797, 1, 8, 8) and images.dtype is torch.float32 and labels.dtype is torch.int64
    assert float(images.min()) == 0 and float(images.max()) == 1 and labels.unique().tolist() == list(range(10))


def test_patches_are_pieces_of_the_photograph() -> None:
    from sklearn.datasets import load_sample_image

    patches, image = data.photograph_patches("china.jpg"), torch.from_numpy(load_sample_image("china.jpg").copy()).float()
    assert patches.shape == (53 * 80, 192) and patches.dtype is torch.float32
    piece = (image[16:24, 40:48].reshape(-1) - image.mean()) / image.std()
    assert torch.allclose(patches[2 * 80 + 5], piece, atol=1e-4)


def test_series_are_standardized_and_windows_continue() -> None:
    for series, length in ((data.ecg(), 1024), (data.sea_temperature(), 264)):
        assert series.shape == (length,) and abs(float(series.mean())) < 1e-6 and abs(float(series.std()) - 1) < 1e-6
        x, target = data.windows(series, 7, 8)
        assert x.shape == target.shape == (length - 63, 7, 8)
        assert torch.equal(x[:, 1:], target[:, :-1]) and torch.equal(x[5].flatten(), series[5:61])
        assert torch.equal(target[5, -1], series[61:69])
