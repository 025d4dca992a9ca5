"""`Program`: an exported graph, what calibration saw, and what was done to it.

The graph is that of `torch.export` before decomposition (linear, softmax and attention are whole), with parameters lifted to inputs.
Passes never write into a Program: they open a `Rewriter`, edit its copy of the graph and `finish()` it into a new one that
shares the weights it kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_structure

import khtst_compile.ops  # noqa: F401  (registers khtst:: operators)
from khtst_compile.errors import PassError, UsageError
from khtst_compile.signature import TensorSpec

if TYPE_CHECKING:
    from khtst_compile.calibrate import Stats

__all__ = [
    "WRAPPED",
    "Program",
    "Rewriter",
    "TensorSpec",
    "arguments",
    "call_nodes",
    "check_program",
    "placeholders",
    "site_of",
    "source_line",
]

# Capture wraps models whose call signature has to change; the inner model always sits under this name, which is no part of a site.
WRAPPED = "khtst_model"


@dataclass(frozen=True)
class Program:
    """ep: the graph and its tensors; inputs, outputs: the public signature, in call order; axes: dynamic axis -> (min, max).

    stats: what calibration measured (None before); history: one entry per pass that ran, JSON-able; meta: where the program came from,
    JSON-able (keys: source, task, ...).
    """

    ep: ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)
    stats: Stats | None = None
    history: tuple[dict[str, Any], ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        graph: fx.Graph = self.ep.graph
        return graph

    def tensors(self) -> dict[str, torch.Tensor]:
        """Graph input name -> the parameter, buffer or constant bound to it."""
        bound: dict[str, torch.Tensor] = {}
        for spec in self.ep.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT or spec.target is None:
                continue
            table = self.ep.state_dict if spec.target in self.ep.state_dict else self.ep.constants
            value = table[spec.target]
            if isinstance(value, torch.Tensor):
                bound[spec.arg.name] = value.detach()
        return bound

    def user_inputs(self) -> list[str]:
        """Graph input names of the public inputs, in the order of `inputs`."""
        return [s.arg.name for s in self.ep.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]

    def run(self, inputs: dict[str, torch.Tensor], hook: NodeHook | None = None) -> dict[str, torch.Tensor]:
        """inputs by public name -> outputs by public name. `hook(node, value)` sees every value and may replace it."""
        missing = [s.name for s in self.inputs if s.name not in inputs]
        if missing:
            raise UsageError(f"run: inputs {missing} are missing; needed: {[s.name for s in self.inputs]}")
        values: dict[str, Any] = dict(self.tensors())
        values.update({g: inputs[s.name] for g, s in zip(self.user_inputs(), self.inputs, strict=True)})
        results = _Runner(self.ep.graph_module, hook).run(*(values[n.name] for n in placeholders(self.graph)))
        return {s.name: r for s, r in zip(self.outputs, results, strict=True)}

    def results(self) -> list[str]:
        """Names of the outputs that are results; a language model also returns keys and values for its next call."""
        handed_on = set(self.meta.get("cache", {}).get("new", ()))
        return [s.name for s in self.outputs if s.name not in handed_on]

    def batch_axes(self) -> dict[str, int] | None:
        """Input -> its axis of samples, left out where samples share the input; None where the first input has no dynamic one at 0."""
        name = self.inputs[0].shape[0] if self.inputs[0].shape else None
        if not isinstance(name, str):
            return None
        return {s.name: s.shape.index(name) for s in self.inputs if name in s.shape}

    def choose(self, batch: dict[str, torch.Tensor], samples: list[int]) -> dict[str, torch.Tensor]:
        """Those samples of a batch, copied; inputs that all samples share as they are."""
        axes, index = self.batch_axes() or {}, torch.tensor(samples, dtype=torch.int64)
        return {s.name: batch[s.name].index_select(axes[s.name], index) if s.name in axes else batch[s.name] for s in self.inputs}

    def with_stats(self, stats: Stats | None) -> Program:
        return replace(self, stats=stats)


NodeHook = Callable[[fx.Node, Any], Any]


class _Runner(fx.Interpreter):
    """Runs a graph, offering each computed value to a hook."""

    def __init__(self, module: fx.GraphModule, hook: NodeHook | None):
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False  # else fx appends the model's whole traceback to the message of any error
        self._hook = hook

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._hook is None or n.op == "output":
            return value
        return self._hook(n, value)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def site_of(node: fx.Node) -> str:
    """Where a node comes from in the model, as a dotted module path ("encoder.layer.0.attention.self.query"); its own name if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    parts = [p for p in path.split(".") if p and p != WRAPPED]
    return ".".join(parts) or node.name


def source_line(node: fx.Node) -> str:
    """The line of model code a node came from ("modeling_bert.py:316: self.self(...)"), or its name where that was not recorded."""
    frame = _model_frame(node)
    return f"{frame[0]}:{frame[1]}: {frame[2]}".rstrip(": ") if frame else str(node.name)


def shorten_traces(program: Program) -> None:
    """Keep of each node's stack trace the one line `source_line` shows, without the folders of the machine it was made on."""
    for node in program.graph.nodes:
        frame = _model_frame(node)
        if frame is not None:
            node.meta["stack_trace"] = f'File "{frame[0]}", line {frame[1]}, in forward\n    {frame[2]}'
        else:
            node.meta.pop("stack_trace", None)


def _model_frame(node: fx.Node) -> tuple[str, str, str] | None:
    """(file name, line number, code) of the innermost frame outside torch."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        if line.startswith("File") and "/torch/" not in line:
            _, path, rest = line.split('"', 2)
            number = rest.split("line", 1)[1].split(",")[0].strip()
            code = lines[at + 1] if at + 1 < len(lines) and not lines[at + 1].startswith("File") else ""
            return path.rsplit("/", 1)[-1], number, code
    return None


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments, untyped: an operator's schema says what each one is."""
    return tuple(node.args)


def call_nodes(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """The call_function nodes of `graph` whose target is one of `targets`, in execution order."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in targets:
            yield node


class Rewriter:
    """An editable copy of a Program's graph. New tensors become lifted buffers; new nodes get their fake value at once."""

    def __init__(self, program: Program):
        self.program = program
        self.graph: fx.Graph = copy.deepcopy(program.graph)
        for old, new in zip(program.graph.nodes, self.graph.nodes, strict=True):
            new.name = old.name  # a copy renames what is called like a Python builtin; the signature goes by name
        self.tensors = program.tensors()
        self._new: dict[str, torch.Tensor] = {}
        self._inputs: set[str] = set()  # new public ones
        self._dropped: set[str] = set()  # public ones that go
        self._by_name = {n.name: n for n in self.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """This copy's node of that name (names are those of the Program the Rewriter was opened on)."""
        found: fx.Node = self._by_name[name]
        return found

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor bound to a graph input, or None where the node is computed or a public input."""
        return self._new.get(node.name, self.tensors.get(node.name)) if node.op == "placeholder" else None

    def add_tensor(self, hint: str, tensor: torch.Tensor) -> fx.Node:
        """Bind `tensor` as a new graph input named after `hint`."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.placeholder("b_" + "".join(c if c.isalnum() else "_" for c in hint))
        node.target = node.name  # fx makes names unique, not targets, and targets become the arguments of forward
        node.meta["val"] = self._fake_mode().from_tensor(tensor, static_shapes=True)
        self._new[node.name] = tensor.detach().contiguous()
        return node

    def add_input(self, name: str, shape: Sequence[Any], dtype: torch.dtype, after: fx.Node) -> fx.Node:
        """A new public input behind the input `after`. The caller gives the finished Program its `inputs`."""
        with self.graph.inserting_after(after):
            node = self.graph.placeholder(name)
        with self._fake_mode():
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype)
        self._inputs.add(node.name)
        return node

    def drop_inputs(self, nodes: Sequence[fx.Node]) -> None:
        """Public inputs that the finished Program does without. Nothing may read them by then."""
        self._dropped |= {n.name for n in nodes}

    def retype_input(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Let a public input have another dtype."""
        with self._fake_mode():
            node.meta["val"] = torch.empty_like(node.meta["val"], dtype=dtype)
        node.meta.pop("tensor_meta", None)

    def results(self) -> list[fx.Node]:
        """What the graph returns, in the order of `Program.outputs`."""
        return list(next(n for n in reversed(self.graph.nodes) if n.op == "output").args[0])

    def return_instead(self, results: Sequence[fx.Node]) -> None:
        """Return these. The caller gives the finished Program its `outputs`."""
        next(n for n in reversed(self.graph.nodes) if n.op == "output").args = (tuple(results),)

    def call(
        self, target: Any, *args: Any, before: fx.Node, like: fx.Node | None = None, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Insert `target(*args, **kwargs)` before a node; provenance is that of `like` (default: `before`)."""
        origin = like if like is not None else before
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        for key in ("nn_module_stack", "stack_trace"):
            if key in origin.meta:
                node.meta[key] = origin.meta[key]
        with self._fake_mode():
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **(kwargs or {}))
        return node

    def getitem(self, source: fx.Node, index: int, before: fx.Node) -> fx.Node:
        """`source[index]` of a node that returns a tuple."""
        import operator

        with self.graph.inserting_before(before):
            node = self.graph.call_function(operator.getitem, (source, index))
        node.meta.update({k: source.meta[k] for k in ("nn_module_stack", "stack_trace") if k in source.meta})
        node.meta["val"] = source.meta["val"][index]
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """All users of `old` read `new` instead; `old` is erased."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def finish(self) -> Program:
        """Drop what nothing reads, check the graph, and return it as a new Program."""
        self.graph.eliminate_dead_code()
        ep = self.program.ep
        signature = copy.copy(ep.graph_signature)
        specs = {s.arg.name: s for s in signature.input_specs}
        kept: list[InputSpec] = []
        for node in placeholders(self.graph):
            spec = specs.get(node.name)
            if node.name in self._inputs:
                spec = InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
            elif spec is None:
                spec = InputSpec(InputKind.BUFFER, TensorArgument(node.name), self._target_name(node.name), persistent=True)
            if (spec.kind is not InputKind.USER_INPUT and not node.users) or node.name in self._dropped:
                self.graph.erase_node(node)
                continue
            kept.append(spec)
        results = self.results()
        outputs = [copy.copy(s) for s in signature.output_specs[: len(results)]]
        outputs += [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(r.name), None) for r in results[len(outputs) :]]
        for out, result in zip(outputs, results, strict=True):
            if out.kind is OutputKind.USER_OUTPUT and isinstance(result, fx.Node):
                out.arg = TensorArgument(result.name)
        signature.input_specs, signature.output_specs = kept, outputs
        used = {s.target for s in kept if s.target is not None}
        state = {k: v for k, v in ep.state_dict.items() if k in used}
        state.update({self._target_name(k): v for k, v in self._new.items() if self._target_name(k) in used})
        constants = {k: v for k, v in ep.constants.items() if k in used}
        return replace(self.program, ep=self.exported(signature, state, constants))

    def exported(self, signature: ExportGraphSignature, state: dict[str, Any], constants: dict[str, Any]) -> ExportedProgram:
        """The edited graph as an ExportedProgram with exactly this signature."""
        ep = self.program.ep
        module = fx.GraphModule({}, self.graph)
        module.meta.update(ep.graph_module.meta)
        return ExportedProgram(
            root=module,
            graph=self.graph,
            graph_signature=signature,
            state_dict=state,
            range_constraints=ep.range_constraints,
            module_call_graph=_called(ep.module_call_graph, signature),
            example_inputs=None,
            constants=constants,
            verifiers=ep.verifiers,
        )

    @staticmethod
    def _target_name(placeholder: str) -> str:
        return "khtst." + placeholder.removeprefix("b_")

    def _fake_mode(self) -> Any:
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch._subclasses.FakeTensor):
                return value.fake_mode
        raise PassError("the graph has no tensor values; capture the model again")


def _called(entries: list[ModuleCallEntry], signature: ExportGraphSignature) -> list[ModuleCallEntry]:
    """The entries, where inputs or outputs were added with the number there is now: torch takes a program's arguments apart by them."""
    names = [s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
    whole = entries[0].signature
    if whole is None or (whole.in_spec.num_leaves, whole.out_spec.num_leaves) == (len(names), len(signature.output_specs)):
        return entries
    taken, given = tree_structure(((0,) * len(names), {})), tree_structure((0,) * len(signature.output_specs))
    return [ModuleCallEntry("", replace(whole, in_spec=taken, out_spec=given, forward_arg_names=names)), *entries[1:]]


def check_program(program: Program) -> None:
    """Raise PassError where the graph breaks its own rules: a node read before it is made, a value without shape, an input unbound."""
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the graph is malformed: {error}") from error
    bound, public = program.tensors(), set(program.user_inputs())
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in bound and node.name not in public:
            raise PassError(f"graph input {node.name!r} has no tensor bound to it")
        if node.op == "call_function" and "val" not in node.meta and node.users:
            raise PassError(f"node {node.name!r} ({node.target}) has no recorded shape")
