"""What passes in one recipe learn of each other."""

from __future__ import annotations

from typing import Any

import torch

from khtst_compile.contract import run_passes
from khtst_compile.program import call_nodes
from khtst_compile.recipe import parse, render


def test_smooth_learns_the_rotation_that_follows() -> None:
    smooth: Any = parse("smooth | rotate{block=64,points=4} | w8a8")[0]
    assert (smooth.block, smooth.points) == (64, 4)
    alone: Any = parse("smooth{block=32} | rotate | w8a8")[0]
    assert alone.block == 32, "a block that was given must stay"


def test_no_multiply_or_rotation_before_a_layer_that_stays_float32(attention: Any) -> None:
    after = run_passes(attention, parse("smooth{alpha=0.5} | rotate{block=32,check=false} | w8a8{keep_fp32=head}"))
    assert not list(call_nodes(after.graph, torch.ops.khtst.rotate.default))
    (head,) = call_nodes(after.graph, torch.ops.aten.linear.default)
    assert head.args[0].target is torch.ops.aten.relu.default


def test_linked_recipes_read_back() -> None:
    for text in ("smooth | rotate | w8a8{keep_fp32=head;out*}", "smooth{alpha=0.5} | w8a8{activations=static,percentile=99.9}"):
        passes = parse(text)
        assert parse(render(passes)) == passes
