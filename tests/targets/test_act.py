"""Activation polynomials: error against float64, and the same bits from the kernel and from numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import AVX2
from khtst_compile.targets.kernels.act import ACTIVATIONS, activation
from khtst_compile.targets.kernels.vec import span, store

F64 = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "none": lambda x: x,
}
# (what the error is divided by, bound): the figures of act.py's docstring, each a little above what was measured.
BOUNDS = {
    "exp": ("value", 2.0e-7),
    "sigmoid": ("one", 1.5e-7),
    "tanh": ("value", 4e-7),
    "gelu": ("one", 1.8e-6),
    "gelu_tanh": ("x", 1e-6),
    "silu": ("x", 4e-7),
    "relu": ("one", 0.0),
    "none": ("one", 0.0),
}


def _inputs() -> np.ndarray:
    rng = np.random.default_rng(0)
    dense = np.linspace(-12, 12, 1 << 17)
    wide = rng.uniform(-86, 88, 1 << 14)
    tiny = rng.standard_normal(1 << 12) * 10.0 ** rng.uniform(-30, 0, 1 << 12)
    return np.concatenate([dense, wide, tiny, [0.0, -0.0, 5.4, -5.4, 100.0, -100.0]]).astype(np.float32)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_error_against_float64(name: str) -> None:
    x = _inputs()
    if name == "exp":
        x = x[np.abs(x) < 86]
    got = ACTIVATIONS[name].reference(x).astype(np.float64)
    want = F64[name](torch.from_numpy(x).double()).numpy()
    kind, bound = BOUNDS[name]
    scale = {"value": np.abs(want), "one": np.ones_like(want), "x": np.abs(x.astype(np.float64))}[kind]
    error = np.abs(got - want)[scale > 0] / scale[scale > 0]
    assert error.max() <= bound


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("lanes", [8, 16])
def test_kernel_and_numpy_agree_to_the_bit(name: str, lanes: int) -> None:
    x = np.concatenate([_inputs(), np.float32([np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-40])])
    x = np.concatenate([x, np.zeros(-len(x) % lanes, np.float32)])
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("f")
        T.func_attr({"global_symbol": "f", "tirx.noalias": True})
        source = T.arg("X", T.buffer((len(x),), "float32"))
        target = T.arg("Y", T.buffer((len(x),), "float32"))
        with T.serial(0, len(x) // lanes) as i:
            # The added zero would be fused with a product that ends the activation, were it not rounded first.
            value = ACTIVATIONS[name].emit(T.Bind(source[span(i * lanes, lanes)]))
            store(target, value, i * lanes)
    library = tvm.tirx.build(tvm.IRModule({"f": builder.get()}), target=tvm.target.Target(AVX2.tvm_target()))
    out = tvm.runtime.tensor(np.zeros_like(x))
    library["f"](tvm.runtime.tensor(x), out)
    want = ACTIVATIONS[name].reference(x)
    got = out.numpy()
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    assert (got.view(np.int32)[~nan] == want.view(np.int32)[~nan]).all()


def test_special_values() -> None:
    x = np.float32([np.nan, np.inf, -np.inf])
    for name, function in ACTIVATIONS.items():
        assert np.isnan(function.reference(x)[0]), name
    assert ACTIVATIONS["exp"].reference(x)[1] == np.inf
    assert ACTIVATIONS["exp"].reference(x)[2] == 0
    assert ACTIVATIONS["gelu"].reference(x)[1] == np.inf
    assert abs(ACTIVATIONS["gelu"].reference(x)[2]) < 2e-6


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(LoweringError, match="swish"):
        activation("swish")
