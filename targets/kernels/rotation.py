"""The blockwise Walsh-Hadamard transform that the quantizers run on a row before they take its maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels.rows import Source
from khtst_compile.targets.kernels.vec import Expr, Floats, fence, fma, keep, lanes_of, shuffle, span, store

MOST = 8
"""Most lanes the transform handles at once: a register of AVX2."""


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


def lanes_at_once(isa: Isa) -> int:
    """Lanes the transform handles at once on an instruction set: those of a register, so that a block of 128 is 8 registers; at most 8."""
    return min(isa.lanes, MOST)


def emit_rotation(
    isa: Isa, rotation: Rotation, source: Source, t: Expr, at: Expr, width: int, visit: Callable[[Expr], None]
) -> None:
    """Transform a row blockwise into t[at + offset], and call `visit` with all finished values, `lanes_at_once` at a time.

    Of each 16 consecutive features as many are handled at once, for the whole block: the far stages and distances within a register.
    What is farther apart pairs these parts, which each does with those before it as it finishes. Lanes are independent in every stage,
    so the width used does not show in the bits.
    """
    vectors, lanes = rotation.block // 16, lanes_at_once(isa)
    parts = 16 // lanes

    def mixed(base: Expr) -> list[Expr]:
        fence(isa)
        v = [T.Bind(source(base + 16 * k, lanes, lanes)) for k in range(vectors)]
        for d in (1, 2, 4):
            if d < vectors:
                v = _far_stage(v, d)
        v = [keep(x) for x in v]
        return [_near_stages(x) for x in v] if rotation.full else v

    with T.serial(T.int64(0), T.int64(width // rotation.block)) as b:
        base = T.Bind(b * rotation.block)
        if not rotation.full:
            with T.serial(T.int64(0), T.int64(parts)) as turn:
                begin = T.Bind(base + turn * lanes)
                for k, value in enumerate(mixed(begin)):
                    store(t, value, at + begin + 16 * k)
                    visit(value)
            return
        for number in range(parts):
            for k, value in enumerate(mixed(base + number * lanes)):
                place = at + base + 16 * k
                if number == parts - 1:
                    fence(isa)
                for part, found in _paired(number, value, lambda part: T.Bind(t[span(place + part * lanes, lanes)])).items():  # noqa: B023
                    store(t, found, place + part * lanes)
                    if number == parts - 1:
                        visit(found)


def _paired(number: int, value: Expr, stored: Callable[[int], Expr]) -> dict[int, Expr]:
    """Part `number` of 16 features and those before it that it completes, by number: stages at distances of 1, 2, .. parts.

    stored: a part before it, as it was left.
    """
    done, distance = {number: value}, 1
    while number & distance:
        pairs = [(part - distance, stored(part - distance), high) for part, high in done.items()]
        done = {low: T.Bind(a + b) for low, a, b in pairs} | {low + distance: T.Bind(a - b) for low, a, b in pairs}
        distance *= 2
    return done


def _far_stage(values: list[Expr], distance: int) -> list[Expr]:
    out = list(values)
    for i, x in enumerate(values):
        if not i & distance:
            y = values[i | distance]
            out[i], out[i | distance] = T.Bind(x + y), T.Bind(x - y)
    return out


def _near_stages(value: Expr) -> Expr:
    """Distances inside a vector: +-value + neighbor, one fma whose product is exact."""
    lanes = lanes_of(value)
    for d in (1, 2, 4):
        if d < lanes:
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
