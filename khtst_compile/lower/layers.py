"""What each layer of an fp32 program puts out, named as the kernels of its lowered form are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import fx

from khtst_compile.lower.fuse import fuse, fuse_linears
from khtst_compile.program import Program, site_of

Array = npt.NDArray[Any]


def layer_outputs(program: Program, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, Array], dict[str, Array]]:
    """(outputs by name, site -> output of the linear there, a residual that is added right after it included, as in its kernel)."""
    fused, _ = fuse(program, {"linears": partial(fuse_linears, activations=False)})
    layers: dict[str, Array] = {}
    twice: set[str] = set()  # a module with several linears, or one called again: its site names no single layer

    def hook(node: fx.Node, value: Any) -> Any:
        if node.target is torch.ops.khtst.linear.default:
            site = site_of(node)
            twice.update([site] if site in layers else [])
            layers[site] = value.numpy()
        return value

    with torch.no_grad():
        outputs = fused.run(inputs, hook)
    return {k: v.numpy() for k, v in outputs.items()}, {k: v for k, v in layers.items() if k not in twice}
