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

from tvm.tirx.script import builder as T

from khtst_compile import exact
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
    from_bits,
    horner,
    i32,
    lanes_of,
    mul,
)


def exp(x: Expr) -> Expr:
    """e^x = 2^(n-1) * 2 e^(x - n ln 2), n the integer nearest to x / ln 2."""
    n = lanes_of(x)
    x = T.Bind(at_most(at_least(x, f32(-88.0, n)), f32(exact.EXP_HIGH, n)))
    shifted = T.Bind(fma(x, f32(exact.LOG2_E, n), f32(exact.ROUND_BIASED, n)))
    whole = T.Bind(shifted - f32(exact.ROUND_BIASED, n))
    r = T.Bind(fma(whole, f32(-exact.LN2_LOW, n), T.Bind(fma(whole, f32(-exact.LN2_HIGH, n), x))))
    power = from_bits(T.shift_left(bits(shifted), i32(23, n)))
    # An exact scaling: the product is rounded only where it overflows to infinity.
    value = T.Bind(horner(exact.EXP_TWICE, r) * power)
    return T.Bind(T.Select(x < f32(exact.EXP_LOW, n), f32(0.0, n), value))


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return at_least(x, f32(0.0, lanes_of(x)))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x)."""
    one = f32(1.0, lanes_of(x))
    return T.Bind(one / (one + exp(_negated(x))))


def _negated(x: Expr) -> Expr:
    return f32(-0.0, lanes_of(x)) - x


def silu(x: Expr) -> Expr:
    """x / (1 + e^-x)."""
    return T.Bind(x / (f32(1.0, lanes_of(x)) + exp(_negated(x))))


def tanh(x: Expr) -> Expr:
    """x A(x^2) / B(x^2), x clamped to where the result is 1 to the last bit."""
    n = lanes_of(x)
    x = T.Bind(at_most(at_least(x, f32(-exact.TANH_END, n)), f32(exact.TANH_END, n)))
    square = T.Bind(x * x)
    return T.Bind(mul(x, horner(exact.TANH_A, square)) / horner(exact.TANH_B, square))


def gelu(x: Expr) -> Expr:
    """x Phi(x) = max(x, 0) - t Phi(-t), t = |x|; t stops at 5.4, so the correction stays small for every x."""
    n = lanes_of(x)
    t = T.Bind(at_most(absolute(x), f32(exact.GELU_END, n)))
    tail = horner(exact.GELU_ROOT, t)
    for _ in range(3):
        tail = T.Bind(tail * tail)
    # The larger of two signed integers: of a float's bits and 0 it is max(x, 0) in one instruction, and t keeps a NaN.
    positive = T.Bind(from_bits(T.max(bits(x), i32(0, n))))
    return T.Bind(fma(_negated(t), tail, positive))


def gelu_tanh(x: Expr) -> Expr:
    """x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of GELU."""
    n = lanes_of(x)
    factor = T.Bind(fma(T.Bind(x * x), f32(-exact.GELU_TANH_3, n), f32(-exact.GELU_TANH_1, n)))
    return T.Bind(x / (f32(1.0, n) + exp(T.Bind(x * factor))))


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
        Activation("none", _identity, exact.REFERENCES["none"]),
        Activation("relu", relu, exact.REFERENCES["relu"]),
        Activation("gelu", gelu, exact.REFERENCES["gelu"]),
        Activation("gelu_tanh", gelu_tanh, exact.REFERENCES["gelu_tanh"]),
        Activation("silu", silu, exact.REFERENCES["silu"]),
        Activation("sigmoid", sigmoid, exact.REFERENCES["sigmoid"]),
        Activation("tanh", tanh, exact.REFERENCES["tanh"]),
        Activation("exp", exp, exact.REFERENCES["exp"]),
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
