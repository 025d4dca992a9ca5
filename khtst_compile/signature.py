"""Names, dtypes and shapes of a program's inputs and outputs, and the check of what a caller passes. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.arrays import native
from khtst_compile.checks import check_type
from khtst_compile.errors import UsageError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype ("float32", "int64", ...) and shape of one input or output; a dynamic axis is its name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> TensorSpec:
        return TensorSpec(data["name"], data["dtype"], tuple(data["shape"]))


def check_inputs(
    inputs: Mapping[str, Array],
    specs: tuple[TensorSpec, ...],
    axes: dict[str, Any],
    ranges: dict[str, Any],
) -> list[Array]:
    """The arrays in call order.

    axes: dynamic axis -> [min, max]; ranges: input -> [lowest, highest] value allowed (token ids index a table).
    Raises UsageError naming the input, what was found and what is needed.
    """
    if type(inputs) is not dict:
        check_type(inputs, "inputs", Mapping, f"a dict from name to array, with {[s.name for s in specs]}")
    if len(inputs) != len(specs) or any(s.name not in inputs for s in specs):
        names = [s.name for s in specs]
        unknown = [n for n in inputs if n not in names]
        missing = [n for n in names if n not in inputs]
        raise UsageError(f"inputs: missing {missing}, unknown {unknown}; needed: {names}")
    sizes: dict[str, tuple[int, str]] = {}
    arrays = []
    for spec in specs:
        array = _array(inputs[spec.name], spec)
        if array.dtype != spec.dtype and array.dtype.name != spec.dtype:  # the name, which takes longer, for other byte orders
            raise UsageError(
                f"input {spec.name!r}: dtype is {array.dtype.name}; needed: {spec.dtype}; convert with .astype({spec.dtype!r})"
            )
        _check_shape(spec, array, sizes)
        if spec.name in ranges and array.size:
            low, high = ranges[spec.name]
            if np.minimum.reduce(array, axis=None) < low or np.maximum.reduce(array, axis=None) > high:
                raise UsageError(f"input {spec.name!r}: values {array.min()}..{array.max()}; needed: {low}..{high}")
        arrays.append(array)
    for axis, (size, where) in sizes.items():
        low, high = axes.get(axis, (0, None))
        if size < low or (high is not None and size > high):
            raise UsageError(f"{where}: axis {axis!r} is {size}; needed: {low}..{high}")
    return arrays


def _array(value: Any, spec: TensorSpec) -> Array:
    try:
        return native(np.asarray(value))
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors with gradients
        raise UsageError(f"input {spec.name!r} is no array ({error}); needed: {spec.dtype} of shape {spec.shape}") from error


def _check_shape(spec: TensorSpec, array: Array, sizes: dict[str, tuple[int, str]]) -> None:
    found = tuple(array.shape)
    where = f"input {spec.name!r}"
    if len(found) != len(spec.shape):
        raise UsageError(f"{where}: shape is {found}; needed: {spec.shape}")
    for size, wanted in zip(found, spec.shape, strict=True):
        if isinstance(wanted, int) and size != wanted:
            raise UsageError(f"{where}: shape is {found}; needed: {spec.shape}")
        if isinstance(wanted, str):
            if wanted in sizes and sizes[wanted][0] != size:
                other = sizes[wanted][1]
                raise UsageError(f"{where}: axis {wanted!r} is {size}, but {other} has {sizes[wanted][0]}; they must be equal")
            sizes.setdefault(wanted, (size, where))
