"""`step`: a language model's `main` on a cache that lies in memory the caller holds.

`main` takes every layer's keys and values as a tensor and returns the new ones; making some sixty tensors, checking them and copying
the results takes a tenth of a step of a small model. `step` takes one storage for each, makes the tensors of what is filled itself,
and writes the new rows behind them. The kernels are those of `main`, so the bits are too.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.op import vm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.lower.plan import INPUTS

CACHED = "cached"  # function attribute: "input:output" for each that the cache holds, separated by commas


def cached_pairs(inputs: list[str], outputs: list[str]) -> str:
    """The attribute for a program with inputs past_X and outputs new_X; empty where it has none."""
    places = {name: place for place, name in enumerate(outputs)}
    pairs = [(i, places.get("new" + name.removeprefix("past"))) for i, name in enumerate(inputs) if name.startswith("past_")]
    return ",".join(f"{i}:{o}" for i, o in pairs) if all(o is not None for _, o in pairs) else ""


def add_step(module: Any) -> Any:
    """`step` beside `main` of a module after CallTIRRewrite and CanonicalizeBindings, where `main` has a cache.

    step(storages, the inputs that are not cached, filled positions as a shape of one, weights) returns the outputs that are not cached.
    """
    main = module["main"]
    text = str(main.attrs[CACHED]) if CACHED in main.attrs else ""
    if not text:
        return module
    pairs = [(int(i), int(o)) for i, _, o in (pair.partition(":") for pair in text.split(","))]
    count = int(main.attrs[INPUTS])
    held = [main.params[i] for i, _ in pairs]
    filled = held[0].ty.shape.values[0]
    storages, at = relax.Var("storages", relax.ObjectType()), relax.Var("filled", relax.ShapeType([filled]))
    rewrite = _Step(module, main, pairs, storages)
    body = rewrite.visit_expr(main.body)
    params = [storages, *(p for p in main.params[:count] if p not in held), at, *main.params[count:]]
    function = relax.Function(params, body, body.body.ty, main.is_pure).with_attrs(main.attrs)
    function = relax.utils.copy_with_new_vars(function).without_attr(CACHED).with_attr("global_symbol", "step")
    module = rewrite.builder_.get()
    module["step"] = function.with_attr(INPUTS, len(params) - len(main.params[count:]))
    return relax.transform.Normalize()(module)


@relax.expr_functor.mutator
class _Step(relax.PyExprMutator):  # type: ignore[misc]
    """The body of `main` between two additions: tensors of what is filled before it, copies of the new rows after it."""

    def __init__(self, module: Any, main: Any, pairs: list[tuple[int, int]], storages: Any):
        super().__init__(module)
        self.main, self.pairs, self.storages = main, pairs, storages
        self.held: list[Any] = []
        self.shapes: list[tuple[Any, Any]] = []
        dtypes = sorted({str(main.params[i].ty.dtype) for i, _ in pairs})
        self.copies = {d: self.builder_.add_func(_copy_rows(d), f"copy_rows_{d}") for d in dtypes}

    def visit_var_binding_(self, binding: Any) -> None:
        if not self.held:
            self._open()
        if binding.var.same_as(self.main.body.body):
            self._close(binding)
        else:
            super().visit_var_binding_(binding)

    def _open(self) -> None:
        for place, (i, _) in enumerate(self.pairs):
            past, arguments = self.main.params[i], [self.storages, relax.prim_value(place)]
            getitem = relax.Call(relax.ExternFunc("vm.builtin.tuple_getitem"), arguments, ty_args=[relax.ObjectType()])
            self.held.append(self.builder_.emit(getitem))
            self.set_var_remap(past, self._tensor(self.held[-1], 0, past.ty))

    def _close(self, binding: Any) -> None:
        fields = [self.visit_expr(f) for f in binding.value.fields]
        for storage, (i, o) in zip(self.held, self.pairs, strict=True):
            filled, *row = self.main.params[i].ty.shape.values
            dtype = str(fields[o].ty.dtype)
            bytes_each = tvm.DataType(dtype).bits // 8
            start = relax.prim_value(math.prod(row, start=filled * tirx.IntImm("int64", bytes_each)))
            rows = self._tensor(storage, start, fields[o].ty)
            self.builder_.emit(relax.Call(self.copies[dtype], [fields[o], rows]))
        handed_on = {o for _, o in self.pairs}
        kept = relax.Tuple([f for place, f in enumerate(fields) if place not in handed_on])
        self.set_var_remap(binding.var, self.builder_.emit(kept))

    def _tensor(self, storage: Any, start: Any, like: Any) -> Any:
        """A tensor of that type from byte `start` of a storage; tensors of one shape share it."""
        made = next((v for shape, v in self.shapes if tvm_ffi.structural_equal(shape, like.shape)), None)
        if made is None:
            made = self.builder_.emit(like.shape)
            self.shapes.append((like.shape, made))
        return self.builder_.emit(vm.alloc_tensor(storage, start, made, str(like.dtype)))


def _copy_rows(dtype: str) -> Any:
    """new (rows, batch, width) -> the same from any byte of a storage on."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(f"copy_rows_{dtype}")
        T.func_attr({"global_symbol": f"copy_rows_{dtype}", "tirx.noalias": True, "tirx.is_scheduled": True})
        dims, at = [tirx.Var(n, "int64") for n in ("rows", "batch", "width")], tirx.Var("at", "int64")
        given = T.arg("new", T.buffer(dims, dtype))
        written = T.arg("to", T.buffer(dims, dtype, elem_offset=at, offset_factor=1))
        size = dims[0] * dims[1] * dims[2]
        source = T.decl_buffer((size,), dtype, data=given.data)
        target = T.decl_buffer((at + size,), dtype, data=written.data)
        with T.serial(T.int64(0), size) as i:
            T.buffer_store(target, source[i], [at + i])
    return builder.get()
