"""Mixtures of experts that tests run: shapes, activations and routings of every kind, and what torch's operators make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

import khtst_compile.ops.moe  # noqa: F401 - registers the operators
from khtst_compile.layout import Packed
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.experts import Experts, pack
from khtst_compile.targets.kernels.gemm_i8 import store_codes
from khtst_compile.targets.kernels.rotation import Rotation
from khtst_compile.targets.kernels.rows import Lead

TOKENS = (0, 1, 2, 7, 33, 512)


@dataclass(frozen=True)
class Mixture:
    """The weights of a mixture, drawn from its shape; see `Experts` for the names."""

    count: int
    features: int
    inner: int
    outputs: int
    top_k: int
    act: str = "silu"
    gated: bool = True
    numbers: tuple[float, ...] = ()
    smooth: bool = False
    rotation: Rotation | None = None
    residual: bool = False
    bias: bool = False

    @cached_property
    def weights(self) -> dict[str, np.ndarray | None]:
        rng = np.random.default_rng(self.count)
        up = (self.count, self.inner * (2 if self.gated else 1))
        down = (self.count, self.outputs)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        return {
            "up": rng.integers(-127, 128, (*up, self.features), dtype=np.int8),
            "up_scale": rng.uniform(1e-3, 1e-2, up).astype(np.float32),
            "up_bias": normal(*up) if self.bias else None,
            "inv_smooth": rng.uniform(0.5, 2, (self.count, self.inner)).astype(np.float32) if self.smooth else None,
            "down": rng.integers(-127, 128, (*down, self.inner), dtype=np.int8),
            "down_scale": rng.uniform(1e-3, 1e-2, down).astype(np.float32),
            "down_bias": normal(*down) if self.bias else None,
        }

    def floats(self) -> dict[str, np.ndarray | None]:
        """The weights in float32, small enough for sums of one order to be near those of another."""
        w = self.weights
        made: dict[str, np.ndarray | None] = {"up_bias": w["up_bias"], "down_bias": w["down_bias"]}
        for name in ("up", "down"):
            made[name] = w[name].astype(np.float32) * np.float32(0.01)  # type: ignore[union-attr]
        return made

    def spec(self, isa: Isa, int8: bool = True, lead: Lead | None = None, name: str = "experts") -> Experts:
        shape = (self.count, self.features, self.inner, self.outputs, self.top_k)
        how = (self.act, self.gated, self.numbers, int8, self.smooth and int8, self.rotation if int8 else None, self.residual)
        return Experts(isa, *shape, lead or Lead(1), *how, name=name)

    def constants(self, spec: Experts) -> list[np.ndarray]:
        """The constant arguments of the kernel."""
        weights = self.weights if spec.int8 else {**self.floats(), "up_scale": None, "inv_smooth": None, "down_scale": None}
        arrays = pack(spec, **weights)  # type: ignore[arg-type]
        return [a.packed if isinstance(a, Packed) else a for a in arrays]


@dataclass(frozen=True)
class Tokens:
    """Rows for a mixture: x (n, features), ids and weights (n, top_k), residual (n, outputs)."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    residual: np.ndarray | None

    def inputs(self, spec: Experts, constants: list[np.ndarray]) -> list[np.ndarray]:
        """The arguments of the kernel before its output."""
        codes, scale = self.codes()
        x = [store_codes(spec.isa, codes.numpy()), scale.numpy()] if spec.int8 else [self.x]
        return [*x, self.ids, self.weights, *constants, *([] if self.residual is None else [self.residual])]

    def codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows_reference(torch.from_numpy(self.x), None, None, 0, 0)


def tokens(mixture: Mixture, n: int, kind: str = "any") -> Tokens:
    """kind: "any"; "one": all rows to the last expert, nobody elsewhere; "holes": slots without expert, rows without any, lost rows."""
    rng = np.random.default_rng(n)
    ids = np.stack([rng.permutation(mixture.count)[: mixture.top_k] for _ in range(n)]) if n else np.zeros((0, mixture.top_k))
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    if kind == "one":
        ids[:] = -1
        ids[:, 0] = mixture.count - 1
    if kind == "holes":
        ids[rng.uniform(size=ids.shape) < 0.3] = -1
        ids[1::5] = -1
        weights[2::7, -1] = np.nan
    x = rng.standard_normal((n, mixture.features)).astype(np.float32)
    residual = rng.standard_normal((n, mixture.outputs)).astype(np.float32) if mixture.residual else None
    return Tokens(x, ids.astype(np.int32), weights, residual)


def wanted(mixture: Mixture, rows: Tokens, int8: bool = True) -> np.ndarray:
    """What torch's operator makes of them."""

    def tensor(a: np.ndarray | None) -> torch.Tensor | None:
        return None if a is None else torch.from_numpy(a)

    routing, last = (tensor(rows.ids), tensor(rows.weights)), tensor(rows.residual)
    how = (mixture.act, mixture.gated, list(mixture.numbers), last)
    if not int8:
        w = {k: tensor(v) for k, v in mixture.floats().items()}
        y = torch.ops.khtst.experts(tensor(rows.x), *routing, w["up"], w["up_bias"], w["down"], w["down_bias"], *how)
        return np.asarray(y.numpy())
    w = {k: tensor(v) for k, v in mixture.weights.items()}
    up, down = ((w[n], w[f"{n}_scale"], w[f"{n}_bias"]) for n in ("up", "down"))
    turn = (0, 0) if mixture.rotation is None else (mixture.rotation.block, mixture.rotation.points)
    y = torch.ops.khtst.w8a8_experts(*rows.codes(), *routing, *up, w["inv_smooth"], *turn, *down, *how)
    return np.asarray(y.numpy())


_PLAIN = Mixture(6, 40, 24, 36, 2)
MIXTURES = {
    "gated": _PLAIN,
    "everything": Mixture(6, 40, 32, 64, 3, smooth=True, rotation=Rotation(32, 32), residual=True, bias=True),
    "plain gelu": Mixture(5, 64, 64, 33, 5, "gelu", False, bias=True),
    "no activation": replace(_PLAIN, act="none", gated=False, residual=True),
    "clamped": Mixture(5, 33, 48, 80, 4, "clamped_swiglu", True, (1.702, 7.0), bias=True),
    "one expert": Mixture(1, 16, 16, 16, 1, "gelu_tanh"),
    "many": Mixture(37, 96, 160, 130, 8, smooth=True),
}
