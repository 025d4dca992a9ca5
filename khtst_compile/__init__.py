"""khtst-compile: quantize PyTorch models to int8 and lower them, with the proof attached.

The public names load on first use, so importing the package pulls in neither torch nor tvm.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "quantize": "khtst_compile.api",
    "lower": "khtst_compile.api",
    "export": "khtst_compile.api",
    "verify": "khtst_compile.api",
    "bench": "khtst_compile.api",
    "load": "khtst_compile.runtime",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
