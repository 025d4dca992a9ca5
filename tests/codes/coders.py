"""Programs with frozen codebooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from vector_quantize_pytorch import VectorQuantize

from khtst_compile.calibrate import Samples, calibrate
from khtst_compile.capture.factory import capture_module
from khtst_compile.contract import run_passes
from khtst_compile.passes.freeze_codebook import FreezeCodebook
from khtst_compile.program import Program
from tests.quantizers import samples


class Skipping(nn.Module):
    """A decoder that adds what goes around the codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 16), nn.Linear(16, 5)
        self.quantizer = VectorQuantize(dim=16, codebook_size=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        return self.decoder(self.quantizer(z)[0] + 0.5 * F.relu(z))


def captured(module: nn.Module, shapes: dict[str, tuple[int, int]] | None = None) -> Program:
    return capture_module(module, (samples(0, 3),), shapes=shapes)


def frozen(module: nn.Module, shapes: dict[str, tuple[int, int]] | None = None) -> Program:
    """A module of (batch, 10, 12) captured, calibrated and its codebooks frozen."""
    program = captured(module, shapes)
    seen = Samples(128, "noise", False, lambda: iter([{"x": samples(10)}, {"x": samples(11)}]))
    return run_passes(program.with_stats(calibrate(program, seen)), [FreezeCodebook()])
