"""The codes file: ids of codebooks, and how they are packed. Needs numpy alone.

    khtst-codes\\n               magic line
    {"version": 1, ...}\\n       header, one line of JSON in UTF-8
    payload                     the ids of each codebook in turn, without gaps

header: "packed", "count" (ids in all), "bytes" (of the payload), and "codebooks", a list of "site", "sha256" (of the tables), "shape"
(rows .., levels), "codes" (of each level), "widths" (bits of an id of each level), "lost" (rows without a code; null where not known).
Ids go row by row, those of a row level by level. Not packed: int32, little-endian. Packed: ceil(log2(codes)) bits each, the lowest
first, into bytes filled from their lowest bit; each codebook begins with a new byte, and bits behind its last id are 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from khtst_compile.checks import as_path
from khtst_compile.errors import UsageError
from khtst_compile.schema import COUNT, Either, complaint

MAGIC = b"khtst-codes\n"
VERSION = 1
LONGEST_HEADER = 1 << 24  # bytes
MOST_IDS = 1 << 31  # ids of a codebook with one code take no bytes, so that nothing else bounds what a header claims
_ROWS = 1 << 14  # packed at a time; a multiple of 8, so that every part ends with a whole byte

Ids = npt.NDArray[np.int32]
Array = npt.NDArray[Any]
_HEADER = {
    "version": COUNT,
    "packed": bool,
    "count": COUNT,
    "bytes": COUNT,
    "codebooks": [
        {
            "site": str,
            "sha256": str,
            "shape": [COUNT],
            "codes": [COUNT],
            "widths": [COUNT],
            "lost": Either((type(None), COUNT)),
        }
    ],
}


@dataclass(frozen=True)
class Coded:
    """Ids of one codebook. site: where it is in the model; sha256: of its tables; codes: of each level; ids: (.., levels) int32; lost: rows
    without a code among them, None where that is not known."""

    site: str
    sha256: str
    codes: tuple[int, ...]
    ids: Ids
    lost: int | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of an id of each level: ceil(log2(codes)), none where there is one code."""
        return tuple((k - 1).bit_length() for k in self.codes)


@dataclass(frozen=True)
class Codes:
    """What a codes file holds: ids of each codebook."""

    books: tuple[Coded, ...]

    @property
    def count(self) -> int:
        """How many ids there are."""
        return sum(b.ids.size for b in self.books)

    @property
    def lost(self) -> int | None:
        """Rows without a code, of all codebooks; None where it is not known of one."""
        counts = [b.lost for b in self.books]
        return None if None in counts else sum(c for c in counts if c is not None)

    def bytes(self, packed: bool) -> int:
        """Size of the payload."""
        return sum(_size(b.ids.shape, b.widths, packed) for b in self.books)


def write_codes(file: str | Path | IO[bytes], codes: Codes, *, packed: bool = False) -> None:
    """Write what `read_codes` reads. Raises UsageError for ids that are none of their codebook's."""
    for book in codes.books:
        _check_ids("codes", book)
    header = {
        "version": VERSION,
        "packed": packed,
        "count": codes.count,
        "bytes": codes.bytes(packed),
        "codebooks": [
            {
                "site": b.site,
                "sha256": b.sha256,
                "shape": list(b.ids.shape),
                "codes": list(b.codes),
                "widths": list(b.widths),
                "lost": b.lost,
            }
            for b in codes.books
        ],
    }
    payload = b"".join(pack(b.ids, b.widths) if packed else b.ids.astype("<i4").tobytes() for b in codes.books)
    whole = MAGIC + json.dumps(header).encode() + b"\n" + payload
    if isinstance(file, (str, Path)):
        Path(file).write_bytes(whole)
    else:
        file.write(whole)


def read_codes(path: str | Path) -> Codes:
    """The ids of a codes file. Raises UsageError saying what is wrong with it, down to the first id that is no code."""
    path = as_path(path, "codes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); needed: a file written by khtst-compile run --codes"
        ) from error
    if not data.startswith(MAGIC):
        raise UsageError(
            f"{path}: no codes file (it begins with {data[:12]!r}); needed: one written by khtst-compile run --codes"
        )
    end = data.find(b"\n", len(MAGIC), len(MAGIC) + LONGEST_HEADER)
    if end < 0:
        raise UsageError(f"{path}: its header has no end; it was cut off; copy it again")
    header = _header(path, data[len(MAGIC) : end])
    return Codes(tuple(_books(path, header, memoryview(data)[end + 1 :])))


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: its header is no JSON ({error}); write it again") from error
    version = header.get("version") if isinstance(header, dict) else None
    if version != VERSION:
        raise UsageError(f"{path}: codes file version {version!r}; this khtst-compile reads version {VERSION}; write it again")
    wrong = complaint(header, _HEADER, "header")
    if wrong is not None:
        raise UsageError(f"{path}: {wrong}; write it again")
    return dict(header)


def _books(path: Path, header: dict[str, Any], payload: memoryview) -> list[Coded]:
    packed, books, place = header["packed"], [], 0
    for number, entry in enumerate(header["codebooks"]):
        where = f"{path}: codebook {number} ({entry['site']!r})"
        shape, codes = tuple(entry["shape"]), tuple(entry["codes"])
        if not shape or shape[-1] != len(codes) or not codes or min(codes) < 1 or max(codes) > 2**31:
            raise UsageError(f"{where}: ids of shape {shape} and codes {codes}; needed: 1 to 2147483648 codes for each level")
        if math.prod(max(n, 1) for n in shape) > MOST_IDS:
            raise UsageError(f"{where}: ids of shape {shape}; needed: at most {MOST_IDS} ids; write several files")
        empty = Coded(entry["site"], entry["sha256"], codes, np.empty((0, len(codes)), np.int32), entry["lost"])
        if tuple(entry["widths"]) != empty.widths:
            raise UsageError(f"{where}: widths {entry['widths']}; needed: {list(empty.widths)}, of {codes} codes; write it again")
        size = _size(shape, empty.widths, packed)
        if place + size > len(payload):
            raise UsageError(
                f"{where}: its ids take {size} bytes and {len(payload) - place} are there; the file was cut off; copy it again"
            )
        part = payload[place : place + size]
        ids = unpack(part, shape, empty.widths, where) if packed else np.frombuffer(part, "<i4").astype(np.int32).reshape(shape)
        books.append(Coded(empty.site, empty.sha256, codes, ids, empty.lost))
        _check_ids(where, books[-1])
        place += size
    found = (sum(b.ids.size for b in books), place)
    if len(payload) != place or found != (header["count"], header["bytes"]):
        raise UsageError(
            f"{path}: {len(payload)} bytes of ids, and a header that says {header['count']} ids in {header['bytes']}; needed: "
            f"{found[0]} in {found[1]}, as its shapes say; write it again"
        )
    return books


def _check_ids(where: str, book: Coded) -> None:
    if book.ids.dtype != np.int32 or not book.ids.ndim or book.ids.shape[-1] != len(book.codes):
        raise UsageError(
            f"{where}: ids of {book.site!r} are {book.ids.dtype.name} {book.ids.shape}; needed: int32 (.., {len(book.codes)})"
        )
    wrong = (book.ids < 0) | (book.ids >= np.array(book.codes, np.int64))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise UsageError(
            f"{where}: id {at} of {book.site!r} is {int(book.ids[at])}; needed: 0..{book.codes[at[-1]] - 1}; the file was altered, or "
            "belongs to another codebook"
        )


def _size(shape: Sequence[int], widths: Sequence[int], packed: bool) -> int:
    """Bytes of ids of a shape."""
    rows = math.prod(shape[:-1])
    return (rows * sum(widths) + 7) // 8 if packed else 4 * rows * len(widths)


def pack(ids: Ids, widths: Sequence[int]) -> bytes:
    """ids: (.., levels) int32, each within its width in bits -> bytes, see the head of this file."""
    rows = ids.reshape(math.prod(ids.shape[:-1]), len(widths))
    level = np.repeat(np.arange(len(widths)), widths)
    bit = np.concatenate([np.arange(w) for w in widths] or [np.empty(0, np.int64)]).astype(np.int32)
    parts = []
    for first in range(0, len(rows), _ROWS):
        bits = (rows[first : first + _ROWS, level] >> bit) & 1
        parts.append(np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes())
    return b"".join(parts)


def unpack(data: memoryview | bytes, shape: Sequence[int], widths: Sequence[int], where: str = "codes") -> Ids:
    """The ids of `pack`, of this shape. Raises UsageError where bits behind the last one are set."""
    count, wide = math.prod(shape[:-1]), sum(widths)
    ids = np.zeros((count, len(widths)), np.int32)
    if (count * wide) % 8 and data[-1] >> (count * wide) % 8:
        raise UsageError(f"{where}: bits behind the last id are set; the file was altered; write it again")
    if wide:
        packed = np.frombuffer(data, np.uint8)
        begins = np.cumsum([0, *widths])
        for first in range(0, count, _ROWS):
            rows = min(_ROWS, count - first)
            part = packed[first * wide // 8 : (first * wide + rows * wide + 7) // 8]
            bits = np.unpackbits(part, count=rows * wide, bitorder="little").reshape(rows, wide)
            for level, (begin, width) in enumerate(zip(begins, widths, strict=False)):
                values = bits[:, begin : begin + width].astype(np.int32) << np.arange(width, dtype=np.int32)
                ids[first : first + rows, level] = values.sum(-1, dtype=np.int32)
    return ids.reshape(tuple(shape))
