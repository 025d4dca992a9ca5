"""Takes out of an exported graph what computes nothing, so that passes see `linear <- layer_norm` directly."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from khtst_compile.errors import CaptureError
from khtst_compile.program import Program, Rewriter, arguments, call_nodes, site_of, source_line
from khtst_compile.sizes import same_shape

aten = torch.ops.aten

# Calls that only check something, and have no result.
CHECKS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    torch._check,
)
# Calls that return their first argument's values in a graph that writes into nothing.
SAME = (
    aten.detach.default,
    aten.detach_.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.clone.default,
)
# Calls that return their first argument where dtype and shape come out unchanged.
CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)
RESHAPES = (*VIEWS, aten.reshape.default, aten.expand.default, aten.flatten.using_ints)
# What the experts of a mixture are computed with: no pass or target has a form for these.
EXPERTS = (aten._grouped_mm.default, aten.histc.default)
# Operators drawn at random only where they are told to: the position of the probability that then is not 0, or of the flag for training.
RANDOM_IF: dict[Any, int] = {
    aten.scaled_dot_product_attention.default: 4,
    aten.rrelu.default: 3,
    aten.native_dropout.default: 2,
    aten.lstm.input: 6,
    aten.gru.input: 6,
    aten.rnn_tanh.input: 6,
    aten.rnn_relu.input: 6,
}
DROPOUT = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)


def clean(program: Program) -> Program:
    """Strip dropout, checks, copies, casts and reshapes to the same type, and dead code.

    Views become reshapes: they no longer depend on how an earlier operator laid its result out in memory. Raises CaptureError
    for a graph in training mode.
    """
    rewriter = Rewriter(program)
    for node in list(rewriter.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in CHECKS:
            rewriter.graph.erase_node(node)
        elif node.target in DROPOUT or _computes_nothing(node):
            rewriter.replace(node, node.args[0])
        elif node.target in VIEWS:
            node.target = aten.reshape.default
    for node in list(call_nodes(rewriter.graph, aten.cat.default)):
        _drop_empty(rewriter, node)
    for node in list(call_nodes(rewriter.graph, aten.matmul.default, aten.mm.default, aten.einsum.default)):
        _to_linear(rewriter, node)
    for node in call_nodes(rewriter.graph, aten.batch_norm.default):
        _require_eval(node, node.args[5] is False)
    return rewriter.finish()


def _drop_empty(rewriter: Rewriter, node: fx.Node) -> None:
    """Leave out of a `cat` what has no elements along its axis, such as the empty tensor that a list which grows begins with."""
    parts, *rest = arguments(node)
    axis = int(rest[0] if rest else node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    made = node.meta["val"]
    kept = [p for p in parts if p.meta["val"].dim() != made.dim() or not _is_zero(p.meta["val"].shape[axis])]
    if len(kept) == len(parts) or not kept or any(p.meta["val"].dtype != made.dtype for p in kept):
        return
    if len(kept) == 1:
        rewriter.replace(node, kept[0])
    else:
        node.args = (kept, axis)


def _is_zero(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 0


def _computes_nothing(node: fx.Node) -> bool:
    """Whether the result equals the first argument, in a graph that writes into nothing."""
    if node.target in SAME:
        return True
    if node.target in CASTS or node.target in RESHAPES:
        return _unchanged(node)
    if node.target is aten.slice.Tensor:
        return _whole(node)
    return node.target is aten.add.Tensor and _adds_nothing(node)


TRANSPOSES = (
    aten.t.default,
    aten.numpy_T.default,
    aten.transpose.int,
    aten.permute.default,
    aten.mT.default,
    aten.matrix_H.default,
)
_EINSUM = re.compile(r"(?P<lead>[a-zA-Z]+)(?P<k>[a-zA-Z]),(?P<n>[a-zA-Z])(?P=k)->(?P=lead)(?P=n)")


def _to_linear(rewriter: Rewriter, node: fx.Node) -> None:
    """`x @ w.T` and einsum("...k,nk->...n", x, w) with a constant matrix w become linear(x, w), which passes know."""
    given: Any = arguments(node)
    x, weight = given[1] if node.target is aten.einsum.default and len(given[1]) == 2 else given[:2]
    if node.target is aten.einsum.default:
        match = _EINSUM.fullmatch(str(given[0]).replace(" ", ""))
        if match is None or len({*match["lead"], match["k"], match["n"]}) < len(match["lead"]) + 2:
            return
    elif isinstance(weight, fx.Node) and _is_transpose(weight):
        weight = arguments(weight)[0]
    else:
        return
    bound = rewriter.value(weight)
    if bound is None or bound.dim() != 2 or rewriter.value(x) is not None:
        return
    if bound.dtype == x.meta["val"].dtype and x.meta["val"].dim() >= 2:
        rewriter.replace(node, rewriter.call(aten.linear.default, x, weight, before=node))


def _is_transpose(node: fx.Node) -> bool:
    """Whether a node turns a matrix round."""
    if node.target not in TRANSPOSES or node.meta["val"].dim() != 2:
        return False
    axes = [0, 1]
    if node.target is aten.transpose.int:
        axes = list(arguments(node)[1:3])
    elif node.target is aten.permute.default:
        axes = list(arguments(node)[1])
        return [a % 2 for a in axes] == [1, 0]
    return {a % 2 for a in axes} == {0, 1}


def functional(program: Program) -> Program:
    """The same program with no call that writes into its arguments, and no buffer updated on the side."""
    if any(_mutates(n) for n in program.graph.nodes):
        program = replace(program, ep=program.ep.run_decompositions({}))
    for spec in program.ep.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"the model writes into {spec.target!r} while it runs, which a compiled function cannot; if that is a counter or a moving "
                "average of training, export it after model.eval(); else make it an input and an output of forward, or freeze it"
            )
    return program


def refuse_unknown(program: Program) -> None:
    """Raise CaptureError for control flow and operators that later stages cannot hold, naming the line of the model."""
    for node in program.graph.nodes:
        where = f"{site_of(node)!r} ({source_line(node)})"
        if node.op not in ("placeholder", "call_function", "output"):
            raise CaptureError(f"{where}: a {node.op} node ({node.target}) cannot be compiled; needed: plain operator calls")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"{where}: {node.target} (control flow on data) cannot be compiled; compute both sides and use torch.where"
            )
        if node.target in EXPERTS:
            raise CaptureError(
                f"{where}: {node.target} belongs to a mixture of experts, which is not supported; needed: a dense model"
            )
        tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
        if torch.Tag.nondeterministic_seeded in tags and _draws(node):
            raise CaptureError(
                f"{where}: {node.target} draws random numbers, so no two runs would agree; take it out, call model.eval(), or make "
                "what it draws an input of forward"
            )
        if torch.Tag.data_dependent_output in tags:
            raise CaptureError(f"{where}: {node.target} reads a value out of a tensor; keep it a tensor")
        if isinstance(node.meta.get("val"), torch.Tensor) and free_unbacked_symbols(node.meta["val"]):
            raise CaptureError(f"{where}: the shape of what {node.target} returns depends on the data; use masks or torch.where")


def _draws(node: fx.Node) -> bool:
    """Whether an operator that can draw random numbers does."""
    if node.target in DROPOUT:
        return bool(node.args[1] != 0 and node.args[2] is not False)
    at = RANDOM_IF.get(node.target)
    if at is None:
        return True
    name = node.target._schema.arguments[at].name  # type: ignore[union-attr]
    return bool(node.args[at] if at < len(node.args) else node.kwargs.get(name, False))


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable) and node.target not in SAME


def _unchanged(node: fx.Node) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return bool(before.dtype == after.dtype) and same_shape(before.shape, after.shape)


def _whole(node: fx.Node) -> bool:
    """A slice from 0 to the end in steps of one."""
    start, end, step = [*node.args[2:], None, None, None][:3]
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= 2**62)) and step in (None, 1)


def _adds_nothing(node: fx.Node) -> bool:
    """`x + 0` of integers; with floats it would turn -0.0 into 0.0."""
    zero = isinstance(node.args[1], int) and node.args[1] == 0
    return zero and _unchanged(node) and not node.meta["val"].dtype.is_floating_point


def _require_eval(node: fx.Node, is_eval: bool) -> None:
    if not is_eval:
        raise CaptureError(
            f"{site_of(node)!r} ({source_line(node)}): {node.target} is in training mode; call model.eval() before exporting"
        )
