"""The order that sorts a row: that of numpy and of torch, at awkward lengths, with equal elements and NaN."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import tvm

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import AVX2
from khtst_compile.targets.kernels import argsort
from khtst_compile.targets.kernels.argsort import DTYPES, Argsort
from khtst_compile.targets.kernels.rows import PARALLEL_ELEMENTS, Lead


@cache
def built(spec: Argsort) -> Any:
    return tvm.tirx.build(tvm.IRModule({spec.name: argsort.prim_func(spec)}), target=tvm.target.Target(AVX2.tvm_target()))


def run(spec: Argsort, x: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    out = tvm.runtime.tensor(np.full(x.shape, 85, np.int64))
    built(spec)[spec.name](tvm.runtime.tensor(x), out)
    found: npt.NDArray[np.int64] = out.numpy()
    return found


def check(spec: Argsort, x: npt.NDArray[np.generic]) -> None:
    got = run(spec, x)
    np.testing.assert_array_equal(got, argsort.reference(spec, x))
    want = torch.from_numpy(x).argsort(dim=-1, descending=spec.descending, stable=True)
    np.testing.assert_array_equal(got, want.numpy())


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_elements_keep_their_order(dtype: str, descending: bool) -> None:
    spec, rng = Argsort(dtype, descending), np.random.default_rng(0)
    for rows, length in ((1, 1), (2, 2), (3, 7), (1, 8), (2, 9), (5, 31), (4, 33), (1, 1000), (0, 5), (3, 0)):
        check(spec, rng.integers(0, 5, (rows, length)).astype(dtype))


@pytest.mark.parametrize("descending", [False, True])
def test_nan_is_the_largest_and_zeros_are_equal(descending: bool) -> None:
    rng = np.random.default_rng(1)
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1e-40], np.float32)
    check(Argsort(descending=descending), rng.choice(values, (9, 65)))


def test_rows_in_parallel_of_fixed_length_under_two_axes() -> None:
    x = np.random.default_rng(2).standard_normal((3, 2, PARALLEL_ELEMENTS // 4)).astype(np.float32)
    check(Argsort(lead=Lead(2), length=x.shape[-1]), x)
    check(Argsort(lead=Lead(2), length=x.shape[-1], parallel=False), x)


def test_refusal() -> None:
    with pytest.raises(LoweringError, match="bfloat16"):
        Argsort("bfloat16")
