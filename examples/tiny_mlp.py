"""A small network the whole way through the Python API: quantize, compile, export, verify, run.

python examples/tiny_mlp.py [output folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import khtst_compile as kc


class Mlp(nn.Module):
    """(batch, 64) float32 -> (batch, 10) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """What `khtst-compile quantize examples.tiny_mlp:build` calls: the module and example inputs."""
    return Mlp(), (torch.randn(4, 64),)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = out / "calibration.npz"
    np.savez(data, x=np.random.default_rng(0).standard_normal((128, 64), dtype=np.float32))

    kc.quantize("examples.tiny_mlp:build", out / "mlp", calib=data, recipe="smooth{alpha=0.5} | w8a8", report=print)
    kc.lower(out / "mlp", out / "mlp-x86", target="x86", report=print)
    kc.export(out / "mlp", out / "mlp.onnx")

    report = kc.verify(out / "mlp-x86", reference=out / "mlp")
    print(report.table(limit=5))
    art = kc.load(out / "mlp-x86", threads=1)
    outputs = art.run({"x": np.ones((2, 64), np.float32)})
    print(f"inputs {art.inputs}, output {outputs['output'].shape}, within budget: {report.ok}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/tiny_mlp"))
