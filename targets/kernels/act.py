"""Activation functions as polynomials of explicit fused multiply-adds, with the numpy form that gives the same bits.

Each function takes and returns a float32 vector expression of any lane count. NaN stays NaN. Divisions are the
correctly rounded ones; nothing here depends on the instruction set. Errors below are measured against float64 in
tests/targets/test_act.py.

    exp         relative error <= 2e-7; 0 below -86.6, +inf above 88.72
    sigmoid     absolute error <= 1.5e-7
    tanh        relative error <= 4e-7
    gelu        absolute error <= 1.8e-6 for every x (the erf form)
    gelu_tanh   relative error <= 1e-6 of |x|
    silu        relative error <= 4e-7 of |x|
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError

from .vec import (
    Expr,
    Floats,
    absolute,
    at_least,
    at_most,
    bits,
    f32,
    fma,
    fma_reference,
    from_bits,
    horner,
    horner_reference,
    i32,
    lanes_of,
    mul,
)

LOG2_E = 1.4426950408889634
# ln 2 split so that n * _LN2_HIGH is exact for |n| < 2^8 (Cody and Waite, "Software Manual for the Elementary
# Functions").
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
# Adding 1.5 * 2^23 rounds to an integer that sits in the low mantissa bits; 126 more is the exponent bias of 2^(n-1).
_ROUND_BIASED = 12582912.0 + 126.0
_EXP_LOW = -86.6
_EXP_HIGH = 89.0
# 2 e^r on |r| <= ln(2)/2, minimax in relative error (7.5e-8).
_EXP_TWICE = (
    0.016595307737588882,
    0.08383090794086456,
    0.3333514928817749,
    0.9999778866767883,
    1.9999994039535522,
    2.000000238418579,
)
# Phi(-t) = P(t)^8 on 0 <= t <= 5.4, minimax in absolute error of t P^8 (1.5e-6, rounding included); t Phi(-t) is 2e-7 at 5.4.
# The eighth root decays so slowly that 5 powers of t do where the function itself needs 12; three squarings bring it back.
_GELU_END = 5.4
_GELU_ROOT = (
    -0.00019081307982560247,
    0.0019387039355933666,
    -0.0011058220406994224,
    -0.03172409534454346,
    -0.09148994833230972,
    0.917003333568573,
)
# tanh(x) = x A(x^2) / B(x^2) on |x| <= 7.9: the rational form of Eigen's ptanh (MPL-2.0 header; the numbers are data).
_TANH_END = 7.90531110763549805
_TANH_A = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_B = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_GELU_TANH_1 = 2 * 0.7978845608028654
_GELU_TANH_3 = 2 * 0.7978845608028654 * 0.044715


def exp(x: Expr) -> Expr:
    """e^x = 2^(n-1) * 2 e^(x - n ln 2), n the integer nearest to x / ln 2."""
    n = lanes_of(x)
    x = T.Bind(at_most(at_least(x, f32(-88.0, n)), f32(_EXP_HIGH, n)))
    shifted = T.Bind(fma(x, f32(LOG2_E, n), f32(_ROUND_BIASED, n)))
    whole = T.Bind(shifted - f32(_ROUND_BIASED, n))
    r = T.Bind(fma(whole, f32(-_LN2_LOW, n), T.Bind(fma(whole, f32(-_LN2_HIGH, n), x))))
    power = from_bits(T.shift_left(bits(shifted), i32(23, n)))
    # An exact scaling: the product is rounded only where it overflows to infinity.
    value = T.Bind(horner(_EXP_TWICE, r) * power)
    return T.Bind(T.Select(x < f32(_EXP_LOW, n), f32(0.0, n), value))


def exp_reference(x: Floats) -> Floats:
    """What `exp` computes: x (...,) float32 -> (...,) float32."""
    with np.errstate(all="ignore"):
        x = _at_most(_at_least(np.asarray(x, np.float32), -88.0), _EXP_HIGH)
        biased = np.float32(_ROUND_BIASED)
        shifted = fma_reference(x, LOG2_E, biased)
        whole = shifted - biased
        r = fma_reference(whole, -_LN2_LOW, fma_reference(whole, -_LN2_HIGH, x))
        power = (shifted.view(np.int32) << 23).view(np.float32)
        value: Floats = horner_reference(_EXP_TWICE, r) * power
        return np.where(x < np.float32(_EXP_LOW), np.float32(0), value)


def _at_most(x: Floats, limit: float) -> Floats:
    return np.where(np.float32(limit) < x, np.float32(limit), x)


def _at_least(x: Floats, limit: float) -> Floats:
    return np.where(np.float32(limit) > x, np.float32(limit), x)


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return at_least(x, f32(0.0, lanes_of(x)))


def relu_reference(x: Floats) -> Floats:
    """What `relu` computes."""
    return _at_least(x, 0.0)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x)."""
    one = f32(1.0, lanes_of(x))
    return T.Bind(one / (one + exp(_negated(x))))


def _negated(x: Expr) -> Expr:
    return f32(-0.0, lanes_of(x)) - x


def sigmoid_reference(x: Floats) -> Floats:
    """What `sigmoid` computes."""
    one = np.float32(1)
    result: Floats = one / (one + exp_reference(-x))
    return result


def silu(x: Expr) -> Expr:
    """x / (1 + e^-x)."""
    return T.Bind(x / (f32(1.0, lanes_of(x)) + exp(_negated(x))))


def silu_reference(x: Floats) -> Floats:
    """What `silu` computes."""
    with np.errstate(invalid="ignore"):
        result: Floats = x / (np.float32(1) + exp_reference(-x))
    return result


def tanh(x: Expr) -> Expr:
    """x A(x^2) / B(x^2), x clamped to where the result is 1 to the last bit."""
    n = lanes_of(x)
    x = T.Bind(at_most(at_least(x, f32(-_TANH_END, n)), f32(_TANH_END, n)))
    square = T.Bind(x * x)
    return T.Bind(mul(x, horner(_TANH_A, square)) / horner(_TANH_B, square))


def tanh_reference(x: Floats) -> Floats:
    """What `tanh` computes."""
    x = _at_most(_at_least(x, -_TANH_END), _TANH_END)
    square = x * x
    result: Floats = (x * horner_reference(_TANH_A, square)) / horner_reference(_TANH_B, square)
    return result


def gelu(x: Expr) -> Expr:
    """x Phi(x) = max(x, 0) - t Phi(-t), t = |x|; t stops at 5.4, so the correction stays small for every x."""
    n = lanes_of(x)
    t = T.Bind(at_most(absolute(x), f32(_GELU_END, n)))
    tail = horner(_GELU_ROOT, t)
    for _ in range(3):
        tail = T.Bind(tail * tail)
    # The larger of two signed integers: of a float's bits and 0 it is max(x, 0) in one instruction, and t keeps a NaN.
    positive = T.Bind(from_bits(T.max(bits(x), i32(0, n))))
    return T.Bind(fma(_negated(t), tail, positive))


def gelu_reference(x: Floats) -> Floats:
    """What `gelu` computes."""
    t = _at_most(np.abs(x), _GELU_END)
    tail = horner_reference(_GELU_ROOT, t)
    for _ in range(3):
        tail = tail * tail
    positive = np.maximum(np.ascontiguousarray(x, np.float32).view(np.int32), 0).view(np.float32)
    return fma_reference(-t, tail, positive)


def gelu_tanh(x: Expr) -> Expr:
    """x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of GELU."""
    n = lanes_of(x)
    factor = T.Bind(fma(T.Bind(x * x), f32(-_GELU_TANH_3, n), f32(-_GELU_TANH_1, n)))
    return T.Bind(x / (f32(1.0, n) + exp(T.Bind(x * factor))))


def gelu_tanh_reference(x: Floats) -> Floats:
    """What `gelu_tanh` computes."""
    with np.errstate(all="ignore"):
        factor = fma_reference(x * x, -_GELU_TANH_3, -_GELU_TANH_1)
        result: Floats = x / (np.float32(1) + exp_reference(x * factor))
    return result


@dataclass(frozen=True)
class Activation:
    """An elementwise function: `emit` on a vector expression, `reference` on numpy float32 (the same bits)."""

    name: str
    emit: Callable[[Expr], Expr]
    reference: Callable[[Floats], Floats]


def _identity(x: Expr) -> Expr:
    return x


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("none", _identity, _identity),
        Activation("relu", relu, relu_reference),
        Activation("gelu", gelu, gelu_reference),
        Activation("gelu_tanh", gelu_tanh, gelu_tanh_reference),
        Activation("silu", silu, silu_reference),
        Activation("sigmoid", sigmoid, sigmoid_reference),
        Activation("tanh", tanh, tanh_reference),
        Activation("exp", exp, exp_reference),
    )
}
"""The activations kernels can fuse, by name."""


def activation(name: str) -> Activation:
    """Look an activation up; LoweringError names the known ones."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        known = ", ".join(ACTIVATIONS)
        raise LoweringError(f"activation '{name}' has no kernel; use one of {known}") from None
