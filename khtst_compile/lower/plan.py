"""Where `main` keeps its intermediate values: in buffers the caller holds, shared by values that are never needed together.

A run then allocates nothing, and values of equal shape in the same buffer are one tensor, made once a run. `main` gets a first
parameter, a tuple of storages; two functions beside it serve whoever calls it: `sizes` (inputs of main -> bytes of each buffer) and
`reserve` (bytes -> one storage). `step`, where there is one (see step.py), is treated alike, with `sizes_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.op import vm

INPUTS = "num_input"  # function attribute: how many parameters come before the weights
ALIGN = 64  # bytes; a buffer's size is a multiple of it


@dataclass
class _Value:
    """One tensor `main` allocates. first, last: places in the program where it is made and last read."""

    var: Any
    shape: Any
    dtype: str
    first: int
    last: int
    factors: tuple[int, ...]  # symbolic factors of its size, as places in _Sizes.atoms; sorted
    count: int  # bytes for each unit of their product


@dataclass
class _Buffer:
    """Values that share memory; the first is the largest. tensors: (shape, dtype) -> the variable all such values become."""

    values: list[_Value]
    tensors: list[tuple[Any, str, Any]] = field(default_factory=list)

    def fits(self, value: _Value) -> bool:
        return self.values[0].factors == value.factors and all(v.last < value.first or value.last < v.first for v in self.values)

    def has_like(self, value: _Value) -> bool:
        return any(v.dtype == value.dtype and tvm_ffi.structural_equal(v.shape, value.shape) for v in self.values)


class _Sizes:
    """Sizes as a number times a product of symbols. Two sizes compare only where the symbols are the same."""

    def __init__(self, known: set[Any]):
        self.atoms: list[Any] = []
        self._known = known

    def of(self, shape: Any, dtype: str) -> tuple[tuple[int, ...], int] | None:
        """(factors, count) of a tensor, or None where its size is not known before the run."""
        count, factors = math.ceil(tvm.DataType(dtype).bits / 8), []
        terms = list(shape.values)
        while terms:
            term = terms.pop()
            if isinstance(term, tirx.IntImm):
                count *= int(term)
            elif isinstance(term, tirx.Mul):
                terms += [term.a, term.b]
            elif set(tirx.analysis.undefined_vars(term)) <= self._known:
                factors.append(self._place(term))
            else:
                return None
        return tuple(sorted(factors)), count

    def _place(self, term: Any) -> int:
        for place, atom in enumerate(self.atoms):
            if tvm_ffi.structural_equal(atom, term):
                return place
        self.atoms.append(term)
        return len(self.atoms) - 1

    def bytes(self, value: _Value) -> Any:
        """The size as an expression, rounded up to ALIGN."""
        size: Any = tirx.IntImm("int64", value.count)
        for place in value.factors:
            size = size * self.atoms[place]
        return size if value.count % ALIGN == 0 else tirx.floordiv(size + (ALIGN - 1), ALIGN) * ALIGN


def plan_memory(module: Any) -> Any:
    """Plan `main` and `step` of a module after CallTIRRewrite and CanonicalizeBindings; what has no known size stays for TVM's planner."""
    known = [gv.name_hint for gv, _ in module.functions_items()]
    module = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for name, sizes in (("main", "sizes"), ("step", "sizes_step")):
        if name in known:
            module[name], module[sizes] = _planned(module, name, sizes)
    module["reserve"] = _reserve()
    return relax.transform.Normalize()(module)


def _planned(module: Any, name: str, sizes_name: str) -> tuple[Any, Any]:
    """The function of that name with its values in buffers, and the function that says how large they are."""
    function = module[name]
    bindings = [b for block in function.body.blocks for b in block.bindings]
    sizes = _Sizes({v for p in function.params for v in relax.analysis.definable_tir_vars_in_type(p.ty)})
    buffers = _share(_values(bindings, function.body.body, sizes))
    read = {v for e in (*(b.value for b in bindings), function.body.body) for v in relax.analysis.free_vars(e)}
    scratch = relax.Var("scratch", relax.ObjectType())
    body = _Rewrite(module, buffers, scratch, read).visit_expr(function.body)
    planned = relax.Function([scratch, *function.params], body, function.ret_ty, function.is_pure).with_attrs(function.attrs)
    planned = planned.with_attr(INPUTS, int(function.attrs[INPUTS]) + 1)
    return planned, _sizes(function, [sizes.bytes(b.values[0]) for b in buffers], sizes_name)


def trust_weights(module: Any) -> Any:
    """Drop the checks of weights that VMShapeLower puts before every run: they are checked once, when a library is loaded."""
    module = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    known = [gv.name_hint for gv, _ in module.functions_items()]
    for name in ("main", "taps", "step"):
        if name not in known:
            continue
        function = module[name]
        weights = set(function.params[int(function.attrs[INPUTS]) :])
        blocks = [
            relax.BindingBlock([b for b in block.bindings if not (_is_check(b.value) and b.value.args[0] in weights)])
            for block in function.body.blocks
        ]
        body = relax.SeqExpr(blocks, function.body.body)
        module[name] = relax.Function(function.params, body, function.ret_ty, function.is_pure).with_attrs(function.attrs)
    return module


def _is_check(value: Any) -> bool:
    return (
        isinstance(value, relax.Call)
        and isinstance(value.op, relax.ExternFunc)
        and value.op.global_symbol in ("vm.builtin.check_tensor_info", "vm.builtin.match_shape")
    )


def _is_alloc(value: Any) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.builtin.alloc_tensor"


def _values(bindings: list[Any], result: Any, sizes: _Sizes) -> list[_Value]:
    """What is allocated, and from where to where it is needed. A variable bound to anything made of a tensor may share its memory."""
    values: dict[Any, _Value] = {}
    roots: dict[Any, set[Any]] = {}
    for place, binding in enumerate(bindings):
        if _is_alloc(binding.value):
            shape, dtype = binding.value.args[0], str(binding.value.args[1].value)
            size = sizes.of(shape, dtype) if isinstance(shape, relax.ShapeExpr) else None
            if size is not None:
                values[binding.var] = _Value(binding.var, shape, dtype, place, place, *size)
                roots[binding.var] = {binding.var}
            continue
        used = {r for v in relax.analysis.free_vars(binding.value) for r in roots.get(v, ())}
        roots[binding.var] = used
        for root in used:
            values[root].last = place
    for variable in relax.analysis.free_vars(result):
        for root in roots.get(variable, ()):
            values[root].last = len(bindings)
    return list(values.values())


def _share(values: list[_Value]) -> list[_Buffer]:
    """Values into buffers, largest first; among buffers that are free, one with a tensor of the same shape is best."""
    buffers: list[_Buffer] = []
    for value in sorted(values, key=lambda v: (-v.count, v.first)):
        free = [b for b in buffers if b.fits(value)]
        if free:
            min(free, key=lambda b: (not b.has_like(value), b.values[0].count)).values.append(value)
        else:
            buffers.append(_Buffer([value]))
    return buffers


@relax.expr_functor.mutator
class _Rewrite(relax.PyExprMutator):  # type: ignore[misc]
    """Every planned allocation of `main` becomes a tensor in its buffer, made where the first value it stands for was."""

    def __init__(self, module: Any, buffers: list[_Buffer], scratch: Any, read: set[Any]):
        super().__init__(module)
        self.home = {v.var: (place, b, v) for place, b in enumerate(buffers) for v in b.values}
        self.scratch = scratch
        self.read = read
        self.storages: dict[int, Any] = {}
        self.shapes: list[tuple[Any, Any]] = []

    def visit_var_binding_(self, binding: Any) -> None:
        if binding.var in self.home:
            self.set_var_remap(binding.var, self._tensor(*self.home[binding.var]))
        elif binding.var in self.read or isinstance(binding.value, relax.Call):  # else a tuple whose items are read by name
            super().visit_var_binding_(binding)

    def _tensor(self, place: int, buffer: _Buffer, value: _Value) -> Any:
        for shape, dtype, variable in buffer.tensors:
            if dtype == value.dtype and tvm_ffi.structural_equal(shape, value.shape):
                return variable
        if place not in self.storages:
            self.storages[place] = self.builder_.emit(
                relax.Call(
                    relax.ExternFunc("vm.builtin.tuple_getitem"),
                    [self.scratch, relax.prim_value(place)],
                    ty_args=[relax.ObjectType()],
                )
            )
        call = vm.alloc_tensor(self.storages[place], 0, self._shape(value.shape), value.dtype)
        variable = self.builder_.emit(call)
        buffer.tensors.append((value.shape, value.dtype, variable))
        return variable

    def _shape(self, shape: Any) -> Any:
        for known, variable in self.shapes:
            if tvm_ffi.structural_equal(known, shape):
                return variable
        self.shapes.append((shape, self.builder_.emit(shape)))
        return self.shapes[-1][1]


def _sizes(planned: Any, sizes: list[Any], name: str) -> Any:
    inputs = planned.params[: int(planned.attrs[INPUTS])]
    function = relax.Function(inputs, relax.SeqExpr([], relax.ShapeExpr(sizes)), relax.ShapeType(ndim=len(sizes)))
    return relax.utils.copy_with_new_vars(function).with_attr("global_symbol", name)


def _reserve() -> Any:
    size = tirx.Var("size", "int64")
    given = relax.Var("bytes", relax.ShapeType([size]))
    storage = relax.Var("storage", relax.ObjectType())
    call = vm.alloc_storage(relax.ShapeExpr([size]), 0, "uint8")
    body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(storage, call)])], storage)
    return relax.Function([given], body, relax.ObjectType()).with_attr("global_symbol", "reserve")
