"""The real entry point in a process of its own, and artifacts of a tiny model made through it once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(sys.executable).parent / "khtst-compile"
Cli = Callable[..., subprocess.CompletedProcess[str]]


def run_cli(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run khtst-compile from the root of the tree and check its exit code."""
    done = subprocess.run([str(SCRIPT), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="session")
def cli() -> Cli:
    return run_cli


@dataclass(frozen=True)
class Made:
    """samples: .npy of (64, 32) float32; what each verb wrote, and the JSON it printed."""

    samples: Path
    quantized: Path
    library: Path
    onnx: Path
    printed: dict[str, Any]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`tests.tiny:mlp` quantized, lowered for this machine and exported."""
    folder = tmp_path_factory.mktemp("made")
    samples = folder / "x.npy"
    np.save(samples, np.random.default_rng(0).standard_normal((64, 32), dtype=np.float32))
    q, x86, onnx = folder / "q", folder / "x86", folder / "onnx"
    recipe = "smooth{alpha=0.5} | w8a8"
    steps = {
        "quantize": ("quantize", "tests.tiny:mlp", "--calib", samples, "-o", q, "--recipe", recipe, "--keep-fp32", "he*d"),
        "lower": ("lower", q, "--target", "x86-avx2", "-o", x86),
        "export": ("export", q, "--format", "onnx", "-o", onnx),
    }
    printed = {name: json.loads(run_cli(*step, "--json", "-q").stdout) for name, step in steps.items()}
    return Made(samples, q, x86, onnx, printed)
