"""Golden values and manifest fields of an encoder and a decoder that an artifact with codebooks is split into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from khtst_compile.codebooks.cut import Cut
from khtst_compile.codebooks.halves import split
from khtst_compile.errors import PassError
from khtst_compile.parity import relative_error_db, worst_cosine
from khtst_compile.program import Program

Array = npt.NDArray[Any]
FLOOR_DB = -200.0  # JSON has no infinity


@dataclass(frozen=True)
class Half:
    """program; golden: arrays of its golden.npz; accuracy: figures on them; ranges: of its integer inputs."""

    program: Program
    golden: dict[str, Array]
    accuracy: dict[str, Any]
    ranges: dict[str, list[int]]


def halves(program: Program, manifest: dict[str, Any], golden: dict[str, Array]) -> tuple[Half, Half]:
    """Encoder and decoder of the program of a "quantized" artifact, given its manifest and golden values.

    Golden outputs are the whole artifact's, and have to be what the halves compute: of ids and `lost`, of which the artifact has none in
    float32, those of the quantized encoder stand for both. Raises what `codebooks.halves.split` raises, and PassError where the two
    together compute another bit than the whole.
    """
    encoder, decoder, where = split(program)
    given = {s.name: torch.from_numpy(golden[f"in/{s.name}"]) for s in program.inputs}
    with torch.no_grad():
        whole, coded = program.run(given), encoder.run(given)
        ids = {b.name: coded[b.name] for b in where.books}
        decoded = decoder.run(ids)
    lost = coded[encoder.meta["split"]["lost"]]
    _check_same(where, whole, coded, decoded, complete=not bool(lost.any()))
    return (
        _half(encoder, given, coded, golden, dict(manifest["golden"]["accuracy"]), dict(manifest.get("ranges", {}))),
        _half(decoder, ids, decoded, golden, dict(manifest["golden"]["accuracy"]), _ranges(where)),
    )


def _ranges(where: Cut) -> dict[str, list[int]]:
    return {b.name: [0, max(int(k) for k in b.entry["codes"]) - 1] for b in where.books}


def _check_same(
    where: Cut,
    whole: dict[str, torch.Tensor],
    coded: dict[str, torch.Tensor],
    decoded: dict[str, torch.Tensor],
    *,
    complete: bool,
) -> None:
    """complete: no row is without a code, so that the decoder has all there is to know."""
    pairs = [(name, coded[name]) for name in where.kept] + [(name, decoded[name]) for name in where.decoded if complete]
    for name, value in pairs:
        if value.numpy().tobytes() != whole[name].numpy().tobytes():
            raise PassError(f"split: output {name!r} is not what the whole artifact computes, to the bit; please report it")


def _half(
    program: Program,
    given: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    golden: dict[str, Array],
    measured: dict[str, Any],
    ranges: dict[str, list[int]],
) -> Half:
    kept = {f"in/{name}": value.numpy() for name, value in given.items()}
    accuracy: dict[str, Any] = {}
    for name, tensor in found.items():
        value = tensor.numpy()
        exact = golden.get(f"fp32/{name}", value)
        kept |= {f"fp32/{name}": exact, f"quantized/{name}": value}
        if value.dtype.kind == "f":
            accuracy[f"{name}: relative error dB"] = max(relative_error_db(value, exact), FLOOR_DB)
            accuracy[f"{name}: worst cosine"] = worst_cosine(value, exact)
        elif name in program.meta["split"]["ids"] or f"{name}: share that differs" in measured:
            accuracy[f"{name}: share that differs"] = float(np.mean(value != exact)) if value.size else 0.0
    return Half(program, kept, accuracy, ranges)
