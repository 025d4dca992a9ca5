"""Artifacts inside other libraries; each module is imported on first use, because each needs its library."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("sentence_transformers",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
