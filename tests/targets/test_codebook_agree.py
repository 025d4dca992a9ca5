"""Every engine that runs here, on every codebook of the tests: the ids and the bits of torch's operators, in both forms of the kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

from khtst_compile import cpu
from khtst_compile.layout import Packed
from khtst_compile.lower.build import build, export_library
from khtst_compile.lower.onnx import export_onnx
from khtst_compile.lower.relax import Graph, kernel_graph, to_relax
from khtst_compile.program import Program
from khtst_compile.runtime import Engine
from khtst_compile.targets.cpu_target import CpuTarget
from khtst_compile.targets.isa import X86_ISAS, Isa
from tests.targets.lookups import BOOKS, GRIDS, check, names, program, rows, wanted

KINDS = names(BOOKS, GRIDS)
FORMS = [isa for isa in X86_ISAS if not cpu.missing(isa.cpu_flags)] + [isa.emulate() for isa in X86_ISAS[:-1]]


@pytest.fixture(scope="module")
def made() -> Program:
    return program(BOOKS, GRIDS)


@pytest.fixture(scope="module")
def graph(made: Program) -> Graph:
    return kernel_graph(made)


@pytest.mark.parametrize("isa", FORMS, ids=lambda isa: isa.name)
def test_x86(isa: Isa, made: Program, graph: Graph, tmp_path: Path) -> None:
    """On one thread and on two, all rows at once, one alone, and none."""
    target = CpuTarget(isa.name, isa)
    lowered = to_relax(graph, target)
    export_library(build(lowered.module, target), tmp_path / "model.so", target)
    weights = [w.packed if isinstance(w, Packed) else w for w in lowered.weights]
    z = rows(BOOKS, GRIDS)
    for threads in (1, 2):
        engine = Engine(tmp_path / "model.so", weights, threads)
        for some in (z, z[60:61], z[:0]):
            got = [np.asarray(v) for v in engine.call("main", [some.contiguous().numpy()])]
            check(f"{isa.name}, {threads} threads, {len(some)} rows", got, wanted(made, some), KINDS)


def test_onnx(made: Program, tmp_path: Path) -> None:
    export_onnx(made, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    z = rows(BOOKS, GRIDS)
    for some in (z, z[60:61], z[:0]):
        check(
            f"onnx, {len(some)} rows",
            session.run(None, {made.inputs[0].name: some.contiguous().numpy()}),
            wanted(made, some),
            KINDS,
        )


def test_the_sample_can_show_a_fault() -> None:
    """Scores of a plain product choose other codes for many of these rows."""
    z, at, moved = rows(BOOKS, GRIDS), 0, {}
    for name, book in BOOKS.items():
        part = z[:, at : at + book.codes.shape[-1]]
        at += part.shape[1]
        ids = torch.ops.khtst.codebook_lookup(part, book.codes, book.bias, book.table, book.running, False)[1][:, 0]
        scores = part @ book.codes[0].T + (0.0 if book.bias is None else book.bias[0])
        moved[name] = int((scores.argmax(-1) != ids).sum())
    assert sum(moved.values()) > 100, moved
