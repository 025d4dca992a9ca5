"""Kernels compiled on their own, without a program around them: to measure them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from khtst_compile.targets.isa import Isa
from khtst_compile.targets.pipeline import CPU

Run = Callable[[], object]


def compile_alone(functions: Mapping[str, Any], isa: Isa) -> Any:
    """Name -> PrimFunc compiled into one module, whose items are called with the tensors of `bind`."""
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    return tvm.tirx.build(tvm.IRModule(named), target=tvm.target.Target(isa.tvm_target()), pipeline=CPU)


def tensors(arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
    """Copies of arrays that a kernel takes, aligned to 64 bytes."""
    return [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]


def bind(function: Any, arrays: Sequence[npt.NDArray[Any]]) -> Run:
    """A call of the function with these arrays."""
    held = tensors(arrays)
    return lambda: function(*held)
