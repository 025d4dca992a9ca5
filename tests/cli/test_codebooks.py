"""What the command line says and writes of models with codebooks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.cli.conftest import Cli


def test_a_stray_codebook_is_refused_and_projected_where_asked(cli: Cli, tmp_path: Path) -> None:
    command = ("quantize", "tests.quantizers:stray_model", "--random", "--limit", 8, "-o", tmp_path / "q")
    refused = cli(*command, code=3)
    assert "codebook 'quantizer'" in refused.stderr and "--retract" in refused.stderr and not (tmp_path / "q").exists()
    printed = json.loads(cli(*command, "--retract", "--json", "-q").stdout)
    assert printed["recipe"].startswith("freeze_codebook{retract=true} | smooth") and printed["passes"][0]["changed"] == 1


def test_dead_codes_are_pruned_and_vectors_without_a_code_refused(cli: Cli, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).standard_normal((8, 10, 16), dtype=np.float32)
    samples[3, 2] = 2e18
    np.save(tmp_path / "x.npy", samples)
    command = (
        "quantize",
        "tests.quantizers:bare_model",
        "--calib",
        tmp_path / "x.npy",
        "-o",
        tmp_path / "q",
        "--recipe",
        "freeze_codebook",
    )
    cli(*command, "--prune-dead", "-q")
    (found,) = json.loads((tmp_path / "q" / "manifest.json").read_text())["meta"]["codebooks"]
    assert found["lost"] == 1 and found["vectors"] == 80 and found["codes"][0] == len(found["pruned"][0]) < 32
    refused = cli(*command, "--strict", code=3)
    assert "1 of 80 calibration vectors have no code" in refused.stderr
    unknown = cli("quantize", "tests.tiny:mlp", "--random", "-o", tmp_path / "r", "--recipe", "w8a8", "--strict", code=2)
    assert "--strict: the recipe has no step 'freeze_codebook'" in unknown.stderr
