"""Batched float32 matrix product of two activations: C[b] = A[b] B[b], or A[b] B[b]^T, every size known only at run time.

    C[b, m, n] = sum_k fma(A[b, m, k], B[b, k, n], .) from 0, k = 0 .. K-1 in order (or B[b, n, k])

A panel of B's columns is copied to scratch memory, padded with zeros, then walked like packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.exact import fma_reference
from khtst_compile.targets.isa import Isa

from .rows import Lead
from .tiles import Panels, multiply_add, opaque, panels_of, walk_rows
from .vec import Expr, Floats, f32, small, span, store

LEAD1 = Lead(1)
"""One symbolic batch dimension."""


@dataclass(frozen=True)
class MatmulF32:
    """One batched matrix product.

    isa:         instruction set.
    batch:       leading dimensions, the same of A, B and C.
    transposed:  B is (batch.., n, k) instead of (batch.., k, n).
    m, n, k:     sizes, None where symbolic.
    name:        of the function.
    """

    isa: Isa
    batch: Lead = LEAD1
    transposed: bool = False
    m: int | None = None
    n: int | None = None
    k: int | None = None
    name: str = "matmul_f32"

    @property
    def panels(self) -> Panels:
        """The cut of the columns; its count of columns stands for any n."""
        widest = 2 * self.isa.lanes if self.isa.registers == 16 else 4 * self.isa.lanes
        return panels_of(min(self.n or widest, widest), self.isa)


def prim_func(spec: MatmulF32) -> tirx.PrimFunc:
    """The TIR of `spec`. Arguments: A (batch.., m, k), B (batch.., k, n) or (batch.., n, k), C (batch.., m, n), float32."""
    panels = spec.panels
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        dims = spec.batch.dims()
        m, n, k = (
            tirx.Var(name, "int64") if size is None else T.int64(size)
            for name, size in (("m", spec.m), ("n", spec.n), ("k", spec.k))
        )
        shapes = {"a": (m, k), "b": (n, k) if spec.transposed else (k, n), "out": (m, n)}
        buffers = {name: T.arg(name, T.buffer((*dims, *shape), "float32")) for name, shape in shapes.items()}
        batch = dims[0]
        for dim in dims[1:]:
            batch = batch * dim
        a, b, out = (
            T.decl_buffer((batch * rows * columns,), "float32", data=buffers[name].data)
            for name, (rows, columns) in shapes.items()
        )
        count = T.Bind(T.ceildiv(n, T.int64(panels.width)))
        with T.parallel(T.int64(0), batch * count) as task:
            which = opaque(T.truncdiv(task, count))
            column = opaque((task - which * count) * panels.width)
            valid = opaque(T.min(T.int64(panels.width), n - column))
            packed = T.alloc_buffer(((k + 1) * panels.width,), "float32", scope="global")
            _pack_panel(spec, b, packed, opaque(which * k * n), column, valid, n, k)
            first_a, first_c = opaque(which * m * k), opaque(which * m * n + column)
            ragged = small(panels.width)

            def tile(row: Expr, rows: int) -> None:
                acc = multiply_add(
                    panels,
                    rows,
                    k,
                    lambda _, __: f32(0.0, panels.lanes),
                    lambda i, depth: a[first_a + (row + i) * k + depth],
                    packed,
                    [T.int64(0)],
                )[0]
                for i in range(rows):
                    start = T.Bind(first_c + (row + i) * n)
                    _store_row(panels, out, acc[i], start, valid, ragged)

            walk_rows(T.int64(0), m, panels.rows, tile, lambda row, rows: None)
    return builder.get()


def _store_row(panels: Panels, out: Expr, acc: list[Expr], start: Expr, valid: Expr, ragged: Expr) -> None:
    lanes = panels.lanes
    with T.If(valid == panels.width):
        with T.Then():
            for j in range(panels.vectors):
                store(out, acc[j][span(0, lanes)], start + j * lanes)
        with T.Else():
            for j in range(panels.vectors):
                store(ragged, acc[j][span(0, lanes)], j * lanes)
            with T.serial(T.int64(0), valid) as c:
                T.buffer_store(out, ragged[c], [start + c])


def _pack_panel(spec: MatmulF32, b: Expr, packed: Expr, base: Expr, column: Expr, valid: Expr, n: Expr, k: Expr) -> None:
    """Copy `valid` columns of B from `column` to packed [k, panel width], zeros beyond."""
    panels = spec.panels
    width, lanes = panels.width, panels.lanes
    with T.If(valid < width), T.Then():
        with T.serial(T.int64(0), k * panels.vectors) as v:
            store(packed, f32(0.0, lanes), v * lanes)
        with T.serial(T.int64(0), k) as depth, T.serial(T.int64(0), valid) as c:
            source = (column + c) * k + depth if spec.transposed else depth * n + column + c
            T.buffer_store(packed, b[base + source], [depth * width + c])
    with T.If(valid == width), T.Then():
        if spec.transposed:
            with T.serial(T.int64(0), k) as depth, T.serial(T.int64(0), T.int64(width)) as c:
                T.buffer_store(packed, b[base + (column + c) * k + depth], [depth * width + c])
        else:
            with T.serial(T.int64(0), k) as depth:
                for j in range(panels.vectors):
                    start = T.Bind(base + depth * n + column + j * lanes)
                    store(packed, b[span(start, lanes)], depth * width + j * lanes)


def reference(a: Floats, b: Floats, transposed: bool = False) -> Floats:
    """What the kernel computes, to the bit: a (.., m, k), b (.., k, n) or (.., n, k) -> (.., m, n)."""
    b = np.swapaxes(b, -1, -2) if transposed else b
    acc = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for k in range(a.shape[-1]):
        acc = fma_reference(a[..., :, k, None], b[..., k, None, :], acc)
    return acc
