"""Real data that installed packages carry, as tensors: nothing is fetched. `pip install khtst-compile[zoo]` brings the packages."""

from __future__ import annotations

from pathlib import Path

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


def text_bytes() -> Tensor:
    """English prose: the reference of the Python language, topic after topic in the order of their names, as UTF-8: (n,) int64, n about
    450,000. `pydoc_data.topics`, which comes with Python (PSF license), so another version of Python has another text."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8).long()


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
    runs = series.unfold(0, (pieces + 1) * size, 1).reshape(-1, pieces + 1, size)
    return runs[:, :-1].contiguous(), runs[:, 1:].contiguous()


def photographs() -> Tensor:
    """-> (2, 3, 427, 640) float32 in [0, 1]: a temple and a flower, RGB. By danielbuechele and vultilion (CC BY 2.0), in scikit-learn."""
    from sklearn.datasets import load_sample_images

    return torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2).float() / 255


def eeg() -> Tensor:
    """-> (4, 800) float32, four channels of an electroencephalogram, each mean 0 and standard deviation 1. Sample data of matplotlib
    (matplotlib license)."""
    raw = np.fromfile(_matplotlib("eeg.dat"), dtype=np.float64).reshape(800, 4)
    return torch.stack([standard(torch.from_numpy(c)) for c in raw.T]).float()


def anatomical() -> Tensor:
    """-> (33, 41, 25) float32, a T1 magnetic resonance image of a head, 2 mm a voxel, mean 0 and standard deviation 1. In nibabel (MIT)."""
    return standard(_nifti("anatomical.nii"))


def functional() -> Tensor:
    """-> (20, 3, 17, 21) float32, functional magnetic resonance images of the same head: 20 times, 2 s apart, of 3 slices, 4 x 4 x 8 mm a
    voxel, mean 0 and standard deviation 1. In nibabel (MIT)."""
    return standard(_nifti("functional.nii").permute(3, 2, 0, 1))


def terrain() -> Tensor:
    """-> (344, 403) float32, height in m of the land around the Jacksboro fault, Tennessee, every 1/1200 degree. US Geological Survey
    (public domain), sample data of matplotlib."""
    with np.load(_matplotlib("jacksboro_fault_dem.npz")) as found:
        return torch.from_numpy(found["elevation"].astype(np.float32))


def standard(x: Tensor) -> Tensor:
    """x less its mean, over its standard deviation."""
    return (x - x.mean()) / x.std()


def _matplotlib(name: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "sample_data" / name


def _nifti(name: str) -> Tensor:
    import nibabel

    image = nibabel.load(Path(nibabel.__file__).parent / "tests" / "data" / name)
    return torch.from_numpy(np.ascontiguousarray(image.get_fdata(dtype=np.float32)))


def _standard(values: npt.NDArray[np.generic]) -> Tensor:
    found = torch.from_numpy(np.asarray(values, np.float64))
    return ((found - found.mean()) / found.std()).float()
