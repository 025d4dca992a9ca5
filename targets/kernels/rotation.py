"""The blockwise Walsh-Hadamard transform that the quantizers run on a row before they take its maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels.vec import Expr, Floats, fma, keep, shuffle, span, store


@dataclass(frozen=True)
class Rotation:
    """An unnormalised Walsh-Hadamard transform of every `block` consecutive features.

    block:   features of a block, a power of two in 16..128.
    points:  `block` for the full transform, `block // 16` for the cheap one, which mixes features 16 apart only.

    Stages run at distances 16, 32, .. block / 2 and then, in the full form, 1, 2, 4, 8; a stage at distance d replaces
    (a, b) = (t[i], t[i + d]) by (a + b, a - b).
    """

    block: int = 128
    points: int = 128

    def __post_init__(self) -> None:
        if self.block not in (16, 32, 64, 128) or self.points not in {self.block, max(2, self.block // 16)}:
            raise LoweringError(
                f"rotation: block {self.block}, points {self.points}; needed a block of 16, 32, 64 or 128 "
                "and points equal to block or to block / 16"
            )

    @property
    def full(self) -> bool:
        """Whether features closer than 16 are mixed as well."""
        return self.points == self.block

    @property
    def strides(self) -> tuple[int, ...]:
        """Distances of the stages, in the order in which they run."""
        far = tuple(d for d in (16, 32, 64) if d < self.block)
        return far + ((1, 2, 4, 8) if self.full else ())


def emit_rotation(rotation: Rotation, t: Expr, width: int, visit: Callable[[Expr], None]) -> None:
    """Transform a row in place, blockwise, and call `visit(values)` with every 16 finished values.

    Eight lanes at a time: a block of 128 is then 8 registers of AVX2 for the far stages and for distances 1, 2, 4; distance
    8 pairs the halves. Lanes are independent in every stage, so the width used does not show in the bits.
    """
    block, vectors, lanes = rotation.block, rotation.block // 16, 8
    with T.serial(T.int64(0), T.int64(width // block)) as b:
        with T.serial(T.int64(0), T.int64(2)) as half:
            base = T.Bind(b * block + half * lanes)
            v = [T.Bind(t[span(base + 16 * k, lanes)]) for k in range(vectors)]
            for d in (1, 2, 4):
                if d < vectors:
                    v = _far_stage(v, d)
            if vectors > 1:
                v = [keep(x) for x in v]
            if rotation.full:
                v = [_near_stages(x, lanes) for x in v]
            for k in range(vectors):
                store(t, v[k], base + 16 * k)
        with T.serial(T.int64(0), T.int64(vectors)) as k:
            at = T.Bind(b * block + k * 16)
            if rotation.full:
                low, high = T.Bind(t[span(at, lanes)]), T.Bind(t[span(at + lanes, lanes)])
                store(t, low + high, at)
                store(t, low - high, at + lanes)
            visit(T.Bind(t[span(at)]))


def _far_stage(values: list[Expr], distance: int) -> list[Expr]:
    out = list(values)
    for i, x in enumerate(values):
        if not i & distance:
            y = values[i | distance]
            out[i], out[i | distance] = T.Bind(x + y), T.Bind(x - y)
    return out


def _near_stages(value: Expr, lanes: int) -> Expr:
    """Distances 1, 2, 4 inside a vector: +-value + neighbor, one fma whose product is exact."""
    for d in (1, 2, 4):
        signs = [tirx.FloatImm("float32", -1.0 if i & d else 1.0) for i in range(lanes)]
        sign = tirx.Shuffle(signs, [tirx.IntImm("int32", i) for i in range(lanes)])
        value = T.Bind(fma(value, sign, shuffle(value, [i ^ d for i in range(lanes)])))
    return keep(value)


def rotation_reference(t: Floats, rotation: Rotation) -> Floats:
    """What the transform computes: t (..., K) float32 -> (..., K) float32."""
    for d in rotation.strides:
        pairs = t.reshape(*t.shape[:-1], t.shape[-1] // (2 * d), 2, d)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        t = np.stack([a + b, a - b], axis=-2).reshape(t.shape)
    return t
