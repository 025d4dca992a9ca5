"""Program -> Relax -> library, and Program -> ONNX.

Importing this package binds it to the name `lower` of `khtst_compile`, where users expect the function; so the package can be called, and
`khtst_compile.lower(...)` is the function of `khtst_compile.api` whichever of the two was bound last.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from khtst_compile import api

        return api.lower(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
