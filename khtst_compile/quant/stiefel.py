"""Orthonormal matrices: the nearest one, and how far a matrix is from being one. Differentiable, and the same program on every device."""

from __future__ import annotations

import torch
from torch import Tensor

DELTA_ORT = 1e-6
"""Rounding to float32 moves entries of a unit row by 2**-25 at most, and a Gram entry by a few times that."""

ITERATIONS = 32
"""Singular values grow by 15/8 an iteration while they are small: 1e-7 of the largest reaches 1/2 in 25, and 5 more make it 1."""


def polar(w: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """w: (K, d) -> U Vᵀ of its singular value decomposition, (K, d): orthonormal rows for K <= d, orthonormal columns for K > d.

    Newton-Schulz of third order, X <- (15 I - 10 G + 3 G²) X / 8 with G = X Xᵀ on the smaller side (Kovarik 1970; Higham, Functions of
    Matrices, 8.3). It moves every singular value in (0, 1] up to 1 and never past it. Full rank is needed: a singular value below
    1e-7 of the largest is not there yet after ITERATIONS.
    """
    tall = w.shape[0] > w.shape[1]
    x: Tensor = w.T if tall else w
    identity = torch.eye(x.shape[0], dtype=x.dtype, device=x.device)
    # The largest singular value is at most the square root of the Gram matrix's Frobenius norm, and close to it; divided twice, as
    # the fourth powers of small weights would vanish.
    x = x / x.abs().amax().detach()
    x = x / torch.linalg.matrix_norm(x @ x.T).sqrt()
    for _ in range(iterations):
        gram = x @ x.T
        x = (15 * identity - 10 * gram + 3 * gram @ gram) @ x / 8
    return x.T if tall else x


def delta_ort(c: Tensor) -> float:
    """Largest |entry| of (Gram - I) on the smaller side of c: (K, d), computed in float64."""
    c = c.detach().double()
    c = c.T if c.shape[0] > c.shape[1] else c
    gram = c @ c.T
    return float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())
