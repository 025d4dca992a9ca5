"""A quantized program rewritten into the operators that have kernels (ops/fused.py).

The rules run in order; each looks at graph structure only and leaves what it does not recognize to the generic path. Nothing here
changes what is computed beyond the order of float operations inside one fused operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import khtst_compile.ops  # noqa: F401  (registers khtst:: operators)
from khtst_compile.lower.cached import cache_rows, fuse_cached_attention
from khtst_compile.lower.embeddings import fuse_embeddings
from khtst_compile.lower.gates import fuse_gates
from khtst_compile.lower.heads import merged_heads, replace_merged, sdpa_arguments
from khtst_compile.lower.kv_cache import fuse_int8_attention, read_projections
from khtst_compile.lower.match import bound, served, sites
from khtst_compile.lower.norms import written_norms
from khtst_compile.lower.projections import merge_projections, merge_rotaries
from khtst_compile.lower.rotary import fuse_rotary, shared_heads
from khtst_compile.lower.uniform import ELEMENTWISE, uniform_axes
from khtst_compile.program import Program, Rewriter, arguments, call_nodes
from khtst_compile.sizes import same_shape

aten, khtst = torch.ops.aten, torch.ops.khtst

_ACTIVATION_NODES: dict[Any, Callable[[fx.Node], str]] = {
    aten.relu.default: lambda n: "relu",
    aten.silu.default: lambda n: "silu",
    aten.gelu.default: lambda n: "gelu_tanh" if n.kwargs.get("approximate", "none") == "tanh" else "gelu",
}


def fuse(program: Program, rules: dict[str, Rule] | None = None) -> tuple[Program, dict[str, int]]:
    """Apply `rules` (default: all, RULES). Returns the rewritten program and how often each rule applied."""
    rewriter = Rewriter(program)
    counts = {}
    for name, rule in (RULES if rules is None else rules).items():
        counts[name] = rule(rewriter)
        rewriter.graph.eliminate_dead_code()  # a view that nothing reads would still count as a reader
    return rewriter.finish(), counts


def fuse_attention(rw: Rewriter) -> int:
    """scaled_dot_product_attention with its head split and merge -> khtst::attention on unsplit tensors."""
    count = 0
    masks: dict[fx.Node, fx.Node] = {}
    for sdpa in list(call_nodes(rw.graph, aten.scaled_dot_product_attention.default)):
        given = sdpa_arguments(sdpa)
        q, k, v = (sdpa.args[i] for i in range(3))
        shapes = [tuple(t.meta["val"].shape) for t in (q, k, v)]  # type: ignore[union-attr]
        heads, kv_heads, head_dim = shapes[0][1], shapes[1][1], shapes[0][3]
        statics = (heads, kv_heads, head_dim, shapes[2][1], shapes[2][3])
        if (
            any(len(s) != 4 for s in shapes)
            or given["dropout_p"]
            or not all(isinstance(s, int) for s in statics)
            or shapes[2][3] != head_dim
            or shapes[2][1] != kv_heads
            or heads % kv_heads
            or sdpa.meta["val"].dtype is not torch.float32
        ):
            continue
        flat = [merged_heads(rw, t, sdpa) for t in (q, k, v)]  # type: ignore[arg-type]
        mask = _narrow_mask(rw, given["attn_mask"], sdpa, masks)
        scale = given["scale"] if given["scale"] is not None else float(head_dim) ** -0.5
        new = rw.call(
            khtst.attention.default, *flat, mask, heads, kv_heads, head_dim, [0, 0, 0], scale, given["is_causal"], before=sdpa
        )
        replace_merged(rw, sdpa, new, (heads, head_dim))
        count += 1
    return count


def fuse_norms(rw: Rewriter) -> int:
    """layer_norm and rms_norm -> khtst::norm, and with a quantize_rows of the result -> khtst::norm_quantize."""
    count = 0
    for node in list(call_nodes(rw.graph, aten.layer_norm.default, aten.rms_norm.default)):
        rms = node.target is aten.rms_norm.default
        x, shape, *rest = arguments(node)
        # What is left out is None; layer_norm takes weight, bias, eps, rms_norm weight, eps.
        gamma, beta, eps = (*rest, None, None, None)[:3] if not rms else ((*rest, None)[0], None, (*rest, None, None)[1])
        eps = eps if eps is not None else (torch.finfo(torch.float32).eps if rms else 1e-5)
        if len(shape) != 1 or not served(node) or not bound(rw, gamma, beta):
            continue
        _fuse_norm(rw, node, x, gamma, beta, float(eps), rms)
        count += 1
    return count


def _fuse_norm(rw: Rewriter, node: fx.Node, x: Any, gamma: Any, beta: Any, eps: float, rms: bool) -> None:
    quantizers = [u for u in node.users if u.target is khtst.quantize_rows.default]
    if not quantizers:
        rw.replace(node, rw.call(khtst.norm.default, x, gamma, beta, eps, rms, before=node))
        return
    first = quantizers[0]  # any further quantizer of the same value keeps reading the float result
    new = rw.call(khtst.norm_quantize.default, x, gamma, beta, eps, rms, *first.args[1:], before=node)
    parts = [rw.getitem(new, i, before=node) for i in range(3)]
    for item in list(first.users):
        rw.replace(item, parts[1 + int(item.args[1])])  # type: ignore[arg-type]
    rw.graph.erase_node(first)
    rw.replace(node, parts[0])


def fuse_activations(rw: Rewriter) -> int:
    """An activation read only by one quantize_rows -> khtst::act_quantize."""
    count = 0
    for node in list(call_nodes(rw.graph, *_ACTIVATION_NODES)):
        users = list(node.users)
        if len(users) != 1 or users[0].target is not khtst.quantize_rows.default:
            continue
        act = _ACTIVATION_NODES[node.target](node)
        new = rw.call(khtst.act_quantize.default, node.args[0], act, *users[0].args[1:], before=node)
        for item in list(users[0].users):
            rw.replace(item, rw.getitem(new, int(item.args[1]), before=node))  # type: ignore[arg-type]
        rw.graph.erase_node(users[0])
        rw.graph.erase_node(node)
        count += 1
    return count


def fuse_linears(rw: Rewriter, activations: bool = True) -> int:
    """Linears, with the activation and the residual addition that follow them, -> khtst::w8a8_gemm or khtst::linear."""
    count = 0
    for node in list(call_nodes(rw.graph, khtst.w8a8_linear.default, aten.linear.default)):
        quantized = node.target is khtst.w8a8_linear.default
        operands = list(node.args) + [None] * ((5 if quantized else 3) - len(node.args))
        constants = operands[2:5] if quantized else operands[1:3]
        if not bound(rw, *constants) or not served(node):
            continue
        last, act = _take_activation(node) if activations else (node, "none")
        last, residual = _take_residual(rw, last)
        target = khtst.w8a8_gemm.default if quantized else khtst.linear.default
        new = rw.call(target, *operands, act, residual, before=last, like=node)
        new.meta["khtst_sites"] = sites(node)
        rw.replace(last, new)
        count += 1
    return count


def _take_activation(node: fx.Node) -> tuple[fx.Node, str]:
    users = list(node.users)
    if len(users) == 1 and users[0].target in _ACTIVATION_NODES:
        return users[0], _ACTIVATION_NODES[users[0].target](users[0])
    return node, "none"


def _take_residual(rw: Rewriter, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The addition of another computed tensor of the same shape, where it is the only reader."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return node, None
    add = users[0]
    other = add.args[1] if add.args[0] is node else add.args[0]
    if not isinstance(other, fx.Node) or other is node:
        return node, None
    mine, theirs = node.meta["val"], other.meta["val"]
    if not isinstance(theirs, torch.Tensor) or theirs.dtype is not torch.float32 or not same_shape(mine.shape, theirs.shape):
        return node, None
    return add, other


def _narrow_mask(rw: Rewriter, mask: Any, before: fx.Node, made: dict[fx.Node, fx.Node]) -> Any:
    """Cut the axes along which a mask is provably the same down to one, so that it is neither built nor read in full.

    made: masks narrowed so far; layers usually share one.
    """
    if not isinstance(mask, fx.Node):
        return None
    if mask not in made:
        narrow = mask
        for axis in uniform_axes(mask):
            if axis in (0, 1, 2):
                narrow = _cut(rw, narrow, axis, before)
        while narrow.meta["val"].dim() < 4:
            narrow = rw.call(aten.unsqueeze.default, narrow, 0, before=before, like=mask)
        made[mask] = narrow
    return made[mask]


def _cut(rw: Rewriter, node: fx.Node, axis: int, before: fx.Node) -> fx.Node:
    """`node` at index 0 of `axis` (kept, of size 1): through elementwise operators and expands, so that their full size is never made."""
    value = node.meta["val"]
    if value.shape[axis] == 1:
        return node
    if node.target in ELEMENTWISE:
        operands = [_cut_operand(rw, a, axis - value.dim(), before) for a in arguments(node)]
        return rw.call(node.target, *operands, before=before, like=node, kwargs=dict(node.kwargs))
    if node.target is aten.expand.default:
        source, sizes = arguments(node)
        sizes = [1 if i == axis else size for i, size in enumerate(sizes)]
        return rw.call(aten.expand.default, _cut_operand(rw, source, axis - value.dim(), before), sizes, before=before, like=node)
    return rw.call(aten.slice.Tensor, node, axis, 0, 1, before=before, like=node)


def _cut_operand(rw: Rewriter, operand: Any, axis: int, before: fx.Node) -> Any:
    """An operand of a broadcasting operator; axis counts from the right (negative)."""
    if not isinstance(operand, fx.Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        return operand
    rank = operand.meta["val"].dim()
    return operand if rank + axis < 0 else _cut(rw, operand, rank + axis, before)


Rule = Callable[[Rewriter], int]
RULES: dict[str, Rule] = {
    "written norms": written_norms,
    "rotary": fuse_rotary,
    "cached attention": fuse_cached_attention,
    "int8 attention": fuse_int8_attention,
    "int8 cache": read_projections,
    "cache rows": cache_rows,
    "shared heads": shared_heads,
    "attention": fuse_attention,
    "projections": merge_projections,
    "rotary of one row": merge_rotaries,
    "gates": lambda rw: fuse_gates(rw, _ACTIVATION_NODES),
    "norms": fuse_norms,
    "embeddings": fuse_embeddings,
    "activations": fuse_activations,
    "linears": fuse_linears,
}
