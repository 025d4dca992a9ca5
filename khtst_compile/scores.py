"""Bounds that torch and the kernels of codebooks share; needs no torch."""

from __future__ import annotations

LANES = 16
"""Partial sums of a score: part of its meaning."""
LARGEST = 1e18
"""Largest magnitude of a row's elements, and of a codebook's: products of two and their sums are finite."""


def score_error(features: int) -> float:
    """Largest |exact_scores - the real number| in units of |z| |c|, before the bias is added.

    A sum of n terms in float32 is off by n u of the sum of their sizes at most (Higham, Accuracy and Stability, 4.2), which by
    Cauchy-Schwarz is below |z| |c|; u = 2**-24, and one rounding more for each product. A quarter more pays for u squared.
    """
    return 1.25 * (-(-features // LANES) + 5) * 2.0**-24
