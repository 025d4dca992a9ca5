"""act(gate) * up, then quantize_rows, with gate and up projected from the same codes -> one GEMM and khtst::gate_quantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from khtst_compile.lower.match import is_call, sole_user
from khtst_compile.lower.projections import mergeable, merged
from khtst_compile.program import Rewriter, arguments, call_nodes
from khtst_compile.sizes import same_shape

aten, khtst = torch.ops.aten, torch.ops.khtst


def fuse_gates(rw: Rewriter, activations: dict[Any, Callable[[fx.Node], str]]) -> int:
    """activations: operator -> name of the function a node of it computes. Returns how many gates were fused."""
    count = 0
    for quantizer in list(call_nodes(rw.graph, khtst.quantize_rows.default)):
        product = arguments(quantizer)[0]
        if not is_call(product, aten.mul.Tensor) or sole_user(product) is None:
            continue
        for activated, up in (arguments(product)[:2], arguments(product)[1::-1]):
            if isinstance(activated, fx.Node) and activated.target in activations and _pair(rw, activated, up):
                _fuse(rw, quantizer, activated, up, activations[activated.target](activated))
                count += 1
                break
    return count


def _pair(rw: Rewriter, activated: fx.Node, up: Any) -> bool:
    """Are gate and up linears of one input, of equal width, that nothing else reads?"""
    gate = arguments(activated)[0]
    if not all(is_call(n, khtst.w8a8_linear.default) and sole_user(n) is not None for n in (gate, up)):
        return False
    same = gate.args[:2] == up.args[:2] and same_shape(gate.meta["val"].shape, up.meta["val"].shape)
    return same and sole_user(activated) is not None and mergeable(rw, [gate, up])


def _fuse(rw: Rewriter, quantizer: fx.Node, activated: fx.Node, up: fx.Node, act: str) -> None:
    gate = arguments(activated)[0]
    both = merged(rw, [gate, up], before=activated)
    new = rw.call(khtst.gate_quantize.default, both, act, *quantizer.args[1:], before=quantizer)
    for item in list(quantizer.users):
        rw.replace(item, rw.getitem(new, int(item.args[1]), before=quantizer))  # type: ignore[arg-type]
    for node in (quantizer, arguments(quantizer)[0], activated, gate, up):
        rw.graph.erase_node(node)
