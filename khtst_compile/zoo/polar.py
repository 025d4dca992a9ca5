"""The orthonormal factor of a matrix, as the codebooks here are trained with: the compiler's own (`quant.stiefel`)."""

from khtst_compile.quant.stiefel import ITERATIONS, delta_ort, polar

__all__ = ["ITERATIONS", "delta_ort", "polar"]
