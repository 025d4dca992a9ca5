"""Program -> Relax: operators with a kernel become calls of it, the rest goes through TVM's importer.

The module gets two functions that share all kernels: `main` returns the outputs, `taps` returns them and after them what every
kernel wrote, so that a wrong layer can be named. Weights are no part of the module: both functions take them after their inputs.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.torch import from_exported_program

from khtst_compile.errors import LoweringError
from khtst_compile.layout import Packed
from khtst_compile.lower.fuse import fuse
from khtst_compile.lower.importer import CONVERTERS, prepare
from khtst_compile.lower.plan import INPUTS
from khtst_compile.lower.step import CACHED, cached_pairs
from khtst_compile.program import Program, Rewriter, arguments, site_of, source_line
from khtst_compile.targets.contract import KernelCall, Target, array

INLINE_BYTES = 64  # constants up to this size stay in the module


@dataclass(frozen=True)
class Tap:
    """One value a kernel wrote. node: the fused graph's node; output: index in its result; site: where it is in the model.

    kind: "codes" (int8 codes in the target's storage), "cache" (int8 codes as they are), "scale", "ids" (int32) or "float"; features:
    logical last axis (codes may be padded), None where there is one value a row;
    act: the activation inside the operator, "none" where it has none.
    """

    node: str
    output: int
    site: str
    operator: str
    kind: str
    features: int | None
    act: str = "none"


@dataclass(frozen=True)
class Lowered:
    """module: Relax and TIR, not yet scheduled; weights: what it takes after its inputs; macs: multiply-adds a row, by kernel;
    calls: the kernels called, in order."""

    module: Any
    weights: list[npt.NDArray[Any] | Packed]
    macs: dict[str, int]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Call:
    """One call of a kernel. site: where it is in the model; operator: what it serves; outputs: tensors it writes, its last arguments.

    macs, pair_macs, products: as in KernelCall.
    """

    kernel: str
    site: str
    operator: str
    outputs: int
    macs: int
    pair_macs: int
    products: str


@dataclass(frozen=True)
class Graph:
    """A program in terms of kernels. program: fused and decomposed; taps: what its kernels write; fused: how often each rule applied;
    sites: where in the model each kernel's node is."""

    program: Program
    taps: tuple[Tap, ...]
    fused: dict[str, int]
    sites: dict[str, str]


def kernel_graph(program: Program) -> Graph:
    """The graph that gets lowered: the same for every target, so that a check needs no compiler."""
    fused, counts = fuse(program)
    ready = prepare(fused)
    origins = _kernel_nodes(fused)
    sites = {node.name: _site(origin) for origin, node in zip(origins, _kernel_nodes(ready), strict=True)}
    return Graph(ready, _taps(fused, ready), counts, sites)


def to_relax(graph: Graph, target: Target) -> Lowered:
    """Lower for `target`. Raises LoweringError naming the operator and its source line where there is no way."""
    program = graph.program
    kernels = _KernelCalls(program, target, graph.sites)
    converters = {**CONVERTERS, **{f"{name}.default": kernels.convert for name in kernels.names}}
    try:
        module = from_exported_program(
            _with_taps(program, graph.taps),
            run_ep_decomposition=False,
            custom_convert_map=converters,
            unwrap_unit_return_tuple=False,
        )
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise LoweringError(_explain(program, error)) from error
    cached = cached_pairs([s.name for s in program.inputs], [s.name for s in program.outputs])
    module, weights = lift_weights(_split_main(module, len(program.outputs), cached))
    return Lowered(module, [kernels.packed.get(_content(w), w) for w in weights], kernels.macs, tuple(kernels.calls))


class _KernelCalls:
    """Emits call_tir for each operator the target has kernels for."""

    def __init__(self, program: Program, target: Target, sites: dict[str, str]):
        self._sites, self.calls = sites, list[Call]()
        self._rules = target.kernels()
        self._tensors = program.tensors()
        self._functions: dict[str, relax.GlobalVar] = {}
        self.macs: dict[str, int] = {}
        self.packed: dict[Any, Packed] = {}  # content -> where it comes from
        self.names = [name.partition(".")[2] for name in self._rules]

    def constant(self, node: Any) -> npt.NDArray[Any] | None:
        """The array bound to a graph input; None for None. Raises LoweringError for a computed value, which no kernel can have packed."""
        if node is None:
            return None
        if not isinstance(node, fx.Node) or node.name not in self._tensors:
            raise LoweringError(
                f"{node}: is computed by the graph where a kernel needs a constant; keep that layer out of fusion"
            )
        return array(self._tensors[node.name])

    def convert(self, node: fx.Node, importer: Any) -> Any:
        name = str(node.target).removesuffix(".default")
        for rule in self._rules[name]:
            call = rule(node, self.constant)
            if call is not None:
                operator_name, site = name.removeprefix("khtst."), self._sites[node.name]
                figures = (len(call.outputs), call.macs, call.pair_macs, call.products)
                self.calls.append(Call(call.key, site, operator_name, *figures))
                return self._emit(node, call, importer)
        shapes = [tuple(a.meta["val"].shape) for a in node.args if isinstance(a, fx.Node) and hasattr(a.meta.get("val"), "shape")]
        raise LoweringError(f"{site_of(node)} ({source_line(node)}): no kernel serves {name} with shapes {shapes}")

    def _emit(self, node: fx.Node, call: KernelCall, importer: Any) -> Any:
        builder = importer.block_builder
        if call.key not in self._functions:
            name = call.key
            func = call.func.with_attr("global_symbol", name).with_attr("tirx.is_scheduled", True).with_attr("op_pattern", 8)
            self._functions[call.key] = builder.add_func(func, name)
            self.macs[name] = call.macs
        operands = [importer.env[o] if isinstance(o, fx.Node) else self._weight(o) for o in call.operands]
        first = node.meta["val"]
        rank = (first[0] if isinstance(first, (tuple, list)) else first).dim()
        lead = list(operands[0].ty.shape.values)[: rank - 1][:: -1 if call.swapped else 1]
        infos = [relax.TensorType(lead if width is None else [*lead, width], dtype) for width, dtype in call.outputs]
        result = builder.emit(relax.call_tir(self._functions[call.key], operands, infos if len(infos) > 1 else infos[0]))
        values = [builder.emit(relax.TupleGetItem(result, i)) for i in range(len(infos))] if len(infos) > 1 else [result]
        if not isinstance(node.meta["val"], (tuple, list)):
            return values[0]
        full: list[Any] = [None] * len(node.meta["val"])
        for slot, value in zip(call.slots, values, strict=True):
            full[slot] = value
        return full

    def _weight(self, operand: npt.NDArray[Any] | Packed) -> Any:
        if isinstance(operand, Packed):
            self.packed[_content(operand.packed)] = operand
            operand = operand.packed
        return relax.const(operand)


def _kernel_nodes(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.op == "call_function" and str(n.target).startswith("khtst.")]


def _taps(fused: Program, ready: Program) -> tuple[Tap, ...]:
    """The taps of the decomposed program; sites come from the fused one, since decomposition keeps order but not every note."""
    taps: list[Tap] = []
    for origin, node in zip(_kernel_nodes(fused), _kernel_nodes(ready), strict=True):
        name = str(node.target).removesuffix(".default").removeprefix("khtst.")
        site = _site(origin)
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            for user in sorted((u for u in node.users if u.target is operator.getitem), key=lambda u: int(arguments(u)[1])):
                taps.append(_tap(user.name, int(arguments(user)[1]), site, name, value[int(arguments(user)[1])]))
        else:
            taps.append(replace(_tap(node.name, 0, site, name, value), act=_activation(node)))
    return tuple(taps)


def _site(node: fx.Node) -> str:
    return "+".join(node.meta.get("khtst_sites", [site_of(node)]))


def _activation(node: fx.Node) -> str:
    return next((a for a in node.args if isinstance(a, str)), "none")


def _tap(node: str, output: int, site: str, name: str, value: torch.Tensor) -> Tap:
    if value.dtype is torch.int8:
        return Tap(node, output, site, name, "cache" if name == "quantize_cache" else "codes", int(value.shape[-1]))
    if value.dtype is torch.int32:
        return Tap(node, output, site, name, "ids", None if name == "step_lookup" else int(value.shape[-1]))
    kind = "scale" if name.endswith(("quantize", "quantize_rows", "quantize_cache")) and output > 0 else "float"
    return Tap(node, output, site, name, kind, int(value.shape[-1]) if kind == "float" else None)


def _with_taps(program: Program, taps: tuple[Tap, ...]) -> Any:
    """The exported program, returning the taps after its outputs."""
    rw = Rewriter(program)
    output = next(n for n in reversed(rw.graph.nodes) if n.op == "output")
    output.args = ((*output.args[0], *(rw.node(t.node) for t in taps)),)
    signature = program.ep.graph_signature
    extra = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(t.node), None) for t in taps]
    widened = replace(signature, output_specs=[*signature.output_specs, *extra])
    ep = program.ep
    return rw.exported(widened, ep.state_dict, ep.constants)


def _split_main(module: Any, outputs: int, cached: str) -> Any:
    """`main` as imported becomes `taps`; a new `main` returns its first `outputs` results alone. cached: see step.py."""
    function = module["main"]
    block = function.body.blocks[-1]
    last = block.bindings[-1]
    if not isinstance(last.value, relax.Tuple):
        raise LoweringError(f"the importer returned {type(last.value).__name__} where a tuple of outputs was expected")
    kept = relax.Tuple(list(last.value.fields)[:outputs])
    result = relax.TupleType([field.ty for field in kept.fields])
    variable = relax.Var("outputs", result)
    body = relax.SeqExpr(
        [*function.body.blocks[:-1], relax.DataflowBlock([*block.bindings[:-1], relax.VarBinding(variable, kept)])], variable
    )
    main = relax.Function(function.params, body, result, function.is_pure).with_attrs(function.attrs).with_attr(CACHED, cached)
    taps = relax.utils.copy_with_new_vars(function)
    for name, made in (("taps", taps), ("main", main)):
        # With upper bounds the planner reserves memory for the largest batch and length at once: gigabytes for a batch of one.
        module[name] = made.without_attr("tir_var_upper_bound").with_attr("global_symbol", name)
    return relax.transform.DeadCodeElimination(["main", "taps"])(relax.transform.Normalize()(module))


def _content(data: npt.NDArray[Any]) -> Any:
    """Equal for equal arrays."""
    return data.dtype.str, data.shape, hashlib.sha256(np.ascontiguousarray(data).data).digest()


def lift_weights(module: Any) -> tuple[Any, list[npt.NDArray[Any]]]:
    """Replace every constant larger than INLINE_BYTES by a parameter after the inputs, in one order for all functions."""
    arrays: list[npt.NDArray[Any]] = []
    types: list[Any] = []
    by_content: dict[Any, int] = {}
    by_object: dict[int, int] = {}  # a constant's address -> its place; `keep` holds the objects, so addresses stay theirs
    keep: list[Any] = []

    def collect(expr: Any) -> None:
        if not isinstance(expr, GenericConst) or hash(expr) in by_object:
            return
        data = expr.value.numpy()
        if data.nbytes <= INLINE_BYTES:
            return
        content = _content(data)
        if content not in by_content:
            by_content[content] = len(arrays)
            arrays.append(data)
            types.append(expr.ty)
        by_object[hash(expr)] = by_content[content]
        keep.append(expr)

    names = [gv for gv, f in module.functions_items() if isinstance(f, relax.Function)]
    for gv in names:
        relax.analysis.post_order_visit(module[gv], collect)

    @relax.expr_functor.mutator
    class Lift(relax.PyExprMutator):  # type: ignore[misc]
        def __init__(self, mod: Any, weights: list[Any]):
            super().__init__(mod)
            self.weights = weights

        def visit_generic_const_(self, op: Any) -> Any:
            place = by_object.get(hash(op))
            return op if place is None else self.weights[place]

    for gv in names:
        function = module[gv]
        weights = [relax.Var(f"weight{place}", ty) for place, ty in enumerate(types)]
        body = Lift(module, weights).visit_expr(function.body)
        lifted = relax.Function([*function.params, *weights], body, function.ret_ty, function.is_pure)
        module.update_func(gv, lifted.with_attrs(function.attrs).with_attr(INPUTS, len(function.params)))
    return relax.transform.Normalize()(module), arrays


def _explain(program: Program, error: Exception) -> str:
    """What TVM's importer said, with the model's line where it names an operator of the graph."""
    text = (str(error).strip() or type(error).__name__).splitlines()[-1]
    for node in program.graph.nodes:
        name = str(node.target).removeprefix("aten.")
        if node.op == "call_function" and name in text:
            text += f"; it comes from {site_of(node)} ({source_line(node)})"
            break
    return f"TVM's importer cannot take this model: {text}; keep that part out of the exported module, or export to ONNX"
