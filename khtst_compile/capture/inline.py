"""Parts of a graph under a mode that changes nothing on a CPU without gradients, put back into the graph they were cut out of."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from khtst_compile.errors import CaptureError
from khtst_compile.program import source_line

# Wrapper -> at which argument the wrapped graph is; what comes behind it are its inputs.
_WRAPPERS = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}


def inline_modes(ep: ExportedProgram) -> None:
    """Inline, in place, what lies under autocast for another device or switched off, or under no_grad.

    Raises CaptureError for autocast that is switched on for the CPU, which computes in another dtype.
    """
    while _inline_once(ep.graph_module):
        pass
    graph = ep.graph_module.graph
    results = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    for spec, result in zip(ep.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node) and isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(result.name)
    ep.graph_module.recompile()


def _inline_once(module: fx.GraphModule) -> bool:
    found = False
    for node in list(module.graph.nodes):
        at = _WRAPPERS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
        if at is None or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        if _counts(node):
            raise CaptureError(
                f"{source_line(node)}: wrap_with_autocast for the CPU is on, which computes in {node.args[1]}; needed: float32; leave the "
                "model without autocast"
            )
        _inline(module, node, node.args[at], node.args[at + 1 :])
        found = True
    return found


def _counts(node: fx.Node) -> bool:
    """Whether the mode changes what is computed here."""
    device, _, enabled = (*node.args, None, None, None)[:3]
    return node.target.__name__ == "wrap_with_autocast" and device == "cpu" and bool(enabled)  # type: ignore[union-attr]


def _inline(module: fx.GraphModule, call: fx.Node, body: Any, inputs: Any) -> None:
    part: fx.GraphModule = getattr(module, body.target)
    given = dict(zip((n for n in part.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    made: dict[fx.Node, Any] = dict(given)
    results: Any = ()
    for inner in part.graph.nodes:
        if inner.op == "placeholder":
            continue
        if inner.op == "output":
            results = fx.map_arg(inner.args[0], lambda n: made[n])
            continue
        with module.graph.inserting_before(call):
            if inner.op == "get_attr":
                setattr(module, name := f"{body.target}_{inner.target}", getattr(part, inner.target))
                made[inner] = module.graph.get_attr(name)
            else:
                made[inner] = module.graph.node_copy(inner, lambda n: made[n])
        made[inner].meta = dict(inner.meta)
    if isinstance(results, (tuple, list)):
        for reader in list(call.users):
            assert reader.target is operator.getitem
            reader.replace_all_uses_with(results[reader.args[1]])  # type: ignore[index]
            module.graph.erase_node(reader)
    else:
        call.replace_all_uses_with(results)
    module.graph.erase_node(call)
    if not body.users:
        module.graph.erase_node(body)
        delattr(module, body.target)
