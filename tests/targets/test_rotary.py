"""Rotary embedding of heads side by side, with and without a norm per head: the bits of numpy, close to the operator in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm

from khtst_compile.errors import LoweringError
from khtst_compile.ops.rotary import rotary_reference
from khtst_compile.targets.isa import AVX2, X86_ISAS, Isa
from khtst_compile.targets.kernels import rotary
from khtst_compile.targets.kernels.rotary import Rotary
from khtst_compile.targets.kernels.rows import PARALLEL_ELEMENTS


def run(spec: Rotary, isa: Isa, *arrays: np.ndarray) -> np.ndarray:
    library = tvm.tirx.build(tvm.IRModule({spec.name: rotary.prim_func(spec)}), target=tvm.target.Target(isa.tvm_target()))
    out = tvm.runtime.tensor(np.full((*arrays[0].shape[:2], spec.heads * spec.head_dim), 85, np.float32))
    library[spec.name](*(tvm.runtime.tensor(a) for a in arrays), out)
    return out.numpy()


def check(spec: Rotary, batch: int, length: int, isa: Isa = AVX2) -> None:
    rng = np.random.default_rng(spec.head_dim)
    x = rng.standard_normal((batch, length, spec.columns)).astype(np.float32)
    angles = rng.uniform(-20, 20, (1 if spec.per_length else batch, length, spec.head_dim))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    gamma = rng.uniform(0.3, 2, spec.head_dim).astype(np.float32) if spec.norm else None
    given = [x, cos, sin] + ([gamma] if gamma is not None else [])
    got = run(spec, isa, *given)
    np.testing.assert_array_equal(got, rotary.reference(spec, x, cos, sin, gamma))
    tensors = [None if a is None else torch.from_numpy(a) for a in (x, cos, sin, gamma)]
    want = rotary_reference(*tensors, spec.eps, spec.heads, spec.head_dim, [spec.offset]).numpy()
    # Two products and a sum of numbers of about 1, each rounded; the norm's sum of squares in another order: a few ulp of the row.
    bound = 8 * 2.0**-23 * np.abs(want).max(initial=1)
    assert np.abs(got - want).max(initial=0) <= bound


@pytest.mark.parametrize("head_dim", [2, 14, 16, 18, 62, 64, 128])
@pytest.mark.parametrize("norm", [False, True], ids=["bare", "norm"])
def test_bits(head_dim: int, norm: bool) -> None:
    spec = Rotary(3 * head_dim + 5, 2, head_dim, offset=3, norm=norm, eps=1e-6 if norm else 0.0)
    for batch, length in ((1, 1), (2, 7), (3, 33), (0, 5)):
        check(spec, batch, length)


def test_angles_of_each_text_and_rows_in_parallel() -> None:
    check(Rotary(64, 2, 32, per_length=False), 3, 9)
    check(Rotary(96, 2, 32, offset=32, norm=True, eps=1e-5), 2, PARALLEL_ELEMENTS // 64 + 5)


@pytest.mark.emulated
@pytest.mark.parametrize("isa", [i for i in X86_ISAS if i is not AVX2], ids=lambda i: i.name)
def test_every_instruction_set_gives_the_same_bits(isa: Isa) -> None:
    check(Rotary(50, 1, 48, offset=1, norm=True, eps=1e-6), 2, 5, isa.emulate())


@pytest.mark.parametrize("make", [lambda: Rotary(64, 2, 31), lambda: Rotary(64, 3, 32), lambda: Rotary(64, 2, 32, offset=1)])
def test_refusals(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LoweringError):
        make()
