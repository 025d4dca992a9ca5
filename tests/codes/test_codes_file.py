"""The codes file: what is written is read, in as many bytes as it says, and whatever is damaged is refused by one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from khtst_compile.codes import MAGIC, Coded, Codes, pack, read_codes, unpack, write_codes
from khtst_compile.errors import UsageError

SHA = "ab" * 32
SIZES = [(1,), (2,), (3, 256), (1000, 1, 7), (64, 64, 64), (2**31,)]
LEADS = [(0,), (1,), (7, 3), (5, 0, 2), (16411,)]


def coded(codes: tuple[int, ...], lead: tuple[int, ...], site: str = "quantizer", seed: int = 0) -> Coded:
    drawn = np.random.default_rng(seed).integers(0, np.array(codes), (*lead, len(codes)))
    return Coded(site, SHA, codes, drawn.astype(np.int32), 3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lead", LEADS)
def test_what_is_written_is_read(packed: bool, lead: tuple[int, ...], tmp_path: Path) -> None:
    codes = Codes(tuple(coded(k, lead, f"book.{i}", i) for i, k in enumerate(SIZES)))
    write_codes(tmp_path / "c", codes, packed=packed)
    found = read_codes(tmp_path / "c")
    for book, want in zip(found.books, codes.books, strict=True):
        assert (book.site, book.sha256, book.codes, book.lost) == (want.site, want.sha256, want.codes, want.lost)
        assert book.ids.dtype == np.int32 and book.ids.shape == want.ids.shape and (book.ids == want.ids).all()
    header_size = (tmp_path / "c").read_bytes().index(b"\n", len(MAGIC)) + 1
    rows = math.prod(lead)
    bits = [sum(math.ceil(math.log2(k)) for k in sizes) * rows for sizes in SIZES]
    bytes_ = sum(-(-b // 8) for b in bits) if packed else sum(4 * len(s) * rows for s in SIZES)
    assert (tmp_path / "c").stat().st_size == header_size + bytes_ == header_size + codes.bytes(packed)
    assert found.lost == 3 * len(SIZES)


def test_the_order_of_bits_is_the_one_written_down() -> None:
    ids = np.array([[1, 5], [0, 2], [1, 7]], np.int32)  # widths 1 and 3: 1 101 0 010 1 111, each lowest bit first
    assert pack(ids, (1, 3)) == bytes([0b0100_1011, 0b0000_1111])
    assert (unpack(bytes([0b0100_1011, 0b0000_1111]), (3, 2), (1, 3)) == ids).all()


def test_one_flipped_id_changes_its_row_alone(tmp_path: Path) -> None:
    codes = Codes((coded((64, 64, 64), (50,)),))
    write_codes(tmp_path / "c", codes, packed=True)
    data = bytearray((tmp_path / "c").read_bytes())
    begin = data.index(b"\n", len(MAGIC)) + 1
    data[begin + (17 * 18 + 6) // 8] ^= 1 << (17 * 18 + 6) % 8  # row 17, level 1, lowest bit
    (tmp_path / "c").write_bytes(data)
    differs = read_codes(tmp_path / "c").books[0].ids ^ codes.books[0].ids
    assert np.argwhere(differs).tolist() == [[17, 1]] and differs.max() == 1


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_codes(tmp_path / "good", Codes((coded((5, 7), (11,)), coded((1,), (11,), "other"))), packed=True)
    return tmp_path / "good"


def test_it_can_be_cut_off_nowhere(written: Path) -> None:
    data = written.read_bytes()
    for length in range(len(data)):
        written.write_bytes(data[:length])
        with pytest.raises(UsageError, match=r"cut off|no codes file"):
            read_codes(written)


def changed(path: Path, edit: Any) -> Path:
    """The file with its header edited."""
    data = path.read_bytes()
    end = data.index(b"\n", len(MAGIC))
    header = json.loads(data[len(MAGIC) : end])
    header = edit(header) or header
    path.write_bytes(MAGIC + json.dumps(header).encode() + data[end:])
    return path


def book(**fields: Any) -> Any:
    return lambda header: header["codebooks"][0].update(fields)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h: h.update(version=2), "version 2; this khtst-compile reads version 1"),
        (lambda h: [1], "version None"),
        (lambda h: h.pop("packed") and None, "lacks 'packed'"),
        (lambda h: h.update(packed=False), r"take 88 bytes and 9 are there; .* cut off"),
        (lambda h: h.update(count=1), r"says 1 ids in 9; needed: 33 in 9"),
        (lambda h: h.update(bytes=8), r"says 33 ids in 8; needed: 33 in 9"),
        (lambda h: h.update(codebooks=[]), r"9 bytes of ids, .*; needed: 0 in 0"),
        (book(shape=[12, 2]), r"take 9 bytes|says 33 ids|bits behind|id \("),
        (book(shape=[11]), r"ids of shape \(11,\) and codes \(5, 7\)"),
        (book(shape=[]), "ids of shape"),
        (book(shape=[-1, 2]), r"shape\[0\]"),
        (book(shape=[2**62, 2]), "at most 2147483648 ids"),
        (book(shape=[0, 2**62, 2]), "at most 2147483648 ids"),
        (book(widths=[3, 4]), r"widths \[3, 4\]; needed: \[3, 3\]"),
        (book(codes=[0, 7]), "needed: 1 to 2147483648 codes"),
        (book(codes=[5, "x"]), r"codes\[1\]"),
        (book(lost=-1), "lost"),
        (book(site=None), "site"),
    ],
)
def test_headers_that_lie(edit: Any, words: str, written: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_codes(changed(written, edit))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no codes file"),
        (b"PK\x03\x04 a zip", "no codes file"),
        (MAGIC + b"{}" * 5, "no end"),
        (MAGIC + b"not json\n", "no JSON"),
        (MAGIC + b"\xff\xfe\n", "no JSON"),
        (MAGIC + b"[" * 100000 + b"\n", "no JSON"),
    ],
)
def test_other_files(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(UsageError, match=words):
        read_codes(tmp_path / "f")
    with pytest.raises(UsageError, match="cannot be read"):
        read_codes(tmp_path / "none")


def test_an_id_that_is_no_code(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[data.index(b"\n", len(MAGIC)) + 1] |= 0b111  # 7 of 5
    written.write_bytes(data)
    with pytest.raises(UsageError, match=r"id \(0, 0\) of 'quantizer' is 7; needed: 0\.\.4"):
        read_codes(written)
    with pytest.raises(UsageError, match=r"is 9; needed: 0\.\.8"):
        write_codes(written, Codes((Coded("q", SHA, (9,), np.array([[3], [9]], np.int32)),)))
    for bad in (np.array([[3]]), np.array([3], np.int32)[0], np.zeros((4, 2), np.int32)):
        with pytest.raises(UsageError, match="needed: int32"):
            write_codes(written, Codes((Coded("q", SHA, (9,), bad),)))  # type: ignore[arg-type]


def test_bits_behind_the_last_id(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[-1] |= 1 << 7  # 66 bits in 9 bytes
    written.write_bytes(data)
    with pytest.raises(UsageError, match="bits behind the last id"):
        read_codes(written)
