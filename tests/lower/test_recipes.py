"""Every form of quantizer through every way out: lowered and exported, judged layer by layer against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.program import Program

RECIPES = {
    "full rotation": "smooth{alpha=0.5,fold=false} | rotate{block=64,check=false} | w8a8",
    "cheap rotation": "rotate{block=64,points=4,check=false} | w8a8",
    "static scales": "smooth{alpha=0.5} | rotate{block=32,check=false} | w8a8{activations=static,percentile=99.9}",
    "kept in float": "w8a8{keep_fp32=*.up}",
}


class Gated(nn.Module):
    """A feed-forward part of Llama's kind: RMSNorm, a gate through SiLU, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96, bias=False), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(3)
    module = nn.Sequential(Gated(), Gated()).eval()
    return capture_module(module, (torch.randn(3, 5, 64),), shapes={"seq": (1, 32)})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_lowering_and_export(name: str, program: Program, tmp_path: Path) -> None:
    outliers = np.where(np.arange(64) % 17 == 3, 8.0, 1.0)
    input_name = program.inputs[0].name
    calib = {input_name: (np.random.default_rng(0).standard_normal((32, 5, 64)) * outliers).astype(np.float32)}
    np.savez(tmp_path / "calib.npz", **calib)
    made = kc.quantize(program, tmp_path / "q", calib=tmp_path / "calib.npz", recipe=RECIPES[name])
    assert next(p for p in made.manifest["passes"] if p["pass"] == "w8a8")["changed"] == (4 if name == "kept in float" else 6)
    kc.lower(tmp_path / "q", tmp_path / "x86", target="x86-avx2")
    kc.export(tmp_path / "q", tmp_path / "onnx")
    for folder in ("x86", "onnx"):
        report = kc.verify(tmp_path / folder, reference=tmp_path / "q")
        assert report.ok, report.table(8)
        assert report.summary["output: relative error dB"] < -30  # int8 with outliers 8 times the rest
