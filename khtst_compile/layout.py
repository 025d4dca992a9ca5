"""How a stored matrix becomes what a kernel reads: padding, then a transposition of its blocks. Needs numpy alone.

Instruction sets want their weights in different orders. An artifact for several stores each matrix once, as the model has it, and
whoever loads it puts it in the order of the machine at hand.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_SHAPE = r"(\d{1,18}(?:x\d{1,18})*)"
_TEXT = re.compile(f"{_SHAPE} in {_SHAPE} as {_SHAPE}", re.ASCII)
ALIGN = 64  # bytes; kernels read weights in place


@dataclass(frozen=True)
class Layout:
    """padded: shape after zeros at the end of each axis; blocks: that split into blocks; axes: their order in memory."""

    padded: tuple[int, ...]
    blocks: tuple[int, ...]
    axes: tuple[int, ...]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of that shape can be laid out so."""
        return (
            len(self.padded) == len(shape)
            and all(0 < n <= p for n, p in zip(shape, self.padded, strict=True))
            and min(self.blocks, default=0) > 0
            and math.prod(self.blocks) == math.prod(self.padded)
            and sorted(self.axes) == list(range(len(self.blocks)))
        )

    def apply(self, matrix: Array) -> Array:
        """matrix: of a shape that `fits`, any dtype -> the same dtype, flat, aligned to ALIGN bytes."""
        if matrix.shape != self.padded:
            whole = np.zeros(self.padded, matrix.dtype)
            whole[tuple(slice(n) for n in matrix.shape)] = matrix
        else:
            whole = np.ascontiguousarray(matrix)
        blocks, axes, unit = self.blocks, self.axes, matrix.dtype
        run = blocks[-1] * unit.itemsize
        if axes[-1] == len(blocks) - 1 and run in (2, 4, 8):  # whole runs are moved, and not their elements
            blocks, axes, unit = blocks[:-1], axes[:-1], np.dtype(f"u{run}")
        source = whole.view(unit).reshape(blocks).transpose(axes)
        memory = np.empty(whole.nbytes + ALIGN, np.uint8)
        begin = -memory.ctypes.data % ALIGN
        flat = memory[begin : begin + whole.nbytes]
        np.copyto(flat.view(unit).reshape(source.shape), source)
        return flat.view(matrix.dtype)

    def __str__(self) -> str:
        """As manifests have it: "40x64 in 3x2x8x16x2x2 as 0x3x1x4x2x5"."""
        padded, blocks, axes = ("x".join(map(str, part)) for part in (self.padded, self.blocks, self.axes))
        return f"{padded} in {blocks} as {axes}"

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout of that text. Raises ValueError for any other text."""
        parts = _TEXT.fullmatch(text)
        if parts is None:
            raise ValueError(f"layout {text!r}; needed: PADDED in BLOCKS as AXES, such as '40x64 in 5x8x64 as 0x2x1'")
        padded, blocks, axes = (tuple(int(n) for n in part.split("x")) for part in parts.groups())
        return Layout(padded, blocks, axes)


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as a kernel reads it, and the matrix it was made of: packed is layout.apply(matrix)."""

    packed: Array
    matrix: Array
    layout: Layout


def pack(matrix: Array, layout: Layout) -> Packed:
    """The matrix in that layout."""
    return Packed(layout.apply(matrix), matrix, layout)
