"""Scaling an activation for free: the factor goes into the constants of the operation that makes it.

Allowed only where nothing else can see the change: every reader of the activation, and of all between it and the operation, is
accounted for. That is read off the graph's users, never off names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from khtst_compile.linears import find_linears
from khtst_compile.program import Rewriter

aten = torch.ops.aten

# Read shape and dtype only, so a scaled value makes no difference to them.
_BLIND = (aten._assert_tensor_metadata.default, aten.sym_size.int)
# Hand the last axis through element by element (views that move it are told apart by their shapes).
_TRANSPARENT = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.clone.default,
    aten.dropout.default,
)


def readers(node: fx.Node) -> set[fx.Node]:
    """The users of a node that look at its values."""
    return {user for user in node.users if user.target not in _BLIND}


def fold_scale(rewriter: Rewriter, x: fx.Node, members: Collection[fx.Node], scale: torch.Tensor) -> str | None:
    """Multiply the activation `x` by `scale` ((features,) float32) inside its producer; members: the nodes that expect that.

    Returns the producer's name, or None, with nothing changed, where x has other readers or its producer has no constants to
    take the factor.
    """
    if readers(x) != set(members):
        return None
    node, features = x, scale.numel()
    while node.target in _TRANSPARENT:
        parent = node.args[0]
        if not isinstance(parent, fx.Node) or readers(parent) != {node} or _width(parent) != _width(node):
            return None
        if node.target is aten.dropout.default and node.args[2] is not False:
            return None
        node = parent
    into = _PRODUCERS.get(node.target) if _width(node) == features and not node.kwargs else None
    return node.name if into is not None and into(rewriter, node, scale) else None


def _width(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() and isinstance(value.shape[-1], int) else None


def _scaled(rewriter: Rewriter, node: fx.Node | None, scale: torch.Tensor, hint: str) -> fx.Node | None:
    """A new constant `node * scale`; None where node is not a float32 vector of that length."""
    value = rewriter.value(node) if isinstance(node, fx.Node) else None
    if value is None or value.shape != scale.shape or value.dtype is not torch.float32:
        return None
    return rewriter.add_tensor(hint, (value.double() * scale.double()).float())


def _into_norm(rewriter: Rewriter, node: fx.Node, scale: torch.Tensor, bias_at: int | None) -> bool:
    """layer_norm(x, shape, weight, bias, eps, ...) and rms_norm(x, shape, weight, eps)."""
    args: list[Any] = [*node.args, None, None, None][: max(len(node.args), 4 if bias_at else 3)]
    if list(args[1]) != [scale.numel()]:
        return False
    hint = f"{node.name}_weight"
    weight = rewriter.add_tensor(hint, scale) if args[2] is None else _scaled(rewriter, args[2], scale, hint)
    if weight is None:
        return False
    if bias_at is not None and args[bias_at] is not None:
        args[bias_at] = _scaled(rewriter, args[bias_at], scale, f"{node.name}_bias")
        if args[bias_at] is None:
            return False
    args[2] = weight
    node.args = tuple(args)
    return True


def _into_mul(rewriter: Rewriter, node: fx.Node, scale: torch.Tensor) -> bool:
    """The last step of an RMSNorm written out: `weight * normalized`, in either order."""
    for at in (0, 1):
        constant, other = node.args[at], node.args[1 - at]
        if isinstance(constant, fx.Node) and isinstance(other, fx.Node) and _width(other) == scale.numel():
            new = _scaled(rewriter, constant, scale, f"{node.name}_weight")
            if new is not None:
                node.update_arg(at, new)
                return True
    return False


def _into_linear(rewriter: Rewriter, node: fx.Node, scale: torch.Tensor) -> bool:
    """Rows of the weight and the bias of a linear layer whose output is the activation."""
    tensors = {n.name: t for n in rewriter.graph.nodes if (t := rewriter.value(n)) is not None}
    linear = next((f for f in find_linears(rewriter.graph, tensors) if f.node is node), None)
    if linear is None or linear.refusal is not None:
        return False
    bias = None
    if linear.bias is not None:
        bias = _scaled(rewriter, linear.bias, scale, f"{node.name}_bias")
        if bias is None:
            return False
    weight = (linear.weight.double() * scale.double().unsqueeze(1)).float()
    linear.set_weight(rewriter.add_tensor(f"{node.name}_weight", linear.stored(weight)))
    if bias is not None:
        linear.set_bias(bias)
    return True


_PRODUCERS: dict[object, Callable[[Rewriter, fx.Node, torch.Tensor], bool]] = {
    aten.layer_norm.default: lambda r, n, s: _into_norm(r, n, s, 3),
    aten.rms_norm.default: lambda r, n, s: _into_norm(r, n, s, None),
    aten.mul.Tensor: _into_mul,
    aten.linear.default: _into_linear,
    aten.addmm.default: _into_linear,
    aten.mm.default: _into_linear,
}
