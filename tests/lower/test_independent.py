"""Batches run in parts only where that is proved to change nothing; what must not be split is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile import parts
from khtst_compile.capture.export import to_program
from khtst_compile.capture.shapes import Axis
from khtst_compile.capture.wrapper import Named
from khtst_compile.lower.independent import independent_axis
from khtst_compile.lower.relax import kernel_graph
from khtst_compile.signature import TensorSpec

BATCH = Axis("batch", (("x", 0),), 1, 64)
META = {"source": "test", "task": "module", "tokenizer": None, "max_length": None}


class Of(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def proved(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor | None = None) -> str | None:
    x = torch.randn(4, 6, 8) if x is None else x
    program = to_program(Named(Of(function).eval(), ["x"]), {"x": x}, [BATCH], META)
    return independent_axis(kernel_graph(program).program)


TABLE = torch.randn(10, 8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, -1) + x.mean(dim=(1, 2), keepdim=True),
        lambda x: x.reshape(x.shape[0], -1) * 2,
        lambda x: x.transpose(1, 2)[:, 2:],
        lambda x: torch.cat([x, TABLE[:6].expand(x.shape[0], 6, 8)], 1),
        lambda x: TABLE[(x[..., 0] > 0).long()],
        lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(3)[None]],
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
        lambda x: torch.nn.functional.layer_norm(x, (8,)),
    ],
)
def test_samples_on_their_own(function: Any) -> None:
    assert proved(function) == "batch"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0, keepdim=True),
        lambda x: x.cumsum(0),
        lambda x: torch.cat([x, x], 1).flip(0)[:, :6],
        lambda x: torch.cat([x[:, :, :1], x.amax((0, 1), keepdim=True)[..., :1].expand(x.shape[0], 6, 1)], 2),
        lambda x: x * torch.arange(x.shape[0])[:, None, None],
        lambda x: x[torch.arange(x.shape[0]) * 0],
        lambda x: x / x.shape[0],
        lambda x: torch.full((x.shape[0], 3), x.shape[0]) + x[:, 0, :3],
        lambda x: x.transpose(0, 1),
        lambda x: x.reshape(-1, 8),
        lambda x: x[:, 0] @ x[:, 1].T,
        lambda x: torch.nn.functional.linear(TABLE, x[:, 0]).T,
    ],
)
def test_what_mixes_samples_or_counts_them_is_not_proved(function: Any) -> None:
    assert proved(function) is None


def test_parts_are_even_whole_and_never_smaller_than_asked() -> None:
    specs = (TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("table", "float32", (3, 4)))

    def cut(batch: int, length: int, **given: Any) -> list[int]:
        arrays = [np.zeros((batch, length), np.int64), np.zeros((3, 4), np.float32)]
        options = {"axis": "batch", "fewest": 1, "macs": 10**7, "threads": 1} | given
        slices = parts.cut(arrays, specs, options["axis"], options["fewest"], options["macs"], options["threads"])
        assert slices[0].start == 0 and slices[-1].stop == (batch if options["axis"] else 0)
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
        return [s.stop - s.start for s in slices]

    assert cut(8, 128) == [1] * 8 and cut(8, 128, threads=2) == [2] * 4 and cut(1, 512) == [1]
    assert sorted(cut(9, 32)) == [4, 5] and cut(7, 32) == [7] and cut(3, 512, fewest=2) == [3]
    assert len(cut(8, 128, axis=None)) == 1, "nothing is cut without a proof"
    assert cut(64, 16, macs=100) == [64], "a small model is not called more often"
    assert cut(0, 128) == [0] and cut(4, 0) == [4]


def test_parts_give_the_bits_of_the_whole(
    library: Path, draw: Callable[..., dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, inputs = kc.load(library, threads=1), draw(7, 33)
    assert loaded.manifest["independent"] == "batch"
    monkeypatch.setattr(parts, "MACS", 1)
    monkeypatch.setattr(parts, "ROWS", 10**9)
    whole = loaded.run(inputs)
    monkeypatch.setattr(parts, "ROWS", 66)
    steps, count = loaded.trace(inputs)
    assert count == 3 and steps
    for name, value in loaded.run(inputs).items():
        assert np.array_equal(value, whole[name])
