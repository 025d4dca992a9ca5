"""Run a whole program with its linear layers quantized in float: what a choice of factors does to the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from khtst_compile.linears import Linear
from khtst_compile.program import Program
from khtst_compile.quant.rotation import rotate_blocks
from khtst_compile.quant.scales import fake_quantize_rows, fake_quantize_weight


@dataclass(frozen=True)
class Treatment:
    """factor: (features,) smoothing s or None; block, points: the rotation, or 0, 0."""

    factor: torch.Tensor | None = None
    block: int = 0
    points: int = 0

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., features) -> smoothed and rotated, not rounded."""
        x = x if self.factor is None else x / self.factor
        return rotate_blocks(x, self.block, self.points) if self.block else x

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: (out_features, features) -> the matrix that meets `activation`, not rounded."""
        weight = weight if self.factor is None else weight * self.factor
        return rotate_blocks(weight, self.block, self.points, 1.0 / self.points) if self.block else weight


class OutputError:
    """Relative squared error of a program's float results on a few batches, as a function of how its layers are treated."""

    def __init__(self, program: Program, linears: Sequence[Linear], batches: Sequence[dict[str, torch.Tensor]]):
        self.program, self.batches = program, batches
        self.linears = {linear.node.name: linear for linear in linears}
        self.reference = [self._floats(program.run(batch)) for batch in batches]

    def __call__(self, treatments: Mapping[str, Treatment]) -> float:
        """treatments: linear node name -> how it is treated; others stay exact. Mean over outputs of ||y - ref||^2 / ||ref||^2."""
        weights = {name: fake_quantize_weight(t.weight(self.linears[name].weight)) for name, t in treatments.items()}
        read = {self.linears[name].x.name for name in treatments}
        error: dict[str, float] = {}
        norm: dict[str, float] = {}
        for batch, reference in zip(self.batches, self.reference, strict=True):
            seen: dict[str, torch.Tensor] = {}

            def hook(node: fx.Node, value: Any, seen: dict[str, torch.Tensor] = seen) -> Any:
                if node.name in weights:
                    linear = self.linears[node.name]
                    x = fake_quantize_rows(treatments[node.name].activation(seen[linear.x.name]))
                    exact = F.linear(seen[linear.x.name], linear.weight)
                    value = value + (F.linear(x, weights[node.name]) - exact)
                if node.name in read:
                    seen[node.name] = value
                return value

            for name, y in self._floats(self.program.run(batch, hook)).items():
                error[name] = error.get(name, 0.0) + float((y - reference[name]).double().square().sum())
                norm[name] = norm.get(name, 0.0) + float(reference[name].double().square().sum())
        ratios = [error[name] / norm[name] for name in error if norm[name] > 0]
        return sum(ratios) / len(ratios) if ratios else 0.0

    def _floats(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: outputs[name] for name in self.program.results() if outputs[name].is_floating_point()}
