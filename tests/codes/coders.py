"""Programs with frozen codebooks."""

from __future__ import annotations

from torch import nn

from khtst_compile.calibrate import Samples, calibrate
from khtst_compile.capture.factory import capture_module
from khtst_compile.contract import run_passes
from khtst_compile.passes.freeze_codebook import FreezeCodebook
from khtst_compile.program import Program
from tests.quantizers import samples


def frozen(module: nn.Module) -> Program:
    """A module of (batch, 10, 12) captured, calibrated and its codebooks frozen."""
    program = capture_module(module, (samples(0, 3),))
    seen = Samples(128, "noise", False, lambda: iter([{"x": samples(10)}, {"x": samples(11)}]))
    return run_passes(program.with_stats(calibrate(program, seen)), [FreezeCodebook()])
