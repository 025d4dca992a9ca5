"""Small models whose graphs have the shapes the passes look for, calibrated on seeded noise with outlier channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from khtst_compile.calibrate import Samples, calibrate
from khtst_compile.capture import capture_module
from khtst_compile.program import Program

WIDTH = 32
Make = Callable[..., Program]


class Attention(nn.Module):
    """LayerNorm read by three projections only; their sum by a fourth; a residual around it, and a head that reads the sum."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        mixed = torch.tanh(self.query(h)) * torch.sigmoid(self.key(h)) + self.value(h)
        y = x + self.out(mixed)
        return self.head(torch.relu(y))


class Residual(nn.Module):
    """The LayerNorm's output feeds a linear layer and the residual: nothing may be folded into it."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return h + self.fc(h)


def noise(features: int = WIDTH, tokens: int = 12, seed: int = 0, batch: int = 4) -> torch.Tensor:
    """(batch, tokens, features) float32, two channels 30 and 8 times the others."""
    x = torch.randn(batch, tokens, features, generator=torch.Generator().manual_seed(seed))
    x[..., 1] *= 30
    x[..., features // 2] *= 8
    return x


def build(module: nn.Module, features: int = WIDTH, calibrated: bool = True, seed: int = 0) -> Program:
    """`module` with seeded weights and outliers in a LayerNorm's gain, captured and calibrated."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        for m in module.modules():
            if isinstance(m, nn.LayerNorm) and m.weight is not None:
                m.weight.copy_(torch.rand_like(m.weight) + 0.5)
                m.weight[3] = 25.0
    program = capture_module(module.eval(), (noise(features),))
    if not calibrated:
        return program
    name = program.inputs[0].name

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for i in range(8):
            yield {name: noise(features, seed=10 + i)}

    return program.with_stats(calibrate(program, Samples(32, "noise", False, batches), moments=True))


@pytest.fixture(scope="session")
def attention() -> Program:
    return build(Attention())


@pytest.fixture(scope="session")
def residual() -> Program:
    return build(Residual())


@pytest.fixture(scope="session")
def make() -> Make:
    return build


@pytest.fixture(scope="session")
def evaluate() -> Callable[..., torch.Tensor]:
    """evaluate(program, features=WIDTH): its first output on noise that was not calibrated on."""

    def run(program: Program, features: int = WIDTH) -> torch.Tensor:
        with torch.no_grad():
            return next(iter(program.run({program.inputs[0].name: noise(features, seed=99)}).values()))

    return run
