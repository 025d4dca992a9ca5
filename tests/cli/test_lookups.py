"""A module that calls khtst::codebook_lookup by hand, from the command line: quantized around it, exported, and run to the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from khtst_compile import artifact
from tests.cli.conftest import Cli


@pytest.mark.parametrize("recipe", ["w8a8", "smooth{alpha=0.5} | rotate{block=16} | w8a8"])
def test_quantize_and_export(cli: Cli, recipe: str, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).standard_normal((64, 32), dtype=np.float32)
    np.save(tmp_path / "x.npy", samples)
    cli("quantize", "tests.tiny:coder", "--calib", tmp_path / "x.npy", "-o", tmp_path / "q", "--recipe", recipe, "-q")
    shown = json.loads(cli("inspect", tmp_path / "q", "--json").stdout)
    passes = {p["pass"]: p for p in shown["passes"]}
    assert passes["w8a8"]["changed"] == 3, "both linears before the codebook and the one behind it"
    cli("export", tmp_path / "q", "--format", "onnx", "-o", tmp_path / "onnx", "-q")
    cli("verify", tmp_path / "onnx", "--reference", tmp_path / "q", "-q")
    session = ort.InferenceSession(str(tmp_path / "onnx" / artifact.ONNX_MODEL), providers=["CPUExecutionProvider"])
    values, ids = session.run(None, {session.get_inputs()[0].name: samples})
    assert values.shape == (64, 8) and ids.dtype == np.int64 and ids.shape == (64, 2) and len(np.unique(ids)) > 10
