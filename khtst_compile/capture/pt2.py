"""A `.pt2` file, as torch.export.save writes it -> Program."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from khtst_compile.capture.export import describe
from khtst_compile.capture.shapes import Axis, Range, identifier
from khtst_compile.errors import CaptureError, UsageError
from khtst_compile.program import Program


def capture_file(path: Path, *, task: str | None, shapes: Mapping[str, Range] | None) -> Program:
    """Load an exported program. Its dynamic axes were fixed when it was exported, so `shapes` may only repeat them.

    Raises UsageError for a file that is no such archive, is damaged or holds pickles; CaptureError where the graph cannot be used.
    """
    path = path.resolve()
    refuse_pickles(path)
    try:
        ep = torch.export.load(str(path))
    except Exception as error:  # the reader raises whatever the damaged part provokes
        text = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"{path}: damaged, or written by another version of torch ({type(error).__name__}: {text}); export it again"
        ) from error
    half = sorted(n for n, t in ep.state_dict.items() if t.dtype in (torch.float16, torch.bfloat16))
    if half:
        raise CaptureError(
            f"{path}: {half[0]} is {ep.state_dict[half[0]].dtype}, and the graph was traced with it; export model.float() instead"
        )
    names, axes = signature(ep)
    for name, wanted in (shapes or {}).items():
        have = {a.name: (a.low, a.high) for a in axes}
        if have.get(name) != tuple(wanted):
            raise UsageError(
                f"shapes: {name}={wanted[0]}..{wanted[1]}: the axes of a .pt2 file are fixed when it is exported; it has {have}"
            )
    outputs = [s for s in ep.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    labels = ["output"] if len(outputs) == 1 else [f"output_{i}" for i in range(len(outputs))]
    meta: dict[str, Any] = {
        "source": str(path),
        "task": task or "module",
        "tokenizer": None,
        "max_length": None,
        "static_axes": [],
    }
    return describe(ep, names, labels, axes, meta)


def refuse_pickles(path: Path) -> None:
    """Raise UsageError unless `path` is a .pt2 archive whose tensors are all raw bytes: loading a pickle can run code."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = archive.namelist()
            configs = [
                json.loads(archive.read(f)) for f in files if f.endswith(("_weights_config.json", "_constants_config.json"))
            ]
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file") from error
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UsageError(f"{path}: not a .pt2 archive, or a damaged one ({error}); write it with torch.export.save") from error
    if not any(f.endswith("archive_format") for f in files) or not configs:
        raise UsageError(
            f"{path}: no torch.export archive of a current version inside; write it with torch.export.save, not torch.save"
        )
    pickled = [name for config in configs for name, entry in config.get("config", {}).items() if entry.get("use_pickle")]
    if pickled:
        raise UsageError(
            f"{path}: {pickled[0]!r} is stored as a pickle, which can run code when opened; export with plain tensors only"
        )


def signature(ep: ExportedProgram) -> tuple[list[str], list[Axis]]:
    """The public inputs' names and the dynamic axes: "batch" for axis 0, "seq" for axis 1 of token ids, else input_axis."""
    nodes = {n.name: n for n in ep.graph.nodes}
    inputs = [s.arg.name for s in ep.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    places: dict[str, list[tuple[str, int]]] = {}
    for name in inputs:
        value = nodes[name].meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"input {name!r} is {type(value).__name__}; needed: tensors only")
        for position, size in enumerate(value.shape):
            if not isinstance(size, int):
                places.setdefault(str(size), []).append((name, position))
    ranges = {str(k): v for k, v in ep.range_constraints.items()}
    axes: list[Axis] = []
    for symbol, where in places.items():
        limits = ranges.get(symbol)
        low = max(1, int(limits.lower)) if limits is not None else 1
        high = int(limits.upper) if limits is not None and limits.upper.is_Integer and limits.upper < 2**31 else 2**31 - 1
        axes.append(Axis(_name(where, len(inputs), {a.name for a in axes}), tuple(where), low, high))
    return inputs, axes


def _name(places: list[tuple[str, int]], inputs: int, taken: set[str]) -> str:
    source, position = places[0]
    if "batch" not in taken and all(i == 0 for _, i in places):
        return "batch"
    if "seq" not in taken and all(i == 1 for _, i in places) and any(n == "input_ids" for n, _ in places):
        return "seq"
    return identifier(f"{source}_{position}")
