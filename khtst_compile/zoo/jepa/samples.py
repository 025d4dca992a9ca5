"""What each predictor trains on: many pieces of the few recordings there are. All return tensors with samples first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from khtst_compile.zoo import data
from khtst_compile.zoo.jepa.points import groups
from khtst_compile.zoo.streams import stream


def windows(x: Tensor, sizes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """x: (..., S_1, ..., S_r) -> (n, ..., s_1, ..., s_r): every window of `sizes` at multiples of `steps`."""
    first = x.dim() - len(sizes)
    for i, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        x = x.unfold(first + i, size, step)
    order = [*range(first, first + len(sizes)), *range(first), *range(first + len(sizes), x.dim())]
    x = x.permute(order)
    return x.reshape(-1, *x.shape[len(sizes) :]).contiguous()


def digit_images() -> tuple[Tensor]:
    """(1797, 1, 8, 8): handwritten digits."""
    return (data.digits()[0],)


def photograph_images() -> tuple[Tensor]:
    """(1950, 3, 32, 32): windows of two photographs, 0.5 taken off."""
    return (windows(data.photographs(), (32, 32), (16, 16)).flatten(0, 1) - 0.5,)


def head_clips() -> tuple[Tensor]:
    """(735, 8, 8, 8), times, height, width: windows of functional magnetic resonance images, all slices."""
    return (windows(data.functional().transpose(0, 1), (8, 8, 8), (2, 2, 2)).flatten(0, 1),)


def pans() -> tuple[Tensor, Tensor]:
    """(1024, 4, 16, 16) clips, (1024, 2) what the camera did: it moves over a photograph, gray, 0.5 taken off, by (dy, dx) pixels a frame,
    -3 to 3; the action is given in units of 3 pixels."""
    gray = data.photographs().mean(1) - 0.5
    random = stream(0, "pans")
    count, frames, size, most = 1024, 4, 16, 3
    moves = torch.randint(-most, most + 1, (count, 2), generator=random)
    margin = most * (frames - 1)
    room = torch.tensor(gray.shape[1:]) - size - 2 * margin
    starts = margin + (torch.rand(count, 2, generator=random) * room).long()
    corners = starts.unsqueeze(1) + moves.unsqueeze(1) * torch.arange(frames).view(1, -1, 1)
    inside = torch.arange(size)
    rows = (corners[..., 0, None] + inside).unsqueeze(-1)
    columns = (corners[..., 1, None] + inside).unsqueeze(-2)
    picture = (torch.arange(count) % gray.shape[0]).view(-1, 1, 1, 1)
    return gray[picture, rows, columns], moves / most


def spectrum(x: Tensor) -> Tensor:
    """x: (T,) -> (32, T/4 + 1): log of 1e-2 + |short-time Fourier transform| over 62 samples with a Hann window, every 4."""
    found = torch.stft(x, 62, 4, window=torch.hann_window(62), return_complex=True)
    return (found.abs() + 1e-2).log()


def spectrograms() -> tuple[Tensor]:
    """(242, 32, 16): frequencies, times, of an electrocardiogram, mean 0 and standard deviation 1."""
    return (windows(data.standard(spectrum(data.ecg())), (16,), (1,)),)


def head_volumes() -> tuple[Tensor]:
    """(1155, 12, 12, 12): windows of a magnetic resonance image of a head."""
    return (windows(data.anatomical(), (12, 12, 12), (2, 2, 2)),)


def channel_windows() -> tuple[Tensor]:
    """(369, 4, 64): windows of four channels of an electroencephalogram."""
    return (windows(data.eeg(), (64,), (2,)),)


def heart_windows() -> tuple[Tensor]:
    """(449, 1, 128): windows of an electrocardiogram."""
    return (windows(data.ecg().unsqueeze(0), (128,), (2,)),)


def past_and_future() -> tuple[Tensor, Tensor]:
    """Two of (449, 1, 64): halves of windows of an electrocardiogram."""
    (x,) = heart_windows()
    return x[..., :64].contiguous(), x[..., 64:].contiguous()


def land() -> tuple[Tensor]:
    """(480, 16, 51): 16 groups, center and 16 nearest, of 256 points of land. Units: 8 steps (some 700 m) from a window's middle, 100 m
    over its mean height."""
    height = windows(data.terrain(), (32, 32), (16, 16))
    random = stream(0, "land")
    chosen = torch.stack([torch.randperm(32 * 32, generator=random)[:256] for _ in range(len(height))])
    y, x = chosen // 32, chosen % 32
    z = (height - height.mean((1, 2), keepdim=True)).flatten(1).gather(1, chosen)
    return (groups(torch.stack([(x - 15.5) / 8, (y - 15.5) / 8, z / 100], -1), 16, 16),)


def light_and_color() -> tuple[Tensor, Tensor]:
    """(2080, 1, 16, 16) luma and (2080, 2, 16, 16) chroma, times 4, of windows of two photographs (ITU-R BT.601)."""
    red, green, blue = data.photographs().unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    chroma = torch.stack([0.564 * (blue - luma), 0.713 * (red - luma)], 1)
    cut = [windows(x, (16, 16), (16, 16)).flatten(0, 1) for x in (luma.unsqueeze(1) - 0.5, 4 * chroma)]
    return cut[0], cut[1]


def edits() -> tuple[Tensor, Tensor, Tensor]:
    """(1797, 1, 8, 8) digits, the same moved and made lighter or darker, (1797, 3) by how much: pixels down and to the right, -1 to 1, and
    the natural logarithm of the factor, within +-0.5."""
    (images,) = digit_images()
    random = stream(0, "edits")
    moves = torch.randint(-1, 2, (len(images), 2), generator=random)
    gains = torch.rand(len(images), generator=random) - 0.5
    padded = functional.pad(images[:, 0], (1, 1, 1, 1))
    inside = torch.arange(1, 9)
    rows = (inside - moves[:, :1]).unsqueeze(-1)
    columns = (inside - moves[:, 1:]).unsqueeze(-2)
    moved = padded[torch.arange(len(images)).view(-1, 1, 1), rows, columns] * gains.exp().view(-1, 1, 1)
    return images, moved.unsqueeze(1), torch.cat([moves, gains.unsqueeze(1)], 1)
