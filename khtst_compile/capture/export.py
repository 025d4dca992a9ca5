"""One module and its example inputs -> a Program, with as many axes dynamic as the model allows."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from khtst_compile.capture.clean import clean, functional, refuse_unknown
from khtst_compile.capture.flags import plain_flags
from khtst_compile.capture.inline import inline_modes
from khtst_compile.capture.refusals import model_line, refusal
from khtst_compile.capture.shapes import Axis, resized, trace_size
from khtst_compile.capture.wrapper import Named
from khtst_compile.errors import CaptureError
from khtst_compile.program import Program, TensorSpec, check_program

log = logging.getLogger(__name__)
UPCAST = (torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Exported:
    """ep: the graph; axes: those that stayed dynamic; notes: one sentence per axis that did not, or not so far as wanted."""

    ep: ExportedProgram
    axes: tuple[Axis, ...]
    notes: tuple[str, ...]


def to_program(module: Named, examples: dict[str, torch.Tensor], axes: Sequence[Axis], meta: dict[str, Any]) -> Program:
    """Export `module` (eval mode, float32, CPU), clean the graph and describe its inputs and outputs.

    examples: input name -> tensor, in call order. Raises CaptureError where the model cannot be exported or an axis the user
    asked for cannot vary.
    """
    with exporting(), plain_flags(module, examples):
        exported = export(module, examples, axes)
    return describe(
        exported.ep, list(examples), module.output_names(), exported.axes, {**meta, "static_axes": list(exported.notes)}
    )


def describe(
    ep: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], axes: Sequence[Axis], meta: dict[str, Any]
) -> Program:
    """Clean an exported graph and give its inputs, outputs and axes their public names."""
    inline_modes(ep)
    draft = functional(Program(ep, (), (), meta=meta))
    _rename_builtins(draft.ep)
    names = _symbols(draft, inputs, axes)
    values = _values(draft)
    program = replace(
        draft,
        inputs=tuple(_spec(n, v, names) for n, v in zip(inputs, values[0], strict=True)),
        outputs=tuple(_spec(n, v, names) for n, v in zip(outputs, values[1], strict=True)),
        axes={a.name: (a.low, a.high) for a in axes},
    )
    refuse_unknown(program)
    program = clean(program)
    check_program(program)
    parameters = sum(t.numel() for n, t in program.tensors().items() if n.startswith("p_"))
    return replace(program, meta={**meta, "parameters": parameters})


def export(module: torch.nn.Module, examples: dict[str, torch.Tensor], axes: Sequence[Axis]) -> Exported:
    """Export with every axis dynamic; where that fails, ask the model which axes it fixes and try again without those."""
    moving = [a for a in axes if not a.fixed]
    try:
        return Exported(_export(module, examples, axes, {p: d for a in moving for p, d in _named(a)}), tuple(moving), ())
    except Exception as error:  # whatever the model's own code raises while it is traced
        if not moving:
            raise refusal(error) from error
        first = error
    notes: list[str] = []
    kept = _ask(module, examples, axes, notes, first)
    for dropped in ((), tuple(a for a in kept if a.name != "batch"), tuple(kept)):
        left = [a for a in kept if a not in dropped]
        try:
            ep = _export(module, examples, axes, {p: d for a in left for p, d in _named(a)})
        except Exception as error:
            first = error
            continue
        for axis in dropped:
            notes.append(_fixed_note(axis, examples, first))
        _refuse_asked(axes, left, notes, first)
        for note in notes:
            log.warning("%s", note)
        return Exported(ep, tuple(left), tuple(notes))
    raise refusal(first) from first


def _ask(
    module: torch.nn.Module, examples: dict[str, torch.Tensor], axes: Sequence[Axis], notes: list[str], first: Exception
) -> list[Axis]:
    """Export once with Dim.AUTO, which lets the model fix or narrow an axis, and return the axes as they came out."""
    moving = [a for a in axes if not a.fixed]
    try:
        ep = _export(module, examples, axes, {p: Dim.AUTO(min=a.low, max=a.high) for a in moving for p in a.places})
    except Exception as error:
        log.debug("no answer from an automatic export: %s", error)
        return moving
    kept: list[Axis] = []
    found = dict(zip(examples, _values(Program(ep, (), ()))[0], strict=True))
    ranges = {str(k): v for k, v in ep.range_constraints.items()}
    for axis in moving:
        sizes = [found[n].shape[i] for n, i in axis.places]
        if any(isinstance(s, int) for s in sizes):
            notes.append(_fixed_note(axis, examples, first))
            continue
        limits = [ranges[str(s)] for s in sizes if str(s) in ranges]
        low = max([axis.low, *(int(r.lower) for r in limits if r.lower > 2)])
        high = min([axis.high, *(int(r.upper) for r in limits if r.upper < axis.high)])
        if (low, high) != (axis.low, axis.high):
            notes.append(f"{axis.name}: {axis.low}..{axis.high} narrowed to {low}..{high}, which is what the model allows")
        kept.append(replace(axis, low=low, high=high))
    return kept


def _refuse_asked(axes: Sequence[Axis], left: Sequence[Axis], notes: Sequence[str], error: Exception) -> None:
    """Raise CaptureError where an axis the user asked for did not come out as asked."""
    have = {a.name: (a.low, a.high) for a in left}
    for axis in axes:
        if axis.asked and not axis.fixed and have.get(axis.name) != (axis.low, axis.high):
            why = next((n for n in notes if n.startswith(axis.name + ":")), str(refusal(error)))
            raise CaptureError(f"shapes {axis.name}={axis.low}..{axis.high} is not possible: {why}") from error


def _fixed_note(axis: Axis, examples: dict[str, torch.Tensor], error: Exception) -> str:
    name, position = axis.places[0]
    reason = str(refusal(error)).splitlines()[0]
    return f"{axis.name}: fixed at {examples[name].shape[position]}, because the model does not allow it to vary: {reason}"


def _named(axis: Axis) -> list[tuple[tuple[str, int], Any]]:
    dim = Dim(axis.name, min=axis.low, max=axis.high)
    return [(place, dim) for place in axis.places]


def _export(
    module: torch.nn.Module, examples: dict[str, torch.Tensor], axes: Sequence[Axis], dims: dict[tuple[str, int], Any]
) -> ExportedProgram:
    """One torch.export. Axes in `dims` are dynamic, all others static; examples must have the sizes to trace at."""
    dynamic: dict[str, dict[int, Any]] = {n: {} for n in examples}
    for (name, position), dim in dims.items():
        dynamic[name][position] = dim
    return torch.export.export(module, tuple(examples.values()), dynamic_shapes=dynamic, strict=False)


def fit_examples(examples: dict[str, torch.Tensor], axes: Sequence[Axis]) -> dict[str, torch.Tensor]:
    """The examples at sizes that can be traced: in range, at least 2 where the axis may vary, equal where an axis is shared."""
    # Copies: one tensor given for two inputs would be traced as one.
    fitted = {n: t.clone() for n, t in examples.items()}
    for axis in axes:
        name, position = axis.places[0]
        size = trace_size(axis, examples[name].shape[position])
        for name, position in axis.places:
            fitted[name] = resized(fitted[name], position, size)
    return fitted


@contextmanager
def exporting() -> Iterator[None]:
    """No gradients, and attention written out operator by operator instead of torch's fused inference path."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), users_code():
            yield
    except SystemExit as error:
        raise CaptureError(
            f"the model calls sys.exit({error.code!r}) while it runs{_at(error)}; take that out of forward"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _at(error: BaseException) -> str:
    line = model_line(error)
    return f" at {line}" if line else ""


def users_code() -> AbstractContextManager[object]:
    """While code of the user runs, what it prints goes to standard error: standard output is for results."""
    return redirect_stdout(sys.stderr)


def _rename_builtins(ep: ExportedProgram) -> None:
    """Graph inputs called like a Python builtin ("input") get another name: torch.fx renames such nodes whenever it copies a graph."""
    specs = {s.arg.name: s for s in ep.graph_signature.input_specs}
    for node in ep.graph.nodes:
        if node.op == "placeholder" and hasattr(builtins, node.name):
            spec = specs[node.name]
            node._rename(f"input_{node.name}")
            spec.arg = TensorArgument(node.name)


def _values(program: Program) -> tuple[list[Any], list[Any]]:
    """The fake values of the public inputs and of the outputs, in order."""
    by_name = {n.name: n for n in program.graph.nodes}
    names = [s.arg.name for s in program.ep.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    output = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    return [by_name[n].meta["val"] for n in names], [n.meta["val"] for n in output.args[0]]


def _symbols(program: Program, inputs: Sequence[str], axes: Sequence[Axis]) -> dict[str, str]:
    """Symbol in the graph ("s33") -> name of the axis."""
    values = dict(zip(inputs, _values(program)[0], strict=True))
    return {str(values[n].shape[i]): a.name for a in axes for n, i in a.places}


def _spec(name: str, value: Any, symbols: dict[str, str]) -> TensorSpec:
    """A dimension is an int, an axis, or an expression of axes ("seq//2")."""
    shape = tuple(s if isinstance(s, int) else _rename(str(s), symbols) for s in value.shape)
    return TensorSpec(name, str(value.dtype).removeprefix("torch."), shape)


def _rename(expression: str, symbols: dict[str, str]) -> str:
    for symbol in sorted(symbols, key=len, reverse=True):
        expression = expression.replace(symbol, symbols[symbol])
    return expression
