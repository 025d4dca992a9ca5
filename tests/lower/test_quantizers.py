"""Quantizers that people train with, the whole way: frozen, in int8, compiled and in ONNX, each kernel and each lookup judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import khtst_compile as kc
from tests.codes.coders import captured
from tests.quantizers import STEPS, VECTORS, model, samples

KINDS = ("grouped", "heads", "residual cosine", "stiefel frame", "fsq", "lfq")


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_gives_the_ids_of_the_quantized_program(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    np.savez(tmp_path / "x.npz", x=samples(7, 64).numpy())
    made = kc.quantize(captured(model({**VECTORS, **STEPS}[kind]())), tmp_path / "q", calib=tmp_path / "x.npz")
    assert made.manifest["meta"]["codebooks"] and made.manifest["passes"][0]["skipped"] == []
    kc.lower(tmp_path / "q", tmp_path / "x86", target="x86-avx2")  # compares every kernel with torch, ids and values to the bit
    kc.export(tmp_path / "q", tmp_path / "onnx")
    for folder in ("x86", "onnx"):
        report = kc.verify(tmp_path / folder, reference=tmp_path / "q")
        assert report.ok and any(row.what.endswith("ids") for row in report.rows), [row.what for row in report.rows]
