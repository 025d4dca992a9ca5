"""Gives any model one call signature: named tensors in, a flat tuple of named tensors out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from khtst_compile.errors import CaptureError


class _Seen:
    """The names of the last call's results."""

    names: tuple[str, ...] = ()


class Named(nn.Module):
    """`forward(name, ...) -> tuple of tensors` around a module, which sits under `khtst_model` (program.WRAPPED).

    names: the inputs, in call order; call(module, {name: tensor}) -> whatever the module returns, by default `module(**inputs)`.
    `output_names()` gives the names of the results of the last call.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], call: Callable[[nn.Module, dict[str, torch.Tensor]], Any] | None = None
    ):
        super().__init__()
        self.khtst_model = module
        # In an object of its own: torch.export undoes what tracing assigns to a module's attributes, lists included.
        self._seen = seen = _Seen()

        def forward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = dict(zip(names, values, strict=True))
            found = flatten(module(**inputs) if call is None else call(module, inputs))
            seen.names = tuple(found)
            return tuple(found.values())

        # torch.export names graph inputs after the signature, and *values has no names of its own.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        self.forward = forward

    def output_names(self) -> tuple[str, ...]:
        """The names of the results of the last call."""
        return self._seen.names


def flatten(result: Any, name: str = "") -> dict[str, torch.Tensor]:
    """A tensor, or nested tuples, lists, dicts and dataclass-like outputs of tensors -> name -> tensor, in order.

    A lone tensor is "output", positions are "output_0", dictionary keys stay; None is left out. Raises CaptureError for anything else.
    """
    if isinstance(result, torch.Tensor):
        return {name or "output": result}
    if result is None:
        return {}
    if isinstance(result, dict):
        parts = {f"{name}_{k}" if name else str(k): v for k, v in result.items()}
        if len(parts) < len(result):
            raise CaptureError(
                f"the model returns a dict whose keys {list(result)} are not distinct as text; give one another key"
            )
    elif isinstance(result, (tuple, list)):
        fields = getattr(result, "_fields", None)
        labels = fields if fields is not None else range(len(result))
        base = name or ("" if fields is not None else "output")
        parts = {f"{base}_{k}" if base else str(k): v for k, v in zip(labels, result, strict=True)}
    else:
        raise CaptureError(
            f"the model returns a {type(result).__name__} at {name or 'its top level'}; needed: a tensor, or tuples, lists or "
            "dicts of tensors. Return those from forward, or wrap the model in a module that does"
        )
    flat: dict[str, torch.Tensor] = {}
    for key, value in parts.items():
        inner = flatten(value, key)
        if both := flat.keys() & inner.keys():
            raise CaptureError(
                f"the model returns two tensors that would both be called {min(both)!r}; give one another key in forward"
            )
        flat.update(inner)
    return flat
