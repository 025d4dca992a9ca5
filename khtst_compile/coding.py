"""Inputs to ids and back, by artifacts of any kind. A "library" needs numpy and TVM's runtime alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact
from khtst_compile.checks import as_path, check_type
from khtst_compile.codes import Coded, Codes, read_codes, write_codes
from khtst_compile.errors import ArtifactError, UnsupportedError, UsageError
from khtst_compile.signature import TensorSpec, check_inputs

Array = npt.NDArray[Any]
Run = Callable[[dict[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Opened:
    """An artifact ready to run. path: its folder; run: name -> array to name -> array, inputs checked."""

    path: Path
    manifest: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    run: Run


def open_artifact(path: str | Path, *, threads: int | None = None) -> Opened:
    """An artifact of any kind: a "library" run by TVM, "onnx" by onnxruntime, "quantized" by torch."""
    folder = artifact.read(path)
    specs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
    if folder.kind == "library":
        from khtst_compile import runtime

        return Opened(folder.path, folder.manifest, specs, runtime.load(path, threads=threads, verify_hashes=False).run)
    axes, ranges = folder.manifest["axes"], folder.manifest.get("ranges", {})
    inner = _onnx(folder, threads) if folder.kind == "onnx" else _torch(folder, threads)

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        arrays = check_inputs(inputs, specs, axes, ranges)
        return inner({s.name: a for s, a in zip(specs, arrays, strict=True)})

    return Opened(folder.path, folder.manifest, specs, run)


def _onnx(folder: artifact.Folder, threads: int | None) -> Run:
    from khtst_compile.engines import ort_run

    return ort_run(folder.file(artifact.ONNX_MODEL), threads or 0)


def _torch(folder: artifact.Folder, threads: int | None) -> Run:
    import torch

    from khtst_compile.api import load_program

    if threads is not None:
        torch.set_num_threads(threads)
    program = load_program(folder)

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            found = program.run({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in inputs.items()})
        return {k: v.numpy() for k, v in found.items()}

    return run


def encode(
    path: str | Path | Opened,
    inputs: dict[str, Array],
    *,
    output: str | Path | None = None,
    pack: bool = False,
    strict: bool = False,
    threads: int | None = None,
) -> Codes:
    """Ids of an encoder written by `split`, or of a whole artifact that returns the ids of its codebooks.

    path: the artifact, of any kind, or what `open_artifact` made of it; inputs: name -> array, as the artifact's; output: a codes file to
    write as well, `pack`ed or not. strict: raise UnsupportedError where rows have no code (NaN, infinite, above 1e18) instead of counting
    them; a whole artifact does not count them. Raises UsageError where no output holds ids.
    """
    check_type(pack, "pack", bool, "true or false")
    check_type(strict, "strict", bool, "true or false")
    opened = path if isinstance(path, Opened) else open_artifact(path, threads=threads)
    held = _held(opened, "output")
    lost_name = opened.manifest["meta"].get("split", {}).get("lost")
    if strict and lost_name is None:
        raise UsageError(
            f"{opened.path}: a whole artifact does not count rows without a code; needed for strict: an encoder, made by split"
        )
    results = opened.run(inputs)
    lost: list[int | None] = [None] * len(held) if lost_name is None else [int(n) for n in results[lost_name]]
    made = Codes(tuple(_coded(entry, name, results[name], n) for (entry, name), n in zip(held, lost, strict=True)))
    if strict and made.lost:
        bad = ", ".join(f"{b.lost} of {b.ids.size // b.ids.shape[-1]} rows of {b.site!r}" for b in made.books if b.lost)
        raise UnsupportedError(f"{opened.path}: {bad} have no code (NaN, infinite or above 1e18); needed: none, as strict asks")
    if output is not None:
        with artifact.staged_file(as_path(output, "output")) as temporary:
            write_codes(temporary, made, packed=pack)
    return made


def decode(path: str | Path | Opened, codes: str | Path | Codes, *, threads: int | None = None) -> dict[str, Array]:
    """Outputs of a decoder written by `split`, of any kind, on ids of its codebooks.

    codes: a codes file or what `encode` returned. Raises UsageError where the artifact takes no ids, or where the codes are those of
    other codebooks (by sha256) or of another shape.
    """
    found = codes if isinstance(codes, Codes) else read_codes(codes)
    where = "codes" if isinstance(codes, Codes) else str(codes)
    opened = path if isinstance(path, Opened) else open_artifact(path, threads=threads)
    held = _held(opened, "input")
    if len(held) != len(found.books):
        sites = ", ".join(repr(b.site) for b in found.books) or "none"
        raise UsageError(
            f"{where}: codes of {len(found.books)} codebooks ({sites}); needed: of {len(held)}, "
            f"{', '.join(repr(e['site']) for e, _ in held)}, those of {opened.path}"
        )
    specs = {s.name: s for s in opened.inputs}
    inputs = {
        name: _given(where, opened, entry, specs[name], book) for (entry, name), book in zip(held, found.books, strict=True)
    }
    return opened.run(inputs)


def _held(opened: Opened, side: str) -> list[tuple[dict[str, Any], str]]:
    """Codebooks whose ids an output (or input) of the artifact holds, and its name."""
    books = opened.manifest["meta"].get("codebooks") or []
    found = [(e, e["ids"][side]) for e in books if isinstance(e.get("ids"), dict) and side in e["ids"]]
    split = opened.manifest["meta"].get("split")
    if split is not None and split["part"] == ("encoder" if side == "output" else "decoder"):
        named = {name: (entry, name) for entry, name in found}
        found = [named[name] for name in split["ids"] if name in named]
        if len(found) != len(split["ids"]):
            raise ArtifactError(f"{opened.path}: manifest.meta.codebooks does not describe all of {split['ids']}; split again")
    if found:
        return found
    if not books:
        raise UsageError(f"{opened.path}: has no codebook; needed: a model whose codebooks freeze_codebook froze")
    part = "encoder" if side == "output" else "decoder"
    raise UsageError(f"{opened.path}: no {side} holds ids of its codebooks; needed: the {part} that khtst-compile split makes")


def _coded(entry: dict[str, Any], name: str, ids: Array, lost: int | None) -> Coded:
    codes = tuple(int(k) for k in entry["codes"])
    if len(codes) == 1 and ids.shape[-1:] != (1,):  # a model's own, without an axis of levels
        ids = ids[..., None]
    return Coded(str(entry["site"]), str(entry["sha256"]), codes, np.ascontiguousarray(ids, np.int32), lost)


def _given(where: str, opened: Opened, entry: dict[str, Any], spec: TensorSpec, book: Coded) -> Array:
    """The ids of one input of a decoder. Raises UsageError where they are not its codebook's."""
    if book.sha256 != entry["sha256"]:
        raise UsageError(
            f"{where}: ids of another codebook ({book.site!r}, sha256 {book.sha256[:12]}) than {entry['site']!r} of {opened.path} "
            f"({entry['sha256'][:12]}); decode them by the decoder that was split from the encoder's model"
        )
    if book.codes != tuple(entry["codes"]):
        raise UsageError(
            f"{where}: ids of {book.site!r} are of {book.codes} codes; needed: {tuple(entry['codes'])}, as {opened.path} has"
        )
    shape = book.ids.shape
    if len(shape) == len(spec.shape) - 1 and spec.shape[-2:] == (1, 1):  # one row a sample, of a model that returned (batch, 1)
        shape = (*shape[:-1], 1, 1)
    if len(shape) != len(spec.shape) or any(isinstance(w, int) and n != w for n, w in zip(shape, spec.shape, strict=True)):
        raise UsageError(
            f"{where}: ids of {book.site!r} have shape {book.ids.shape}; needed: {spec.shape}, as {opened.path} takes"
        )
    return book.ids.reshape(shape)
