"""How each instruction set sums products of int8: the table of all ways."""

from __future__ import annotations

from khtst_compile.targets.isa import Isa

from . import dot_arm, dot_x86
from .dot_base import Codes, Dot, Sums

__all__ = ["Codes", "Dot", "Sums", "dot_of"]

_DOTS: dict[tuple[str, int], Dot] = {**dot_x86.DOTS, **dot_arm.DOTS}


def dot_of(isa: Isa) -> Dot:
    """How an instruction set sums products."""
    return _DOTS[isa.dot, isa.vector_bits]
