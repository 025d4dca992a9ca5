"""What `khtst-compile quantize` takes, of a trained model: the exported program, and samples to calibrate with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

PROGRAM, CALIBRATION = "model.pt2", "calibration.npz"


class _Plain(nn.Module):
    """The model with a bare tuple (or tensor) for a result, as named ones cannot be stored; inputs keep their names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # torch.export names inputs after the signature.
        self.forward = lambda *inputs: _bare(model(*inputs))
        self.forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]


def _bare(found: object) -> object:
    return found if isinstance(found, Tensor) else tuple(found)  # type: ignore[arg-type]


def save(model: nn.Module, inputs: tuple[Tensor, ...], samples: Sequence[tuple[Tensor, ...]], folder: Path) -> None:
    """Write PROGRAM and CALIBRATION into `folder`: the model in eval mode, on the CPU, its first axis dynamic.

    inputs: an example of forward's arguments, of batch 2 or more; samples: tuples like it, which are joined along the batch. Then
    `khtst-compile quantize FOLDER/model.pt2 --calib FOLDER/calibration.npz -o OUT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(inspect.signature(model.forward).parameters)[: len(inputs)]
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(
            _Plain(model).cpu().eval(),
            tuple(t.cpu() for t in inputs),
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            strict=False,
        )
    torch.export.save(program, folder / PROGRAM)
    joined = {name: torch.cat([s[i] for s in samples]).cpu().numpy() for i, name in enumerate(names)}
    np.savez(folder / CALIBRATION, **joined)  # type: ignore[arg-type]
