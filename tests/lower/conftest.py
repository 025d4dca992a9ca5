"""A tiny transformer, quantized and lowered once for all tests here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.program import Program


class Block(nn.Module):
    """Attention with its mask and a feed-forward part, post-norm as in BERT."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        seen = mask[:, None, None, :].expand(batch, 1, length, length)
        y = nn.functional.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)), seen)
        x = self.first(x + self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class Tiny(nn.Module):
    """Ids and a mask in, one vector a text out; widths that are no multiple of 16 or of a tile."""

    def __init__(self, width: int = 40, heads: int = 2):
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 7)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, mask)
        kept = mask[..., None].to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1.0))


def sample(batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random ids; every text is padded to a length of its own."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, batch)
    mask = np.arange(length)[None] < lengths[:, None]
    return {"ids": rng.integers(0, 50, (batch, length)), "mask": mask}


def tensors(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Arrays as tensors."""
    return {k: torch.from_numpy(v) for k, v in inputs.items()}


@pytest.fixture(scope="session")
def draw() -> Callable[..., dict[str, np.ndarray]]:
    """`sample`, for tests (test folders are no packages)."""
    return sample


@pytest.fixture(scope="session")
def tiny_program() -> Program:
    """The captured float32 program."""
    torch.manual_seed(0)
    examples = tensors(sample(3, 6))
    return capture_module(Tiny().eval(), examples, shapes={"seq": (1, 64)}, source="tiny", task="module")


@pytest.fixture(scope="session")
def quantized(tiny_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A "quantized" artifact of the tiny transformer."""
    folder = tmp_path_factory.mktemp("tiny")
    data = sample(48, 12, seed=1)
    np.savez(folder / "calib.npz", **data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kc.quantize(tiny_program, folder / "quantized", calib=folder / "calib.npz")
    return folder / "quantized"


@pytest.fixture(scope="session")
def library(quantized: Path) -> Path:
    """It lowered for the best x86 variant of this machine."""
    kc.lower(quantized, quantized.parent / "library")
    return quantized.parent / "library"
