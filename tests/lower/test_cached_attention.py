"""A graph with khtst::attention_cached, compiled: any batch, number of new positions and length of the cache, 0 included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import khtst_compile.ops  # noqa: F401
from khtst_compile.capture.export import to_program
from khtst_compile.capture.shapes import Axis
from khtst_compile.capture.wrapper import Named
from khtst_compile.layout import Packed
from khtst_compile.lower.build import build, export_library
from khtst_compile.lower.relax import kernel_graph, to_relax
from khtst_compile.lower.replay import replay
from khtst_compile.runtime import Engine
from khtst_compile.targets.table import target

HEADS, GROUPS, DIM, WIDTH = 4, 2, 8, 24


class Layer(nn.Module):
    """One projection to q, k and v, attention to the cache and to itself, one projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x)
        offsets = [0, HEADS * DIM, (HEADS + GROUPS) * DIM]
        attended = torch.ops.khtst.attention_cached(y, y, y, past_k, past_v, None, HEADS, GROUPS, DIM, DIM**-0.5, offsets)
        return self.out(attended)


def inputs(batch: int, new: int, past: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(past)
    cache = (past, batch, GROUPS * DIM)
    return {"x": torch.randn(batch, new, WIDTH), "past_k": torch.randn(cache), "past_v": torch.randn(cache)}


def test_compiled_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = Layer().eval(), inputs(2, 3, 5)
    axes = [
        Axis("batch", (("x", 0), ("past_k", 1), ("past_v", 1)), 1, 64),
        Axis("seq", (("x", 1),), 1, 64),
        Axis("past", (("past_k", 0), ("past_v", 0)), 0, 64),
    ]
    meta = {"source": "Layer", "task": "module", "tokenizer": None, "max_length": None}
    graph = kernel_graph(to_program(Named(model, list(example)), example, axes, meta))
    assert [t.operator for t in graph.taps] == ["linear", "attention_cached", "linear"]
    lowered = to_relax(graph, target("x86"))
    export_library(build(lowered.module, target("x86")), tmp_path / "library.so", target("x86"))
    weights = [np.array(w.packed if isinstance(w, Packed) else w) for w in lowered.weights]
    engine = Engine(tmp_path / "library.so", weights, 1)
    for sizes in ((1, 1, 0), (2, 3, 5), (1, 1, 40), (3, 7, 0)):
        given = inputs(*sizes)
        output, *taps = engine.call("taps", [t.numpy() for t in given.values()])
        rows = replay(graph, [output], taps, given)
        assert len(rows) == 4 and all(r.ok for r in rows), rows
        np.testing.assert_allclose(output, model(**given).detach().numpy(), rtol=0, atol=2e-6)  # a few ulp of values up to 2
