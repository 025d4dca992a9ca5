"""The runner's own SHA-256, JSON, npz and layouts are those of Python; damaged input is refused, and nothing outside it is touched."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from khtst_compile.layout import Layout
from tests.runner.conftest import Run


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, 100_003])
def test_sha256(parts: Run, tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "f").write_bytes(data)
    assert parts("sha256", tmp_path / "f").stdout.strip() == hashlib.sha256(data).hexdigest()


def shown(value: Any) -> str:
    """As parts.c shows JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if -(2**63) <= value < 2**63 else "fraction"
    if isinstance(value, float):
        return "fraction"
    if isinstance(value, str):
        return f"<{value.encode().hex()}>"
    if isinstance(value, list):
        return f"{len(value)}({''.join(shown(v) + ';' for v in value)})"
    return f"{len(value)}({''.join(f'{k}={shown(v)};' for k, v in value.items())})"


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json(parts: Run, tmp_path: Path, ascii_only: bool) -> None:
    value = {
        "integers": [0, -1, 2**63 - 1, -(2**63), 2**63, 10**30],
        "fractions": [1.5, -2e300, 1e-9],
        "texts": ["", 'a "quoted" \\ \n\t\b\f\r/', "é", "漢字", "😀", "\x7f"],
        "others": [None, True, False, {}, [], [[[]]], {"a": {"b": [1, {"c": None}]}}],
    }
    (tmp_path / "f").write_text(json.dumps(value, indent=1, ensure_ascii=ascii_only), encoding="utf-8")
    assert parts("json", tmp_path / "f").stdout.strip() == shown(value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "line 1: the text ends too early"),
        ('{"a": 1,\n "b": }', "line 2: "),
        ("[1, 2", "',' or the end"),
        ("[1] x", "more after the end"),
        ('{"a" 1}', "':'"),
        ('{"a', "closing quote"),
        ('"\\u12"', "four hexadecimal digits"),
        ('"\\ud800"', "surrogate"),
        ('"\\ude00"', "surrogate"),
        ('"\\u0000"', "NUL"),
        ('"a\nb"', "control character"),
        ('"\\x"', "unknown escape"),
        ("01", "begins with 0"),
        ("-", "digit"),
        ("1.", "digit"),
        ("1e+", "digit"),
        ("tru", "known word"),
        ("nul\0", "known word"),
        ("[" * 100 + "]" * 100, "too deeply"),
    ],
)
def test_json_that_is_none(parts: Run, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "f").write_text(text, encoding="utf-8")
    assert says in parts("json", tmp_path / "f", code=2).stdout


def test_json_cut_off_anywhere(parts: Run, tmp_path: Path) -> None:
    whole = json.dumps({"a": [1, -2.5e3, "x\\\u00e9", None, True], "b": {"c": "\u6f22"}})
    for size in range(0, len(whole), 3):
        (tmp_path / "f").write_text(whole[:size])
        parts("json", tmp_path / "f", code=2)


ARRAYS = {
    "float32": np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7,
    "float64": np.array([np.nan, np.inf, -0.0, 1e-300]),
    "int64": np.array([[2**62, -(2**62)]]),
    "int32": np.arange(-3, 3, dtype=np.int32),
    "int16": np.zeros((3, 0, 2), np.int16),
    "int8": np.array(-7, np.int8),
    "uint8": np.arange(256, dtype=np.uint8),
    "bool": np.array([True, False, True]),
    "in/a name.with é": np.ones(1, np.float32),
    "fortran": np.asfortranarray(np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.float32)),
    "repeats": np.zeros(100_000, np.float32),
    "noise": np.random.default_rng(1).integers(0, 255, 70_000).astype(np.uint8),
    "text": np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 400, np.uint8),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(parts: Run, tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    parts("npz", tmp_path / "a.npz", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as found:
        assert list(found) == list(ARRAYS)
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes()
    parts("npz", tmp_path / "b.npz", tmp_path / "c.npz")
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert zipfile.ZipFile(tmp_path / "b.npz").testzip() is None


@pytest.mark.parametrize("level", [0, 1, 9])
def test_every_kind_of_deflate_block(parts: Run, tmp_path: Path, level: int) -> None:
    """Level 0 stores blocks, small arrays get fixed codes, large ones their own."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, array in ARRAYS.items():
            with archive.open(f"{name}.npy", "w") as stream:
                np.lib.format.write_array(stream, array)
    parts("npz", tmp_path / "a.npz", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as found:
        assert all(found[name].tobytes() == array.tobytes() for name, array in ARRAYS.items())


def test_npz_with_64_bit_sizes(parts: Run, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w", force_zip64=True) as stream:
        np.lib.format.write_array(stream, ARRAYS["float32"])
    parts("npz", tmp_path / "a.npz", tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as found:
        assert found["x"].tobytes() == ARRAYS["float32"].tobytes()


def test_npz_that_is_none(parts: Run, tmp_path: Path) -> None:
    def refused(says: str) -> None:
        said = parts("npz", tmp_path / "a.npz", tmp_path / "b.npz", code=2).stdout
        assert says in said and "a.npz" in said
        assert not (tmp_path / "b.npz").exists()

    refused("No such file")
    (tmp_path / "a.npz").write_bytes(b"")
    refused("it is empty")
    (tmp_path / "a.npz").write_bytes(b"no zip file at all, but more than 22 bytes")
    refused("no zip file")
    np.savez(tmp_path / "a.npz", x=np.array([1 + 2j]))
    refused("array 'x': its dtype is none of")
    np.savez(tmp_path / "a.npz", x=np.arange(3, dtype=">i4"))
    refused("big-endian")
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))
    refused("dtype")
    np.savez(tmp_path / "a.npz", x=np.zeros((1,) * 9, np.float32))
    refused("more than 8 axes")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.txt", "hello")
    refused("no .npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", "hello")
    refused("other than deflate")
    np.savez(tmp_path / "a.npz", x=np.arange(9))
    whole = bytearray((tmp_path / "a.npz").read_bytes())
    whole[whole.index(b"NUMPY") + 130] ^= 1
    (tmp_path / "a.npz").write_bytes(whole)
    refused("checksum")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_damaged_anywhere(parts: Run, tmp_path: Path, save: Any) -> None:
    """Cut off, or with a byte changed: refused, or read where the byte means nothing; never a crash (the build is sanitized)."""
    save(tmp_path / "whole.npz", x=np.arange(20, dtype=np.float32), y=np.zeros((2, 3), np.int8))
    whole = (tmp_path / "whole.npz").read_bytes()
    rng = np.random.default_rng(0)
    for cut in rng.integers(0, len(whole), 12):
        (tmp_path / "a.npz").write_bytes(whole[:cut])
        parts("npz", tmp_path / "a.npz", tmp_path / "b.npz", code=2)
    for place in rng.integers(0, len(whole), 60):
        changed = bytearray(whole)
        changed[place] = int(rng.integers(0, 256))
        (tmp_path / "a.npz").write_bytes(changed)
        try:
            parts("npz", tmp_path / "a.npz", tmp_path / "b.npz", code=2)
        except AssertionError as error:
            assert str(error).startswith("exit code 0,"), error


@pytest.mark.parametrize(
    "shape, text",
    [
        ((40, 64), "40x64 in 5x8x64 as 0x2x1"),
        ((33, 31), "36x32 in 3x12x4x8 as 2x0x1x3"),
        ((7, 9), "8x16 in 8x16 as 1x0"),
        ((8, 16), "8x16 in 128 as 0"),
        ((5,), "8 in 2x4 as 1x0"),
        ((2, 3, 5), "2x4x6 in 2x2x2x3x2 as 3x1x0x2x4"),
    ],
)
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.float32, np.float64])
def test_layout(parts: Run, tmp_path: Path, shape: tuple[int, ...], text: str, dtype: type) -> None:
    layout = Layout.parse(text)
    assert layout.fits(shape)
    matrix = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    (tmp_path / "m").write_bytes(matrix.tobytes())
    words = ("layout", text, "x".join(map(str, shape)), matrix.itemsize, tmp_path / "m", tmp_path / "out")
    parts(*words)
    assert (tmp_path / "out").read_bytes() == layout.apply(matrix).tobytes()


@pytest.mark.parametrize(
    "text",
    ["", "8x8", "8x8 in 8x8", "8x8 in 8x8 as ", "8x8 in 8x8 as 0x0", "8x8 in 8x8 as 0x2", "8x8 in 8x4 as 0x1", "8x8 in 8x8 as 0x1 ",
     "0x8 in 0x8 as 0x1", "8x8 in 64 as 0x1", "99999999999x99999999999 in 99999999999x99999999999 as 0x1", "-8x8 in 8x8 as 0x1",
     "1" + "x1" * 20 + " in 1 as 0"],
)  # fmt: skip
def test_layout_that_is_none(parts: Run, tmp_path: Path, text: str) -> None:
    assert parts("layout", text, "8x8", 1, tmp_path / "m", tmp_path / "out", code=2).stdout.strip() == "no layout"


def test_layout_of_another_shape(parts: Run, tmp_path: Path) -> None:
    for shape in ("9x8", "8", "8x8x1", "0x8"):
        words = ("layout", "8x8 in 8x8 as 1x0", shape, 1, tmp_path / "m", tmp_path / "out")
        assert parts(*words, code=2).stdout.strip() == "does not fit"
