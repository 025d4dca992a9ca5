"""The example that sends digits as ids from an encoder to a decoder, with few steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from tests.examples.test_train_codes import ROOT, run

NUMBER = r"(\d+(?:\.\d+)?)"


def test_digits(tmp_path: Path) -> None:
    options = ["--steps", "20", "--levels", "2", "--codes", "32", "--target", "x86-avx2"]
    shown = run([sys.executable, str(ROOT / "examples" / "codes_digits.py"), "made", *options], tmp_path)
    match = re.search(rf"codes {NUMBER}, as int32 {NUMBER}, PNG {NUMBER}, one PNG of all {NUMBER}", shown)
    assert match is not None, shown
    codes, wide, png, sheet = map(float, match.groups())
    # Two ids of 5 bits, and at most 7 bits of filling in the whole file.
    assert codes == 1.25 and wide == 8.0 and codes < sheet < png
    assert "449 digits, 898 ids, 0 without a code" in shown
    assert "level 1: ids 0 to 31" in run(shlex.split(shown.splitlines()[-1]), tmp_path)
