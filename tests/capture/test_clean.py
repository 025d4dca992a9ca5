"""What capture takes out of a graph because it computes nothing."""

from __future__ import annotations

import torch
from torch import nn

from khtst_compile.capture.factory import capture_module
from khtst_compile.program import call_nodes

aten = torch.ops.aten


class Growing(nn.Module):
    """Lists that begin empty: of one part, of two, and of another dtype."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        one = torch.cat([x.new_empty(x.shape[0], 0), x], -1)
        two = torch.cat([torch.cat([x.new_empty(x.shape[0], 0), x], -1), x + 1], -1)
        wider = torch.cat([torch.empty(x.shape[0], 0, dtype=torch.float64), x], -1)
        return one * 2, two, wider


def test_what_a_list_begins_with_is_left_out() -> None:
    x = torch.randn(3, 4)
    program = capture_module(Growing(), (x,))
    parts = [len(node.args[0]) for node in call_nodes(program.graph, aten.cat.default)]  # type: ignore[arg-type]
    assert parts == [2, 2], "the second list, and the third, whose empty part makes it float64"
    assert len(list(call_nodes(program.graph, aten.empty.memory_format, aten.new_empty.default))) == 1
    for got, want in zip(program.run({"x": x}).values(), Growing()(x), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
