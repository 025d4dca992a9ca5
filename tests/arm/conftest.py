"""What all tests here need: qemu, a cross compiler, TVM's ARM runtime; and a small model that many of them take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from tests.arm import emulator
from tests.requirements import need


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner, built."""
    need("arm", emulator.lacking())
    return emulator.build_runner(tmp_path_factory.mktemp("runner"))


class Text(nn.Module):
    """Ids in, one vector a text out, through attention, a norm, GELU and operators that have no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 40), nn.LayerNorm(40)
        self.qkv, self.out, self.up, self.down = nn.Linear(40, 120), nn.Linear(40, 40), nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = (t.unflatten(-1, (2, 20)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(y))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        mean = (x * (ids > 5)[..., None]).sum(1) / (ids > 5).sum(1, keepdim=True).clamp(min=1)
        return nn.functional.normalize(mean, dim=-1) * 1.5 + mean.square().mean(-1, keepdim=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory, runner: Path) -> Path:
    """An artifact of `Text` for all ARM variants."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("text")
    source = capture_module(Text().eval(), (torch.randint(0, 50, (3, 11)),))
    kc.quantize(source, folder / "q", random=True, recipe="smooth{alpha=0.5} | w8a8")
    kc.lower(folder / "q", folder / "arm", target="arm")
    return folder / "arm"
