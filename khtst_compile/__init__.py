"""khtst-compile: quantize PyTorch models to int8 and lower them, with the proof attached.

The public names load on first use, so importing the package pulls in neither torch nor tvm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from khtst_compile.api import export, inspect, lower, quantize, split, verify
    from khtst_compile.benchmark import bench
    from khtst_compile.codes import Codes, read_codes, write_codes
    from khtst_compile.coding import decode, encode
    from khtst_compile.evaluate import perplexity
    from khtst_compile.runtime import load

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "quantize": "khtst_compile.api",
    "lower": "khtst_compile.api",
    "export": "khtst_compile.api",
    "split": "khtst_compile.api",
    "verify": "khtst_compile.api",
    "inspect": "khtst_compile.api",
    "encode": "khtst_compile.coding",
    "decode": "khtst_compile.coding",
    "Codes": "khtst_compile.codes",
    "read_codes": "khtst_compile.codes",
    "write_codes": "khtst_compile.codes",
    "bench": "khtst_compile.benchmark",
    "load": "khtst_compile.runtime",
    "perplexity": "khtst_compile.evaluate",
}

__all__ = [
    "Codes",
    "__version__",
    "bench",
    "decode",
    "encode",
    "export",
    "inspect",
    "integrations",
    "load",
    "lower",
    "perplexity",
    "quantize",
    "read_codes",
    "split",
    "verify",
    "write_codes",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "integrations":
        return importlib.import_module("khtst_compile.integrations")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
