"""The training examples of the codebooks and of the state space model, with few steps, and the commands they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def train(name: str, *options: str, folder: Path) -> str:
    """Run it in `folder`; returns what it prints."""
    shown = run([sys.executable, str(ROOT / "examples" / f"train_{name}.py"), "made", "--plot", *options], folder)
    assert (folder / "made" / "training.png").stat().st_size > 5000
    return shown


def go_on(shown: str, folder: Path) -> None:
    """The command it prints last, and the ones that come after it."""
    run([*shlex.split(shown.splitlines()[-1].replace("OUT", "q")), "-q"], folder)
    run(["khtst-compile", "lower", "q", "--target", "x86-avx2", "-o", "x86", "-q"], folder)
    run(["khtst-compile", "export", "q", "--format", "onnx", "-o", "onnx", "-q"], folder)
    for made in ("x86", "onnx"):
        assert json.loads(run(["khtst-compile", "verify", made, "--json", "-q"], folder))["ok"]


@pytest.mark.parametrize("mode, levels, codes", [("gsq", 1, 80), ("ste_ema", 2, 48)])
def test_train_gsq(mode: str, levels: int, codes: int, tmp_path: Path) -> None:
    options = ["--steps", "20", "--mode", mode, "--levels", str(levels), "--codes", str(codes)]
    shown = train("gsq", *options, folder=tmp_path)
    deltas = [float(d) for d in re.findall(r"delta_ort (\S+)", shown)]
    assert len(deltas) == levels and max(deltas) <= 1e-6 and ("tight frame" in shown) == (codes > 64)
    if mode == "gsq":
        go_on(shown, tmp_path)


def test_train_ssm(tmp_path: Path) -> None:
    shown = train("ssm", "--steps", "60", folder=tmp_path)
    found = re.findall(r"error (\S+) after the first task, (\S+) after both", shown)
    (learned, forgotten), _, (_, kept), (before, after) = [(float(a), float(b)) for a, b in found]
    assert learned < forgotten and kept < forgotten and after < before
    go_on(shown, tmp_path)
