"""Kernel by kernel: recompute in torch what each kernel should have written from the inputs it really had.

A lowered program's `taps` give every kernel's output, so each operator of the fused graph can be run in torch on the values the kernels
read. A wrong layer then shows up alone: its neighbors are judged on their own inputs.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from khtst_compile.lower.relax import Graph, Tap
from khtst_compile.lower.replay_lookups import LOOKUPS, judge_lookup
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.ops.w8a8_linear import int8_matmul
from khtst_compile.parity import Row, codes_differ, relative_error_db, worst_ulp_of_terms
from khtst_compile.program import arguments

Array = npt.NDArray[Any]

EXACT = "integers from equal floats are equal"
ACT_ERROR = 3e-6  # largest absolute error of an activation's polynomial (targets/kernels/act.py)
NEAR_TIE = "a float a few ulp off, or an activation 3e-6 off, next to a rounding tie moves a code by one"
NEAR_TIE_SHARE = 2e-3
SCALE_ULP, SCALE_REASON = 64.0, "a maximum of values that differ by a few ulp, or by an activation's 3e-6"
GEMM_ULP, GEMM_REASON = 4.0, "one fused multiply-add, one product of scales and one addition, each rounded once"
ACT_GEMM_ULP, ACT_REASON = 64.0, "as without activation, and the activation's polynomial (3e-6 absolute)"
GENERIC_DB, GENERIC_REASON = -90.0, "it reads values of operators that have no tap, computed in another order of float32 sums"
OUTPUT_REASON = "generic operators on the kernels' values, in another order of float32 sums"
FLOAT_BUDGETS = {
    "norm": (-115.0, "another order of float32 sums; a few ulp of the row"),
    "norm_quantize": (-115.0, "another order of float32 sums; a few ulp of the row"),
    "embed": (-140.0, "the same sums in the same order"),
    "embed_norm": (-115.0, "another order of float32 sums; a few ulp of the row"),
    "embed_norm_quantize": (-115.0, "another order of float32 sums; a few ulp of the row"),
    "rotary": (-115.0, "one rounding less in each sum of two products; with a norm another order of float32 sums"),
    "attention": (-105.0, "exp as a polynomial, another order of float32 sums"),
    "attention_cached": (-105.0, "exp as a polynomial, another order of float32 sums"),
    "attention_int8": (-105.0, "exp as a polynomial, another order of float32 sums"),
    "linear": (-105.0, "another order of float32 sums over the input features"),
}
_COPIES = frozenset(
    (
        torch.ops.aten.view.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int, torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dims, torch.ops.aten.squeeze.dim, torch.ops.aten.expand.default, torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor, torch.ops.aten.clone.default, torch.ops.aten.alias.default, torch.ops.aten.cat.default,
        torch.ops.aten.split_with_sizes.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default, operator.getitem,
    )
)  # fmt: skip
# Operators that write floats and their codes -> where the arguments of quantize_rows after x begin.
_QUANTIZER_AT = {"norm_quantize": 5, "embed_norm_quantize": 10}


def replay(graph: Graph, outputs: list[Array], values: list[Array], inputs: dict[str, torch.Tensor]) -> list[Row]:
    """graph: of `kernel_graph`; outputs and values: what `taps` returned, codes as int8.

    One Row or more a tap, in execution order, then one an output: what generic operators made of the kernels' values.
    """
    program, taps = graph.program, graph.taps
    given = {t.node: torch.from_numpy(np.ascontiguousarray(v)) for t, v in zip(taps, values, strict=True)}
    by_node = {t.node: t for t in taps}
    seen: dict[str, Any] = dict(program.tensors())
    known = {*seen, *program.user_inputs(), *given}  # values that are the kernels' own, to the bit
    moved = set(known)  # those, and what only moves their elements
    rows: list[Row] = []

    def hook(node: fx.Node, value: Any) -> Any:
        tap = by_node.get(node.name)
        if tap is not None:
            if _operator(node).target in LOOKUPS:
                rows.extend(_judge_lookup(node, tap, given, value, seen, moved))
            else:
                rows.extend(_judge(node, tap, given[node.name], value, seen, known))
            value = given[node.name]  # what follows is judged on what the kernel really wrote
        seen[node.name] = value
        if node.target in _COPIES and moved.issuperset(n.name for n in node.all_input_nodes):
            moved.add(node.name)
        return value

    with torch.no_grad():
        results = program.run(inputs, hook)
    for spec, got in zip(program.outputs, outputs, strict=True):
        rows.append(_judge_output(spec.name, got, results[spec.name].numpy()))
    return rows


def _judge_output(name: str, got: Array, want: Array) -> Row:
    if want.dtype.kind == "f":
        return Row(
            f"output {name}", "against torch", "relative error dB", relative_error_db(got, want), GENERIC_DB, OUTPUT_REASON
        )
    differ = float((got != want).mean()) if got.shape == want.shape and got.size else float(got.shape != want.shape)
    return Row(f"output {name}", "against torch", "share that differs", differ, 0.0, EXACT)


def _judge_lookup(
    node: fx.Node, tap: Tap, given: dict[str, torch.Tensor], want: torch.Tensor, seen: dict[str, Any], moved: set[str]
) -> list[Row]:
    source, got, what = _operator(node), given[node.name], f"{tap.operator} {'ids' if tap.kind == 'ids' else 'values'}"
    if got.shape != want.shape:
        return [Row(tap.site, what, f"shape {tuple(got.shape)} for {tuple(want.shape)}", float("inf"), 0.0, "shapes are equal")]
    operands = [seen[x.name] if isinstance(x, fx.Node) else x for x in arguments(source)]
    ids = next((given[u.name] for u in source.users if arguments(u)[1] == 1 and u.name in given), None)
    return judge_lookup(tap.site, what, source, tap.output, got, ids, operands, arguments(source)[0].name in moved)


def _judge(node: fx.Node, tap: Tap, got: torch.Tensor, want: torch.Tensor, seen: dict[str, Any], known: set[str]) -> list[Row]:
    what = f"{tap.operator} {tap.kind}"
    if got.shape != want.shape:
        return [Row(tap.site, what, f"shape {tuple(got.shape)} for {tuple(want.shape)}", float("inf"), 0.0, "shapes are equal")]
    operands = [x for x in arguments(_operator(node)) if isinstance(x, fx.Node)]
    own = all(x.name in known for x in operands)  # are all its inputs, to the bit, those its kernel read?
    exact = own and tap.operator in ("quantize_rows", "quantize_cache")
    if tap.operator in _QUANTIZER_AT and tap.kind != "float":
        again = _quantize_again(node, seen)
        if again is not None:
            want, exact = again[tap.output - 1], True
    a, b = got.numpy(), want.numpy()
    slack = _activation_slack(node, seen)
    if tap.kind in ("codes", "cache"):
        step = float(seen[_operator(node).name][-1].median()) if slack else 1.0
        return _judge_codes(tap, what, a, b, exact, NEAR_TIE_SHARE + 4 * slack / step)
    if tap.kind == "scale":
        if exact:
            return [Row(tap.site, what, "ulp", worst_ulp_of_terms(a, b, np.abs(b)), 0.0, EXACT)]
        allowed = np.abs(b) + 4 * slack / 127 / (SCALE_ULP * 2.0**-23)
        return [
            Row(tap.site, what, "ulp, activation's error allowed", worst_ulp_of_terms(a, b, allowed), SCALE_ULP, SCALE_REASON)
        ]
    if tap.operator == "w8a8_gemm" and own:
        return [_judge_gemm(node, tap, what, a, b, seen)]
    db, reason = FLOAT_BUDGETS[tap.operator] if own else (GENERIC_DB, GENERIC_REASON)
    return [Row(tap.site, what, "relative error dB", relative_error_db(a, b), db, reason)]


def _operator(node: fx.Node) -> fx.Node:
    """The operator behind a result, or behind one item of it."""
    made: fx.Node = arguments(node)[0] if node.target is operator.getitem else node
    return made


def _activation_slack(node: fx.Node, seen: dict[str, Any]) -> float:
    """How far an activation's error can move the values that act_quantize rounds: errors of both signs add up over a rotation's points."""
    source = _operator(node)
    gated = source.target is torch.ops.khtst.gate_quantize.default
    if not (gated or source.target is torch.ops.khtst.act_quantize.default) or arguments(source)[1] in ("none", "relu"):
        return 0.0
    x, _, inv_smooth, _, _, points = arguments(source)
    largest = float(seen[inv_smooth.name].abs().max()) if inv_smooth is not None else 1.0
    if gated:
        largest *= float(seen[x.name].chunk(2, -1)[1].abs().amax()) if seen[x.name].numel() else 0.0
    return float(ACT_ERROR * largest * max(points, 1) ** 0.5)


def _quantize_again(node: fx.Node, seen: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scale of a norm_quantize, from the very floats its kernel wrote; None where it did not write them."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    normalized = next((seen[u.name] for u in source.users if u.args[1] == 0 and u.name in seen), None)
    if normalized is None:
        return None
    first = _QUANTIZER_AT[str(source.target).removeprefix("khtst.").removesuffix(".default")]
    quantizer = [seen[x.name] if isinstance(x, fx.Node) else x for x in source.args[first:]]
    return quantize_rows_reference(normalized, *quantizer)  # type: ignore[arg-type]


def _judge_codes(tap: Tap, what: str, a: Array, b: Array, exact: bool, allowed: float) -> list[Row]:
    largest, share = codes_differ(a, b)
    if exact:
        return [Row(tap.site, what, "largest difference", largest, 0.0, EXACT)]
    return [
        Row(tap.site, what, "largest difference", largest, 1.0, NEAR_TIE),
        Row(tap.site, what, "share that differs", share, allowed, NEAR_TIE),
    ]


def _judge_gemm(node: fx.Node, tap: Tap, what: str, a: Array, b: Array, seen: dict[str, Any]) -> Row:
    """In units of the rounding of the terms: a sum that is off by one, or a weight by one bit, is far outside."""
    codes, scale, weight, weight_scale, bias, act, residual = (
        seen[x.name] if isinstance(x, fx.Node) else x for x in arguments(node)
    )
    terms = (int8_matmul(codes, weight).double() * (scale.unsqueeze(-1) * weight_scale).double()).abs()
    for added in (bias, residual):
        if added is not None:
            terms = terms + added.double().abs()
    budget, reason = (GEMM_ULP, GEMM_REASON)
    if act != "none":
        budget, reason = (ACT_GEMM_ULP, ACT_REASON)
        terms = terms.clamp_min(1.0)  # an activation's error is absolute
    return Row(tap.site, what, "ulp of terms", worst_ulp_of_terms(a, b, terms.numpy()), budget, reason)
