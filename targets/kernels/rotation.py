"""The blockwise Walsh-Hadamard transform that the quantizers run on a row before they take its maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels.rows import Source
from khtst_compile.targets.kernels.vec import Expr, Floats, fma, keep, shuffle, span, store

HALF = 8
"""Lanes the transform handles at once."""


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


def emit_rotation(rotation: Rotation, source: Source, t: Expr, at: Expr, width: int, visit: Callable[[Expr], None]) -> None:
    """Transform a row blockwise into t[at + offset], and call `visit(values)` with every 8 finished values.

    Eight lanes at a time: a block of 128 is then 8 registers of AVX2 for the far stages and for distances 1, 2, 4. Distance 8
    pairs the halves, which the second one does as it finishes. Lanes are independent in every stage, so the width used does not
    show in the bits.
    """
    vectors = rotation.block // 16

    def mixed(base: Expr) -> list[Expr]:
        v = [T.Bind(source(base + 16 * k, HALF, HALF)) for k in range(vectors)]
        for d in (1, 2, 4):
            if d < vectors:
                v = _far_stage(v, d)
        v = [keep(x) for x in v]
        return [_near_stages(x) for x in v] if rotation.full else v

    with T.serial(T.int64(0), T.int64(width // rotation.block)) as b:
        base = T.Bind(b * rotation.block)
        if not rotation.full:
            with T.serial(T.int64(0), T.int64(2)) as second:
                half = T.Bind(base + second * HALF)
                for k, value in enumerate(mixed(half)):
                    store(t, value, at + half + 16 * k)
                    visit(value)
        else:
            for k, value in enumerate(mixed(base)):
                store(t, value, at + base + 16 * k)
            for k, high in enumerate(mixed(base + HALF)):
                place = at + base + 16 * k
                low = T.Bind(t[span(place, HALF)])
                for offset, value in ((0, T.Bind(low + high)), (HALF, T.Bind(low - high))):
                    store(t, value, place + offset)
                    visit(value)


def _far_stage(values: list[Expr], distance: int) -> list[Expr]:
    out = list(values)
    for i, x in enumerate(values):
        if not i & distance:
            y = values[i | distance]
            out[i], out[i | distance] = T.Bind(x + y), T.Bind(x - y)
    return out


def _near_stages(value: Expr) -> Expr:
    """Distances 1, 2, 4 inside a vector: +-value + neighbor, one fma whose product is exact."""
    for d in (1, 2, 4):
        signs = [tirx.FloatImm("float32", -1.0 if i & d else 1.0) for i in range(HALF)]
        sign = tirx.Shuffle(signs, [tirx.IntImm("int32", i) for i in range(HALF)])
        value = T.Bind(fma(value, sign, shuffle(value, [i ^ d for i in range(HALF)])))
    return keep(value)


def rotation_reference(t: Floats, rotation: Rotation) -> Floats:
    """What the transform computes: t (..., K) float32 -> (..., K) float32."""
    for d in rotation.strides:
        pairs = t.reshape(*t.shape[:-1], t.shape[-1] // (2 * d), 2, d)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        t = np.stack([a + b, a - b], axis=-2).reshape(t.shape)
    return t
