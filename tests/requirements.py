"""What some tests need and not every machine has."""

from __future__ import annotations

import os

import pytest


def need(what: str, lacking: str | None) -> None:
    """Skip with the reason `lacking` (None: it is there). Where KHTST_REQUIRE names `what` (x86,arm,onnx,minilm,smollm2), fail instead."""
    if lacking is None:
        return
    if what in os.environ.get("KHTST_REQUIRE", "").split(","):
        pytest.fail(f"KHTST_REQUIRE names {what!r}: {lacking}")
    pytest.skip(f"needs {what}: {lacking}")
