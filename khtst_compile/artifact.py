"""The folder that ships: a manifest, its files and their hashes. Nothing in it is a pickle.

A folder is written beside its destination under a temporary name and renamed when complete, so a killed process leaves no half artifact.
Reading checks structure, version and hashes before anything else looks at the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.arrays import read_arrays
from khtst_compile.checks import as_path
from khtst_compile.errors import ArtifactError, ResourceError, UsageError
from khtst_compile.layout import ALIGN, Layout
from khtst_compile.schema import COUNT, NUMBER, Each, Either, complaint

FORMAT = "khtst-artifact"
VERSIONS = {"quantized": 1, "library": 2, "onnx": 1}  # by kind: a new form of one does not make the others unreadable
MANIFEST = "manifest.json"
GOLDEN, ONNX_MODEL = "golden.npz", "model.onnx"  # files that several steps read or write
KINDS = tuple(VERSIONS)
_MAKERS = {"quantized": "khtst-compile quantize", "library": "khtst-compile lower", "onnx": "khtst-compile export"}

Array = npt.NDArray[Any]
_WEIGHT_DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64")

_TENSORS = [{"name": str, "dtype": str, "shape": [Either((str, COUNT))]}]
_VARIANT = {
    "name": str,
    "isa": str,
    "cpu_flags": [str],
    "codes_dtype": str,
    "codes_offset": COUNT,
    "library": str,
    "build_s": NUMBER,
    "arrays": [COUNT],
    "layouts": [Either((type(None), str))],
}
_TAP = {
    "node": str,
    "output": COUNT,
    "site": str,
    "operator": str,
    "kind": str,
    "features": Either((type(None), COUNT)),
    "act": str,
    "sha256": str,
}
# field -> what it must be; a "library" or "onnx" artifact has those of `_BY_KIND` too
_FIELDS: dict[str, Any] = {
    "format": str,
    "version": int,
    "kind": str,
    "made_by": Each(str),
    "source": str,
    "recipe": str,
    "passes": [dict],
    "inputs": _TENSORS,
    "outputs": _TENSORS,
    "axes": Each([Either((type(None), int))]),
    "files": Each({"sha256": str, "bytes": COUNT}),
    "golden": {"accuracy": Each(Either((type(None), NUMBER)))},
}
_BY_KIND: dict[str, dict[str, Any]] = {
    "quantized": {"meta": dict},
    "library": {
        "target": {"name": str, "variants": [_VARIANT]},
        "weights": [{"dtype": str, "shape": [COUNT], "offset": COUNT}],
        "taps": [_TAP],
        "program": [
            {"kernel": str, "site": str, "operator": str, "outputs": COUNT, "macs": COUNT, "pair_macs": COUNT, "products": str}
        ],
        "independent": Either((type(None), str)),
        "meta": dict,
    },
    "onnx": {"meta": dict, "opset": int},
}


@dataclass(frozen=True)
class Folder:
    """An artifact that was read and checked. path: absolute; manifest: validated JSON."""

    path: Path
    manifest: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    def file(self, name: str) -> Path:
        if name not in self.manifest["files"]:
            raise ArtifactError(f"{self.path}: the artifact has no {name!r}; it holds {sorted(self.manifest['files'])}")
        return self.path / name

    def arrays(self, name: str) -> dict[str, Array]:
        """The arrays of one .npz file of the artifact."""
        return read_arrays(self.file(name))


@contextlib.contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A temporary folder that becomes `destination` if the block ends without an error.

    An artifact already there is replaced, through a link if the path is one; any other existing path, a place inside another artifact
    and one that cannot be written are refused with UsageError before work starts.
    """
    destination = place(destination)
    if destination.exists() and not (
        destination.is_dir() and ((destination / MANIFEST).is_file() or not any(destination.iterdir()))
    ):
        raise UsageError(f"{destination} exists and is not an artifact; choose another output or remove it")
    temporary = destination.parent / f".{destination.name}.tmp-{os.getpid()}"
    with writable(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        _sweep(destination)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    try:
        yield temporary
        old = destination.parent / f".{destination.name}.old-{os.getpid()}"
        if destination.exists():
            destination.rename(old)
        temporary.rename(destination)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"no space left while writing {destination}; free some or choose another disk") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def staged_file(destination: Path) -> Iterator[Path]:
    """A temporary path in the same folder that is renamed to `destination` if the block ends without an error."""
    destination = place(destination)
    if destination.exists() and not destination.is_file():
        raise UsageError(f"{destination} is no ordinary file; needed: a path for a new file, or of a file to replace")
    temporary = destination.parent / f".{destination.stem}.tmp-{os.getpid()}{destination.suffix}"
    with writable(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    try:
        yield temporary
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)


def place(destination: Path) -> Path:
    """The absolute path an output goes to, through links, so that a link stays one. Raises UsageError inside another artifact."""
    with writable(destination):
        destination = destination.resolve()
        for folder in destination.parents:
            manifest = folder / MANIFEST
            if manifest.is_file() and f'"{FORMAT}"' in manifest.read_text(encoding="utf-8", errors="replace")[:200]:
                raise UsageError(f"{destination} lies inside the artifact {folder}; choose another output")
        destination.exists()  # raises where the name itself is impossible
    return destination


@contextlib.contextmanager
def writable(destination: Path) -> Iterator[None]:
    """What the system says of a path that cannot be used -> UsageError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError, a NUL in a name a ValueError
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"no space left for {destination}; free some or choose another disk") from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{destination} cannot be written ({reason}); choose another output") from error


def _sweep(destination: Path) -> None:
    """Remove what processes that no longer run left half-written for the same destination."""
    pattern = re.compile(re.escape(f".{destination.name}.") + r"(tmp|old)-(\d+)$")
    for path in destination.parent.iterdir():
        match = pattern.match(path.name)
        if match and not Path(f"/proc/{match[2]}").exists():
            if match[1] == "old" and not destination.exists():
                path.rename(destination)  # the process died between its two renames
            else:
                shutil.rmtree(path, ignore_errors=True)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Add format, version and the hash of every file in `folder`, check the result and write it."""
    files = {
        str(p.relative_to(folder)): {"sha256": sha256(p), "bytes": p.stat().st_size}
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != MANIFEST
    }
    full: dict[str, Any] = _finite({"format": FORMAT, "version": VERSIONS[manifest["kind"]], **manifest, "files": files})
    validate(full, folder)
    text = json.dumps(full, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: a figure that is one becomes null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: str | Path, *, kind: str | tuple[str, ...] | None = None, hashes: bool = True) -> Folder:
    """Read an artifact and check it. kind: the kind or kinds that will do; hashes: also compare every file's sha256.

    Raises ArtifactError saying what is wrong with which file and what to do.
    """
    path = as_path(path, "artifact").absolute()
    manifest_path = path / MANIFEST
    if not path.is_dir() or not manifest_path.is_file():
        raise ArtifactError(f"{path}: not an artifact (needed: a folder with {MANIFEST}, as quantize, lower or export write it)")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{manifest_path}: cannot be read as JSON ({error}); make the artifact again") from error
    validate(manifest, path)
    wanted = (kind,) if isinstance(kind, str) else kind
    if wanted is not None and manifest["kind"] not in wanted:
        hint = " or ".join(f"{k!r} (made by {_MAKERS[k]})" for k in wanted)
        raise ArtifactError(f"{path}: this artifact is of kind {manifest['kind']!r}; needed: {hint}")
    _check_files(path, manifest, hashes)
    return Folder(path, manifest)


def validate(manifest: Any, where: Path) -> None:
    """Raise ArtifactError where a manifest is not of this format and version or lacks a field."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(f"{where}: {MANIFEST} is not a {FORMAT} manifest; point to a folder written by khtst-compile")
    kind = manifest.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ArtifactError(f"{where}: artifact kind {kind!r}; known: {', '.join(KINDS)}")
    if manifest.get("version") != VERSIONS[kind]:
        raise ArtifactError(
            f"{where}: {kind} artifact version {manifest.get('version')!r}, this khtst-compile reads version {VERSIONS[kind]}; "
            f"run {_MAKERS[kind]} again, or install the version that made it ({manifest.get('made_by')})"
        )
    wrong = complaint(manifest, {**_FIELDS, **_BY_KIND[kind]}, "manifest") or complaint(
        manifest.get("ranges", {}), Each([int]), "manifest.ranges"
    )
    if wrong is None and kind == "library":
        wrong = _wrong_variant(manifest)
    if wrong is not None:
        raise ArtifactError(f"{where}: {wrong}; make the artifact again")
    for name in manifest["files"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(f"{where}: manifest names an impossible file {name!r}; do not use this artifact")


def _wrong_variant(manifest: dict[str, Any]) -> str | None:
    """What does not fit together in the variants of a library, or None."""
    variants, stored = manifest["target"]["variants"], len(manifest["weights"])
    if not variants:
        return "manifest.target.variants is empty; needed: at least one"
    for number, variant in enumerate(variants):
        place = f"manifest.target.variants[{number}]"
        if variant["library"] not in manifest["files"]:
            return f"{place}.library is {variant['library']!r}, which is not among the files"
        if len(variant["arrays"]) != len(variant["layouts"]):
            return f"{place} has {len(variant['arrays'])} arrays and {len(variant['layouts'])} layouts; needed: as many"
        for array, text in zip(variant["arrays"], variant["layouts"], strict=True):
            if array >= stored:
                return f"{place}.arrays names array {array} of {stored}"
            try:
                fits = text is None or Layout.parse(text).fits(tuple(manifest["weights"][array]["shape"]))
            except ValueError as error:
                return f"{place}.layouts: {error}"
            if not fits:
                return f"{place}.layouts: {text!r} does not fit array {array} of shape {manifest['weights'][array]['shape']}"
    return None


def _check_files(path: Path, manifest: dict[str, Any], hashes: bool) -> None:
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ArtifactError(f"{path}: file {name!r} is missing; copy the whole folder again")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ArtifactError(f"{path}: {name!r} has {size} bytes, the manifest says {entry['bytes']}; copy the folder again")
        if hashes and sha256(file) != entry["sha256"]:
            raise ArtifactError(
                f"{path}: {name!r} was altered (its sha256 differs from the manifest); make or copy the artifact again"
            )


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(stream)


def _digest(stream: Any) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def write_weights(path: Path, arrays: list[Array]) -> list[dict[str, Any]]:
    """All arrays in one file, each at a multiple of ALIGN bytes; returns the manifest's table (dtype, shape, offset)."""
    table = []
    with path.open("wb") as stream:
        for array in arrays:
            stream.write(b"\0" * (-stream.tell() % ALIGN))
            table.append({"dtype": array.dtype.name, "shape": list(array.shape), "offset": stream.tell()})
            stream.write(np.ascontiguousarray(array).tobytes())
        stream.write(b"\0" * (-stream.tell() % ALIGN))
    return table


def map_weights(path: Path, table: list[dict[str, Any]]) -> list[Array]:
    """The arrays of `write_weights`, mapped from the file (private copies on write, so the file is never changed)."""
    if not table:
        return []
    data = np.memmap(path, dtype=np.uint8, mode="c")
    arrays = []
    for entry in table:
        if entry["dtype"] not in _WEIGHT_DTYPES:
            raise ArtifactError(f"{path}: weight dtype {entry['dtype']!r}; known: {', '.join(_WEIGHT_DTYPES)}")
        dtype, shape = np.dtype(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, size = int(entry["offset"]), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if begin < 0 or begin % ALIGN or begin + size > data.size:
            raise ArtifactError(f"{path}: a weight lies outside the file (offset {begin}, {size} bytes of {data.size})")
        arrays.append(data[begin : begin + size].view(dtype).reshape(shape))
    return arrays


def arrange(stored: list[Array], variant: dict[str, Any]) -> list[Array]:
    """The arguments of a variant's library: stored arrays in place, or put into the order it reads."""
    pairs = zip(variant["arrays"], variant["layouts"], strict=True)
    return [stored[place] if text is None else Layout.parse(text).apply(stored[place]) for place, text in pairs]
