"""What kernels compute, to the bit, in numpy: fused multiply-adds, sums in their written order, and functions as polynomials.

Constants and meanings only, so that operators and checks can be exact without a compiler; the same functions as vector code stand in
targets/kernels (vec.py, act.py, softmax.py). All arrays are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

LANES = 16
"""Lanes of a float vector in row kernels; part of the meaning of a sum, so the same on every target."""

LOG2_E = 1.4426950408889634
# ln 2 split so that n * LN2_HIGH is exact for |n| < 2^8 (Cody and Waite, "Software Manual for the Elementary
# Functions").
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
# Adding 1.5 * 2^23 rounds to an integer that sits in the low mantissa bits; 126 more is the exponent bias of 2^(n-1).
ROUND_BIASED = 12582912.0 + 126.0
EXP_LOW = -86.6
EXP_HIGH = 89.0
# 2 e^r on |r| <= ln(2)/2, minimax in relative error (7.5e-8).
EXP_TWICE = (
    0.016595307737588882,
    0.08383090794086456,
    0.3333514928817749,
    0.9999778866767883,
    1.9999994039535522,
    2.000000238418579,
)
# Phi(-t) = P(t)^8 on 0 <= t <= 5.4, minimax in absolute error of t P^8 (1.5e-6, rounding included); t Phi(-t) is 2e-7 at 5.4.
# The eighth root decays so slowly that 5 powers of t do where the function itself needs 12; three squarings bring it back.
GELU_END = 5.4
GELU_ROOT = (
    -0.00019081307982560247,
    0.0019387039355933666,
    -0.0011058220406994224,
    -0.03172409534454346,
    -0.09148994833230972,
    0.917003333568573,
)
# tanh(x) = x A(x^2) / B(x^2) on |x| <= 7.9: the rational form of Eigen's ptanh (MPL-2.0 header; the numbers are data).
TANH_END = 7.90531110763549805
TANH_A = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
TANH_B = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
GELU_TANH_1 = 2 * 0.7978845608028654
GELU_TANH_3 = 2 * 0.7978845608028654 * 0.044715

EXP2_LOWEST = -127.0
EXP2_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits.
# 2**r on |r| <= 1/2, the constant fixed to 1; minimax in relative error, 1.1e-7 with these float32 coefficients.
EXP2 = (
    0.001326472731307149,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)


def fma_reference(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """float32 fused multiply-add with exactly one rounding, any broadcastable shapes.

    The product of two float32 is exact in float64. The sum is rounded to odd in float64 and then to float32, which
    equals one rounding (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        addend = np.broadcast_to(np.asarray(c, np.float32).astype(np.float64), np.broadcast(product, c).shape)
        product = np.broadcast_to(product, addend.shape)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0) & even
        toward = np.where(error > 0, np.inf, -np.inf)
        total = np.where(inexact, np.nextafter(total, toward), total)
        return total.astype(np.float32)


def horner_reference(coefficients: Sequence[float], x: Floats) -> Floats:
    """What `horner` computes: x (...,) float32 -> (...,) float32."""
    first, *rest = (np.float32(c) for c in coefficients)
    return reduce(lambda p, c: fma_reference(p, x, c), rest, np.full_like(x, first))


def across_reference(value: Floats, op: Callable[[Floats, Floats], Floats]) -> Floats:
    """What `across` computes: value (..., 16) float32 -> (..., 16) float32."""
    lanes = value.shape[-1]
    distance = lanes // 2
    while distance:
        value = op(value, value[..., np.arange(lanes) ^ distance])
        distance //= 2
    return value


def exp_reference(x: Floats) -> Floats:
    """What `exp` computes: x (...,) float32 -> (...,) float32."""
    with np.errstate(all="ignore"):
        x = _at_most(_at_least(np.asarray(x, np.float32), -88.0), EXP_HIGH)
        biased = np.float32(ROUND_BIASED)
        shifted = fma_reference(x, LOG2_E, biased)
        whole = shifted - biased
        r = fma_reference(whole, -LN2_LOW, fma_reference(whole, -LN2_HIGH, x))
        power = (shifted.view(np.int32) << 23).view(np.float32)
        value: Floats = horner_reference(EXP_TWICE, r) * power
        return np.where(x < np.float32(EXP_LOW), np.float32(0), value)


def _at_most(x: Floats, limit: float) -> Floats:
    return np.where(np.float32(limit) < x, np.float32(limit), x)


def _at_least(x: Floats, limit: float) -> Floats:
    return np.where(np.float32(limit) > x, np.float32(limit), x)


def relu_reference(x: Floats) -> Floats:
    """What `relu` computes."""
    return _at_least(x, 0.0)


def sigmoid_reference(x: Floats) -> Floats:
    """What `sigmoid` computes."""
    one = np.float32(1)
    result: Floats = one / (one + exp_reference(-x))
    return result


def silu_reference(x: Floats) -> Floats:
    """What `silu` computes."""
    with np.errstate(invalid="ignore"):
        result: Floats = x / (np.float32(1) + exp_reference(-x))
    return result


def tanh_reference(x: Floats) -> Floats:
    """What `tanh` computes."""
    x = _at_most(_at_least(x, -TANH_END), TANH_END)
    square = x * x
    result: Floats = (x * horner_reference(TANH_A, square)) / horner_reference(TANH_B, square)
    return result


def gelu_reference(x: Floats) -> Floats:
    """What `gelu` computes."""
    t = _at_most(np.abs(x), GELU_END)
    tail = horner_reference(GELU_ROOT, t)
    for _ in range(3):
        tail = tail * tail
    positive = np.maximum(np.ascontiguousarray(x, np.float32).view(np.int32), 0).view(np.float32)
    return fma_reference(-t, tail, positive)


def gelu_tanh_reference(x: Floats) -> Floats:
    """What `gelu_tanh` computes."""
    with np.errstate(all="ignore"):
        factor = fma_reference(x * x, -GELU_TANH_3, -GELU_TANH_1)
        result: Floats = x / (np.float32(1) + exp_reference(x * factor))
    return result


def exp_nonpositive_reference(x: Floats) -> Floats:
    """What `exp_nonpositive` computes: x (...,) float32, <= 0."""
    with np.errstate(all="ignore"):
        return exp2_nonpositive_reference(x * np.float32(LOG2_E))


def exp2_nonpositive_reference(x: Floats) -> Floats:
    """What `exp2_nonpositive` computes: x (...,) float32, <= 0."""
    with np.errstate(all="ignore"):
        y = np.where(np.float32(EXP2_LOWEST) > x, np.float32(EXP2_LOWEST), x)
        shifted = y + np.float32(EXP2_ROUND)
        r = y - (shifted - np.float32(EXP2_ROUND))
        power = horner_reference(EXP2, r).astype(np.float32).view(np.int32) + (shifted.view(np.int32) << 23)
    return power.view(np.float32)


def sum_reference(values: Floats) -> Floats:
    """Sum over the last dimension in the kernels' order: values (..., n) float32, n a multiple of 16 -> (..., 1)."""
    total = np.zeros((*values.shape[:-1], LANES), np.float32)
    for i in range(0, values.shape[-1], LANES):
        total = total + values[..., i : i + LANES]
    return across_reference(total, np.add)[..., :1]


def padded(values: Floats, fill: float) -> Floats:
    """values (..., n) -> (..., n rounded up to 16), `fill` beyond."""
    extra = -values.shape[-1] % LANES
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, extra)], constant_values=fill)


REFERENCES: dict[str, Callable[[Floats], Floats]] = {
    "none": lambda x: x,
    "relu": relu_reference,
    "gelu": gelu_reference,
    "gelu_tanh": gelu_tanh_reference,
    "silu": silu_reference,
    "sigmoid": sigmoid_reference,
    "tanh": tanh_reference,
    "exp": exp_reference,
}
"""Activations by name."""
