"""Arrays by name in one .npz file, of any names and from any file: numpy's own writer takes names for its arguments, and its reader raises
whatever the damaged part provokes. Needs numpy alone."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import UsageError

Array = npt.NDArray[Any]


def write_arrays(file: Path | IO[bytes], arrays: Mapping[str, Array]) -> None:
    """Write what `read_arrays` and numpy.load read. Any name will do; numpy.savez takes "file" for its own argument."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)


def read_arrays(file: Path) -> dict[str, Array]:
    """Name -> array in this machine's byte order. Raises UsageError for anything but an .npz of plain numbers, pickles included."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if odd := [n for n in names if not n.endswith(".npy")]:
                raise UsageError(f"{file}: holds {odd[0]!r}; needed: an .npz with arrays alone, as numpy.savez writes it")
            found = {}
            for name in names:
                with archive.open(name) as stream:
                    found[name.removesuffix(".npy")] = native(np.lib.format.read_array(stream, allow_pickle=False))
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # zlib, zipfile, tokenize, struct: each part of a damaged file has its own
        raise UsageError(
            f"{file}: not a plain .npz ({_first_line(error)}); write it with numpy.savez, without objects"
        ) from error
    return found


def read_array(file: Path) -> Array:
    """The array of an .npy file, mapped, in its own byte order. Raises UsageError for anything else, pickles included."""
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
    except MemoryError:
        raise
    except Exception as error:
        raise UsageError(f"{file}: not a plain .npy ({_first_line(error)}); write it with numpy.save, without objects") from error
    found.close()
    raise UsageError(f"{file}: an .npz under the name of an .npy; rename it")


def native(array: Array) -> Array:
    """The same values in this machine's byte order; the array itself where it has that already."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return "it holds pickled objects" if "pickle" in text else text or type(error).__name__
