"""int8 keys and values: codes and scales to the bit, and attention that equals the float32 kernel on what the codes stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm

import khtst_compile.ops  # noqa: F401
from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import AVX2, AVX512VNNI
from khtst_compile.targets.kernels import attention, quantize_cache
from khtst_compile.targets.kernels.attention import Attention, Mask, Operand
from khtst_compile.targets.kernels.quantize_cache import QuantizeCache


def build(spec: Any, function: Any, isa: Any = AVX2) -> Any:
    return tvm.tirx.build(tvm.IRModule({spec.name: function}), target=tvm.target.Target(isa.tvm_target()))[spec.name]


def run(kernel: Any, arrays: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray]:
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (*arrays, *results)]
    kernel(*tensors)
    return [t.numpy() for t in tensors[len(arrays) :]]


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 20), (1, 33), (2, 8)])
def test_codes_are_those_of_the_operator(heads: int, dim: int) -> None:
    width = heads * dim
    spec = QuantizeCache(Operand(3 * width, width), Operand(3 * width, 2 * width), heads, dim)
    kernel = build(spec, quantize_cache.prim_func(spec))
    for batch, seq in ((1, 1), (2, 7), (3, 33), (9, 1), (1, 0)):
        x = np.random.default_rng(seq).standard_normal((batch, seq, 3 * width)).astype(np.float32)
        if seq > 3:
            x[0, 0, width : width + dim] = 0  # a head of zeros
            x[0, 1, width] = np.nan
            x[0, 2, 2 * width] = np.inf
            x[0, 3] *= 1e-38
        empty = [np.full((seq, batch, width), 99, np.int8) for _ in range(2)]
        got = run(kernel, [x, x], [*empty, np.zeros((seq, batch, 2 * heads), np.float32)])
        tensor = torch.from_numpy(x)
        want = torch.ops.khtst.quantize_cache(tensor, tensor, heads, dim, [width, 2 * width])
        for a, b, c in zip(got, want, quantize_cache.reference(spec, x, x), strict=True):
            np.testing.assert_array_equal(a, b.numpy())
            np.testing.assert_array_equal(a, c)


CASES = {
    "grouped": (6, 2, 64, None),
    "odd": (3, 1, 20, Mask("float32", True, False, True)),
    "narrow": (2, 2, 33, None),
}
SIZES = ((1, 0, 1), (2, 30, 7), (1, 259, 1), (2, 250, 20))


def codes(heads: int, groups: int, dim: int, mask: Mask | None = None) -> Attention:
    row, kept = heads * dim + 3, Operand(groups * dim)
    return Attention(AVX2, heads, dim, dim**-0.5, Operand(row, 3), kept, kept, groups, mask, causal=True, cached=True, codes=True)


def inputs(spec: Attention, batch: int, past: int, new: int) -> list[np.ndarray]:
    """q; k, v and scales of the new positions; the same of earlier ones; the mask, if any."""
    rng = np.random.default_rng(past)
    width = spec.groups * spec.head_dim

    def kept(length: int) -> list[np.ndarray]:
        made = [rng.integers(-127, 128, (length, batch, width)).astype(np.int8) for _ in range(2)]
        return [*made, (rng.random((length, batch, 2 * spec.groups)) / 40).astype(np.float32)]

    given = [rng.standard_normal((batch, new, spec.q.row)).astype(np.float32), *kept(new), *kept(past)]
    if spec.mask is None:
        return given
    hidden = rng.random((batch, 1, new, past + new)) < 0.3
    return [*given, np.where(hidden, -np.inf, rng.standard_normal(hidden.shape)).astype(np.float32)]


def as_floats(spec: Attention, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The arguments of the kernel without codes."""

    def wide(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        heads = codes.astype(np.float32).reshape(*codes.shape[:2], spec.groups, spec.head_dim) * scales[..., None]
        return heads.reshape(codes.shape)

    q, k, v, scales, past_k, past_v, past_scales, *mask = arrays
    new = [wide(c, s).swapaxes(0, 1) for c, s in zip((k, v), np.split(scales, 2, -1), strict=True)]
    return [q, *new, *(wide(c, s) for c, s in zip((past_k, past_v), np.split(past_scales, 2, -1), strict=True)), *mask]


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_float32_attention(name: str) -> None:
    spec = codes(*CASES[name])
    plain = replace(spec, codes=False)
    kernel, floats = build(spec, attention.prim_func(spec)), build(plain, attention.prim_func(plain))
    for sizes in SIZES:
        arrays = inputs(spec, *sizes)
        empty = [np.full((sizes[0], sizes[2], spec.heads * spec.head_dim), np.nan, np.float32)]
        np.testing.assert_array_equal(*run(kernel, arrays, empty), *run(floats, as_floats(spec, arrays), empty))


def test_against_the_operator_in_float64_and_on_another_instruction_set() -> None:
    """Absolute error 3e-6 on values of about 1, as in test_attention_cached.py."""
    spec = codes(4, 2, 64)
    arrays = inputs(spec, 2, 270, 5)
    empty = [np.zeros((2, 5, 256), np.float32)]
    (got,) = run(build(spec, attention.prim_func(spec)), arrays, empty)
    q, k, v, past_k, past_v = (torch.from_numpy(a).double() for a in as_floats(spec, arrays))
    want = torch.ops.khtst.attention_cached(q, k, v, past_k, past_v, None, 4, 2, 64, spec.scale, [3, 0, 0])
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=3e-6)
    operator = torch.ops.khtst.attention_int8(*(torch.from_numpy(a) for a in arrays), 4, 2, 64, spec.scale, [3])
    np.testing.assert_allclose(got, operator.numpy(), rtol=0, atol=3e-6)
    other = replace(spec, isa=AVX512VNNI.emulate())
    (same,) = run(build(other, attention.prim_func(other), other.isa), arrays, empty)
    np.testing.assert_array_equal(same, got)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LoweringError, match="codes without a cache"):
        replace(codes(2, 1, 8), cached=False)
    with pytest.raises(LoweringError, match="v needs 16 columns from 1 on"):
        QuantizeCache(Operand(16), Operand(16, 1), 2, 8)
