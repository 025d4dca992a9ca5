"""Bool buffers that Python branches on ("was this initialized?") as plain bools while a model is exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from khtst_compile.capture.refusals import refusal
from khtst_compile.errors import CaptureError
from khtst_compile.program import WRAPPED

INITIALIZED = ("initted", "initialized", "inited", "is_initialized")


class _Asked(torch.Tensor):
    """A flag that remembers whether Python asked for its truth."""

    asked: list[bool]
    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __bool__(self) -> bool:
        self.asked.append(True)
        return bool(self.as_subclass(torch.Tensor))


@contextmanager
def plain_flags(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, each one-element bool buffer that a run on `examples` branches on is a plain bool; afterwards the module is as it was.

    A branch on a tensor cannot be exported, though in eval mode the flag never changes. Raises CaptureError for a codebook that was never
    initialized: its first run would make it from the example inputs.
    """
    flags = [
        (owner, name, buffer, f"{path}.{name}".removeprefix(WRAPPED).strip("."))
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.numel() == 1 and (buffer.dtype is torch.bool or name in INITIALIZED)
    ]
    for _, name, buffer, path in flags:
        if name in INITIALIZED and not bool(buffer):
            raise CaptureError(
                f"buffer {path!r} is False: this codebook waits for its first training batch to be initialized from; train the model, or "
                "load a trained checkpoint, before capturing it"
            )
    if not flags:
        yield
        return
    before = {owner: dict(owner._buffers) for owner, *_ in flags}
    watched: list[tuple[nn.Module, str, torch.Tensor, list[bool]]] = []
    try:
        for owner, name, buffer, _ in flags:
            flag: Any = buffer.detach().clone().as_subclass(_Asked)
            flag.asked = []
            owner._buffers[name] = flag
            watched.append((owner, name, buffer, flag.asked))
        try:
            module(*(t.clone() for t in examples.values()))
        except Exception as error:  # whatever the model's own code raises
            raise refusal(error) from error
        for owner, name, buffer, asked in watched:
            if asked:
                del owner._buffers[name]
                object.__setattr__(owner, name, bool(buffer))
            else:
                owner._buffers[name] = buffer
        yield
    finally:
        for owner, buffers in before.items():
            for name in buffers:
                owner.__dict__.pop(name, None)
            owner._buffers.clear()
            owner._buffers.update(buffers)
