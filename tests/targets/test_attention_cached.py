"""Attention with a cache of earlier keys and values: against torch, and step by step against the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm

import khtst_compile.ops  # noqa: F401
from khtst_compile.targets.isa import AVX2, AVX512VNNI
from khtst_compile.targets.kernels import attention
from khtst_compile.targets.kernels.attention import Attention, Mask, Operand

SIZES = ((1, 0, 1), (2, 0, 9), (1, 1, 1), (2, 30, 7), (1, 259, 1), (2, 250, 20))
"""(batch, cached, new): an empty cache, a cache that ends within a panel, one that ends within 20 keys of a block of 256."""


def cached(heads: int, groups: int, dim: int, mask: Mask | None = None) -> Attention:
    """Q, K and V side by side in one tensor, as a fused projection writes them."""
    row = (heads + 2 * groups) * dim
    places = (Operand(row), Operand(row, heads * dim), Operand(row, (heads + groups) * dim))
    return Attention(AVX2, heads, dim, dim**-0.5, *places, kv_heads=groups, mask=mask, causal=True, cached=True)


CASES = {
    "plain": cached(2, 2, 64),
    "grouped": cached(6, 2, 64, Mask(batch=True)),
    "odd": cached(3, 1, 20, Mask("float32", True, False, True)),
    "heads-masked": cached(4, 2, 33, Mask("float32", False, True, False)),
    "wide": cached(1, 1, 256, Mask("bool", False, False, True)),
}


def build(spec: Attention) -> Any:
    module = tvm.IRModule({spec.name: attention.prim_func(spec)})
    return tvm.tirx.build(module, target=tvm.target.Target(spec.isa.tvm_target()))[spec.name]


def inputs(spec: Attention, batch: int, past: int, new: int) -> list[np.ndarray]:
    """q, k and v (one tensor thrice), past_k, past_v and the mask, if any."""
    rng = np.random.default_rng(past)
    x = rng.standard_normal((batch, new, spec.q.row)).astype(np.float32)
    cache = [rng.standard_normal((past, batch, spec.groups * spec.head_dim)).astype(np.float32) for _ in range(2)]
    if spec.mask is None:
        return [x, x, x, *cache]
    m = spec.mask
    shape = (batch if m.batch else 1, spec.heads if m.head else 1, new if m.query else 1, past + new)
    seen = rng.random(shape) > 0.3
    if m.dtype == "float32":
        return [x, x, x, *cache, np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)]
    return [x, x, x, *cache, seen]


def run(kernel: Any, spec: Attention, arrays: list[np.ndarray]) -> np.ndarray:
    out = tvm.runtime.tensor(np.full((*arrays[0].shape[:2], spec.heads * spec.head_dim), np.nan, np.float32))
    kernel(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays), out)
    return out.numpy()


def expected(spec: Attention, arrays: list[np.ndarray]) -> np.ndarray:
    """The operator in float64."""
    tensors = [torch.from_numpy(a) if a.dtype == np.bool_ else torch.from_numpy(a).double() for a in arrays]
    mask = tensors[5] if spec.mask is not None else None
    offsets = [spec.q.offset, spec.k.offset, spec.v.offset]
    return torch.ops.khtst.attention_cached(
        *tensors[:5], mask, spec.heads, spec.groups, spec.head_dim, spec.scale, offsets
    ).numpy()


@pytest.mark.parametrize("name", CASES)
def test_against_the_operator_in_float64(name: str) -> None:
    """Absolute error 3e-6 on standard normal data, for the reasons in test_attention.py."""
    spec = CASES[name]
    kernel = build(spec)
    for sizes in SIZES:
        arrays = inputs(spec, *sizes)
        got = run(kernel, spec, arrays)
        np.testing.assert_allclose(got, expected(spec, arrays), rtol=0, atol=3e-6)


def test_bits_are_those_of_the_written_order() -> None:
    spec = cached(2, 1, 20, Mask("float32", True, False, True))
    arrays = inputs(spec, 1, 530, 5)
    past_k, past_v, mask = arrays[3:]
    got = run(build(spec), spec, arrays)
    np.testing.assert_array_equal(got, attention.reference(spec, *arrays[:3], mask, past_k, past_v))


@pytest.mark.parametrize("heads,groups,dim,length", [(2, 1, 64, 300), (2, 2, 20, 45)])
def test_step_by_step_gives_the_bits_of_the_whole(heads: int, groups: int, dim: int, length: int) -> None:
    """In one call, in two, with one key a call from some position on, and by the kernel without a cache; on AVX512's tiles too."""
    spec = cached(heads, groups, dim)
    kernel = build(spec)
    x = np.random.default_rng(1).standard_normal((2, length, spec.q.row)).astype(np.float32)
    k, v = (np.ascontiguousarray(x[..., o.offset : o.offset + groups * dim].swapaxes(0, 1)) for o in (spec.k, spec.v))

    def part(first: int, end: int) -> np.ndarray:
        new = x[:, first:end]
        return run(kernel, spec, [new, new, new, k[:first], v[:first]])

    whole = part(0, length)
    np.testing.assert_array_equal(np.concatenate([part(0, 23), part(23, length)], 1), whole)
    for i in range(length - 20, length):
        np.testing.assert_array_equal(part(i, i + 1), whole[:, i : i + 1])
    alone = replace(spec, cached=False)
    np.testing.assert_array_equal(run(build(alone), alone, [x, x, x]), whole)
    other = replace(spec, isa=AVX512VNNI.emulate())
    np.testing.assert_array_equal(run(build(other), other, [x, x, x, k[:0], v[:0]]), whole)
