"""What predictors train on is what it is said to be: pieces of real recordings, in the right places."""

from __future__ import annotations

import pytest
import torch

from khtst_compile.zoo import data
from khtst_compile.zoo.jepa import samples
from khtst_compile.zoo.jepa.variants import VARIANTS


def test_recordings() -> None:
    for found, shape in (
        (data.eeg(), (4, 800)),
        (data.anatomical(), (33, 41, 25)),
        (data.functional(), (20, 3, 17, 21)),
        (data.terrain(), (344, 403)),
        (data.photographs(), (2, 3, 427, 640)),
    ):
        assert found.shape == shape and found.dtype is torch.float32 and bool(found.isfinite().all())
    for found in (*data.eeg(), data.anatomical(), data.functional()):
        assert abs(float(found.mean())) < 1e-4 and abs(float(found.std()) - 1) < 1e-4
    assert float(data.photographs().min()) == 0 and float(data.photographs().max()) == 1
    assert 200 < float(data.terrain().min()) < float(data.terrain().max()) < 1100  # m


def test_windows() -> None:
    x = torch.arange(2 * 5 * 6).reshape(2, 5, 6)
    found = samples.windows(x, (3, 2), (1, 2))
    assert found.shape == (9, 2, 3, 2)
    assert all(torch.equal(found[3 * i + j], x[:, i : i + 3, 2 * j : 2 * j + 2]) for i in range(3) for j in range(3))
    assert samples.windows(x, (4,), (1,)).shape == (3, 2, 5, 4)


def test_a_pan_moves_by_its_action() -> None:
    clips, moves = samples.pans()
    seen = 0
    for clip, (dy, dx) in zip(clips[:64], (moves[:64] * 3).round().int().tolist(), strict=True):
        y, x = max(dy, 0), max(dx, 0)
        before = clip[:-1, y : 16 + min(dy, 0), x : 16 + min(dx, 0)]
        after = clip[1:, y - dy : 16 + min(dy, 0) - dy, x - dx : 16 + min(dx, 0) - dx]
        assert torch.equal(before, after)
        seen += bool(dy or dx)
    assert seen > 50 and float(clips.std()) > 0.1


def test_an_edit_is_what_its_vector_says() -> None:
    images, edited, vectors = samples.edits()
    for image, made, (dy, dx, gain) in zip(images[:64, 0], edited[:64, 0], vectors[:64].tolist(), strict=True):
        moved = torch.roll(image, (int(dy), int(dx)), (0, 1))
        if dy:
            moved[0 if dy > 0 else -1] = 0
        if dx:
            moved[:, 0 if dx > 0 else -1] = 0
        torch.testing.assert_close(made, moved * torch.tensor(gain).exp(), rtol=1e-6, atol=0)
    assert {tuple(v) for v in vectors[:, :2].int().tolist()} == {(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)}


def test_past_and_future_adjoin() -> None:
    past, future = samples.past_and_future()
    signal = data.ecg()
    assert torch.equal(past[3, 0], signal[6:70]) and torch.equal(future[3, 0], signal[70:134])


def test_luma_and_chroma_are_of_one_place() -> None:
    luma, chroma = samples.light_and_color()
    rows, columns = 427 // 16, 640 // 16
    red, green, blue = data.photographs()[1, :, 16:32, 32:48]
    y = 0.299 * red + 0.587 * green + 0.114 * blue - 0.5
    (found,) = (i for i, part in enumerate(luma) if torch.allclose(part[0], y, rtol=0, atol=1e-6))
    assert luma.shape == (2 * rows * columns, 1, 16, 16) and chroma.shape == (2 * rows * columns, 2, 16, 16)
    torch.testing.assert_close(chroma[found, 1] / 4, 0.713 * (red - y - 0.5), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(chroma[found, 0] / 4, 0.564 * (blue - y - 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_are_as_said_and_repeat(name: str) -> None:
    variant = VARIANTS[name]()
    first, second = variant.load(), variant.load()
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) and len(a) > 200 for a, b in zip(first, second, strict=True))
    assert len({len(x) for x in first}) == 1
    said = variant.load.__doc__ or ""
    assert str(len(first[0])) in said and all(str(s) in said for s in first[0].shape[1:]), (said, first[0].shape)
