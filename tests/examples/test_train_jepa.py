"""The predictors' example trains, says what came of it, and saves what the compiler takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "train_jepa.py")


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_image(tmp_path: Path) -> None:
    shown = run(EXAMPLE, str(tmp_path / "a"), "--steps", "84", "--plot")
    found = re.search(r"linear probe: (\S+), random encoder (\S+), pixels (\S+)", shown)
    assert found is not None and all(0.85 < float(x) < 1 for x in found.groups())
    assert (tmp_path / "a" / "training.png").stat().st_size > 10_000
    variances = [float(x) for x in re.findall(r"variance (\d\.\d+)", shown)]
    assert len(variances) == 3 and min(variances[1:]) < variances[0]  # each epoch has a mask of its own
    command = re.search(r"^khtst-compile (quantize .*) -o OUT$", shown, re.MULTILINE)
    assert command is not None
    run("-m", "khtst_compile", *command[1].split(), "-o", str(tmp_path / "q"), "-q")
    manifest = json.loads((tmp_path / "q" / "manifest.json").read_text())
    assert manifest["inputs"][0]["shape"] == ["batch", 1, 8, 8]
    assert manifest["passes"][-1]["changed"] == 1  # the first layer reads 9 features, too few


@pytest.mark.parametrize("variant, part", [("action", "predictor"), ("image-codes", "codes")])
def test_other_parts(variant: str, part: str, tmp_path: Path) -> None:
    shown = run(EXAMPLE, str(tmp_path), "--variant", variant, "--part", part, "--steps", "16", "--fractions", "0.3", "0.6")
    assert re.search(r"fractions: 0.3: \d+ epochs 0.6: \d+ epochs", shown)
    assert (tmp_path / "model.pt2").is_file() and (tmp_path / "calibration.npz").is_file()
