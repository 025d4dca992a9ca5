"""Bounds that torch and the kernels of codebooks share; needs no torch."""

from __future__ import annotations

LANES = 16
"""Partial sums of a score: part of its meaning."""
LARGEST = 1e18
"""Largest magnitude of a row's elements."""
LARGEST_CODE = 1e15
"""Largest magnitude of a codebook's entries: sums of 300,000 products with a row's are finite."""
TINY = 2.0**-150
"""What a product below the normal floats can be off by, whatever its size."""


def score_error(features: int) -> float:
    """Largest |exact_scores - the real number| in units of |z| |c|, before the bias is added; each product is off by TINY besides.

    A sum of n terms in float32 is off by n u of the sum of their sizes at most (Higham, Accuracy and Stability, 4.2), which by
    Cauchy-Schwarz is below |z| |c|; u = 2**-24, and one rounding more for each product. A quarter more pays for u squared.
    """
    return 1.25 * (-(-features // LANES) + 5) * 2.0**-24
