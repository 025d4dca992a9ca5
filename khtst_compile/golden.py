"""What a quantized artifact says of itself: a few samples with the outputs they should have, and the ids its inputs may hold."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import fx

from khtst_compile import windows
from khtst_compile.parity import relative_error_db, worst_cosine
from khtst_compile.program import Program, call_nodes

Array = npt.NDArray[Any]
SAMPLES = 4
"""Kept in an artifact to compare against; a few are enough, they pass through every layer."""


def golden_values(program: Program, quantized: Program, samples: Any) -> tuple[dict[str, Array], dict[str, float]]:
    """A few samples with the outputs of the fp32 and the quantized program, and how far apart these are."""
    batch = next(iter(samples))
    with torch.no_grad():
        if "cache" in program.meta:
            batch = windows.golden(program, batch)
            given = windows.encoded(quantized, batch)
        else:
            batch = given = {k: v[:SAMPLES] for k, v in batch.items()}
        exact, rounded = program.run(batch), quantized.run(given)
    golden = {f"in/{k}": v.numpy() for k, v in given.items()}
    exact = {name: exact[name] for name in program.results()}
    golden |= {f"fp32/{k}": v.numpy() for k, v in exact.items()} | {f"quantized/{k}": v.numpy() for k, v in rounded.items()}
    figures, chosen = {}, _behind_lookups(quantized)
    for name, value in exact.items():
        if name in chosen and not value.is_floating_point():
            figures[f"{name}: share that differs"] = float((rounded[name] != value).double().mean()) if value.numel() else 0.0
        if value.is_floating_point():
            figures[f"{name}: relative error dB"] = _finite(relative_error_db(rounded[name].numpy(), value.numpy()))
            figures[f"{name}: worst cosine"] = worst_cosine(rounded[name].numpy(), value.numpy())
    return golden, figures


def _behind_lookups(program: Program) -> set[str]:
    """The outputs that depend on ids found in a codebook: of these a rounding can change whole codes."""
    lookups = (torch.ops.khtst.codebook_lookup.default, torch.ops.khtst.step_lookup.default)
    reached: set[Any] = set()
    found: set[str] = set()
    for node in program.graph.nodes:
        if node.target in lookups or reached.intersection(node.all_input_nodes):
            reached.add(node)
        if node.op == "output":
            found = {s.name for s, n in zip(program.outputs, node.args[0], strict=True) if n in reached}
    return found


def _finite(db: float) -> float:
    return max(db, -200.0)  # JSON has no infinity; two equal float32 tensors are at -200 dB for all purposes


def id_ranges(program: Program) -> dict[str, list[int]]:
    """Public integer inputs that index a table -> [0, rows - 1]: kernels do not check an index."""
    names = dict(zip(program.user_inputs(), (s.name for s in program.inputs), strict=True))
    ranges: dict[str, list[int]] = {}
    for node in call_nodes(program.graph, torch.ops.aten.embedding.default):
        rows, ids = node.args[0], node.args[1]
        if isinstance(rows, fx.Node) and isinstance(ids, fx.Node) and ids.name in names:
            last = int(rows.meta["val"].shape[0]) - 1
            ranges[names[ids.name]] = [0, min(last, ranges.get(names[ids.name], [0, last])[1])]
    return ranges
