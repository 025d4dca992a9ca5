"""The polar factor: equal to the one of an SVD, however badly conditioned the matrix, with the gradients of the exact one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from khtst_compile.zoo.polar import delta_ort, polar

SHAPES = [(1, 1), (1, 7), (7, 1), (8, 8), (5, 9), (9, 5), (31, 64), (64, 33)]


def conditioned(shape: tuple[int, int], condition: float, size: float = 1.0, seed: int = 0) -> Tensor:
    """float64 with singular values from `size` down to size / condition, in a geometric row."""
    torch.manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    return (u * torch.logspace(0, -1, u.shape[1], condition, dtype=torch.float64) * size) @ vh


def by_svd(w: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    return u @ vh


def off(factor: Callable[[Tensor], Tensor], w: Tensor) -> float:
    """Largest |entry| of the difference from the SVD's."""
    return float((factor(w) - by_svd(w)).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("condition", [1.0001, 1e3, 1e6])
def test_equals_the_svd(shape: tuple[int, int], condition: float) -> None:
    w = conditioned(shape, condition)
    # Both err by float64's unit times the condition (Higham, Functions of Matrices, theorem 8.9), over up to 64 terms.
    assert off(polar, w) < 64 * 2.0**-52 * condition
    assert delta_ort(polar(w)) < 1e-13


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_size_does_not_matter(size: float) -> None:
    w = conditioned((5, 9), 10.0)
    assert torch.allclose(polar((w * size).float()), by_svd(w).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_stays_orthonormal_where_it_is_badly_conditioned(shape: tuple[int, int]) -> None:
    # Each Gram entry is a sum of up to 64 products of float32, rounded 64 * 2**-24 off at most.
    assert delta_ort(polar(conditioned(shape, 1e5).float())) < 64 * 2.0**-24


def test_too_few_iterations_are_noticed() -> None:
    assert off(lambda w: polar(w, 12), conditioned((8, 8), 1e6)) > 0.1


def test_gradients_in_float64() -> None:
    for shape in ((3, 5), (5, 3), (4, 4)):
        w = conditioned(shape, 20.0).requires_grad_()
        assert torch.autograd.gradcheck(polar, w)
        down = torch.randn(shape, dtype=torch.float64)
        (ours,) = torch.autograd.grad((polar(w) * down).sum(), w)
        (exact,) = torch.autograd.grad((by_svd(w) * down).sum(), w)
        assert torch.allclose(ours, exact, rtol=0, atol=1e-10)
