"""Layouts: right by their definition, whatever is moved at a time; their text; what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from khtst_compile.layout import ALIGN, Layout


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((40, 60), Layout((48, 64), (3, 2, 8, 16, 2, 2), (0, 3, 1, 4, 2, 5))),
        ((40, 60), Layout((64, 60), (1, 4, 16, 15, 1, 4), (0, 3, 1, 4, 2, 5))),
        ((7, 5), Layout((8, 5), (1, 8, 5), (0, 2, 1))),
        ((3, 8), Layout((3, 8), (3, 8), (0, 1))),
        ((1, 1), Layout((16, 16), (16, 16), (1, 0))),
    ],
)
def test_padded_split_and_transposed(shape: tuple[int, int], layout: Layout, dtype: type) -> None:
    matrix = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    padded = np.pad(matrix, [(0, p - n) for n, p in zip(shape, layout.padded, strict=True)])
    want = padded.reshape(layout.blocks).transpose(layout.axes).reshape(-1)
    assert layout.fits(shape)
    for given in (matrix, np.asfortranarray(matrix)):
        got = layout.apply(given)
        assert got.dtype == dtype and got.ctypes.data % ALIGN == 0
        np.testing.assert_array_equal(got, want)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "4x8", "4x8 in 4x8", "4x8 in 4x8 as 0x1x", "4x-8 in 4x8 as 0x1", "4x8 in 4x8 as 0x1\n"])
def test_other_text_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match="needed: PADDED in BLOCKS as AXES"):
        Layout.parse(text)
