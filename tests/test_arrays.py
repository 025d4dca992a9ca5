"""Files of arrays: any name can be written, and nothing but plain numbers is read."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from khtst_compile.arrays import read_array, read_arrays, write_arrays
from khtst_compile.errors import UsageError


def test_any_name_is_written_and_numpy_reads_it(tmp_path: Path) -> None:
    given = {"file": np.arange(3), "in/x": np.ones((2, 2), np.float32), "": np.array(True), "args": np.zeros(0, np.int8)}
    write_arrays(tmp_path / "a.npz", given)
    found = read_arrays(tmp_path / "a.npz")
    assert found.keys() == given.keys()
    assert all(found[k].dtype == v.dtype and np.array_equal(found[k], v) for k, v in given.items())
    with np.load(tmp_path / "a.npz") as archive:
        assert set(archive.files) == set(given) and archive["file"].tolist() == [0, 1, 2]


def test_equal_arrays_make_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_arrays(tmp_path / name, {"x": np.arange(5)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_other_byte_order_is_read_as_values(tmp_path: Path) -> None:
    other = np.arange(4, dtype=np.float32).astype(np.dtype(np.float32).newbyteorder("S"))
    np.savez(tmp_path / "a.npz", x=other)
    found = read_arrays(tmp_path / "a.npz")["x"]
    assert found.dtype == np.float32 and found.dtype.isnative and found.tolist() == [0, 1, 2, 3]


def damaged(file: Path) -> None:
    np.savez(file, x=np.arange(64))
    data = bytearray(file.read_bytes())
    data[300] ^= 0xFF
    file.write_bytes(data)


def truncated(file: Path) -> None:
    np.savez(file, x=np.arange(64))
    file.write_bytes(file.read_bytes()[:200])


def torn_header(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[[")


def pickled(file: Path) -> None:
    np.savez(file, x=np.array([{}], dtype=object))


def text(file: Path) -> None:
    file.write_text("hello")


def empty(file: Path) -> None:
    file.touch()


def one_array(file: Path) -> None:
    with file.open("wb") as stream:
        np.save(stream, np.arange(3))


def foreign(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")


@pytest.mark.parametrize("make", [damaged, truncated, torn_header, pickled, text, empty, one_array, foreign])
def test_anything_else_is_one_sentence(tmp_path: Path, make: object) -> None:
    file = tmp_path / "a.npz"
    make(file)  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"a\.npz") as caught:
        read_arrays(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [pickled, text, empty, foreign])
def test_a_lone_array_is_checked_too(tmp_path: Path, make: object) -> None:
    file = tmp_path / "a.npy"
    with file.open("wb") as stream:
        make(tmp_path / "a.npz")  # type: ignore[operator]
        stream.write((tmp_path / "a.npz").read_bytes())
    with pytest.raises(UsageError, match=r"a\.npy"):
        read_array(file)
