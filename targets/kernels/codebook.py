"""Vectors into the ids of a codebook, and their values: product, argmax, gather and what is left, level by level, in one kernel.

Rows go through in blocks that stay in the cache for all levels. At each level

    coarse[m, k] = about <left[m], c[k] - mean> + bias[k]       int8, or float32 by fused multiply-adds (mean 0)
    open         = the k whose coarse score is so near the largest that the bound of two codes' errors allows them to be it
    id           = the only one that is open, or the first largest of those by the score that `ops.codebook.exact_scores` writes down

so that ids are the same whatever the coarse scores are made of. With q a row's codes, a their scale, r = left / a - q, and the codebook
c[k] = mean + s[k] w[k] + e[k]: the errors of two codes i, j differ by at most

    a (|q| max |e[i] - e[j]| + |r| max |c[i] - c[j]|)           by Cauchy-Schwarz, twice

and some roundings of float32 (`codebook_rows.bounds`). Two codes are nearer to each other than twice the longest one, which leaves a third
of the open codes. Of these the best is scored first, and then only what the bound of a single code's error, with |e| and |c - mean|,
cannot rule out. The maxima are measured in float64 when the codebook is packed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.layout import Layout, Packed
from khtst_compile.quant.codebook_int8 import STEPS, quantize_codebook
from khtst_compile.scores import LARGEST_CODE

from .coarse import UNROLL, pack_starts
from .codebook_choice import choose, narrow
from .codebook_rows import copy_row, measure, prepare, score
from .codebook_spec import BLOCK, FACTS, Codebook, Parts
from .rows import Arguments, each_vector, save
from .tiles import opaque
from .vec import Expr, Floats, f32, span

__all__ = ["FACTS", "Codebook", "pack", "prim_func"]


@lru_cache(maxsize=32)
def prim_func(spec: Codebook) -> tirx.PrimFunc:
    """The TIR of `spec`.

    Arguments: z (lead.., d) float32; the arrays of `pack`; [values (lead.., v) float32]; [ids (lead.., levels) int32].
    """
    coarse, panels = spec.coarse, spec.panels
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("z", spec.features)
        if spec.int8:
            args.vector("weights", spec.levels * panels.padded * coarse.width, "int8")
            if coarse.starts:
                args.vector("starts", spec.levels * coarse.starts, "int16" if coarse.bytes else "int32")
            args.vector("scale", spec.levels * panels.padded)
            args.vector("mean", spec.levels * spec.padded)
        else:
            args.vector("weights", spec.levels * panels.padded * spec.features)
        args.vector("bias", spec.levels * panels.padded)
        args.vector("facts", spec.levels * FACTS)
        args.vector("exact", spec.levels * spec.codes * spec.padded)
        args.vector("table", spec.levels * spec.codes * spec.value_padded)
        if spec.values_out:
            args.rows("values", spec.value_features)
        if spec.ids_out:
            args.rows("ids", spec.levels, "int32")
        rows, flat = args.flatten()
        with T.parallel(T.int64(0), T.ceildiv(rows, T.int64(BLOCK))) as block:
            first = opaque(block * BLOCK)
            count = opaque(T.min(rows - first, T.int64(BLOCK)))
            _block(spec, flat, first, count)
    return builder.get()


def _block(spec: Codebook, flat: dict[str, Expr], first: Expr, count: Expr) -> None:
    coarse = spec.coarse

    def room(elements: int, dtype: str = "float32") -> Expr:
        return T.alloc_buffer((elements,), dtype, scope="global")

    parts = Parts(
        flat,
        room(BLOCK * spec.padded),
        room(BLOCK * spec.value_padded),
        room(BLOCK * spec.scores),
        room(BLOCK),
        room(BLOCK),
        room(BLOCK),
        room(BLOCK * coarse.width if spec.int8 else 1, coarse.codes_dtype),
        room(BLOCK, "int32"),
        room(BLOCK * spec.scores, "int32"),
        room(BLOCK, "int32"),
    )
    with T.serial(T.int64(0), count) as row:
        T.buffer_store(parts.lost, T.int32(0), [row])
        copy_row(spec, parts, first, row)
    with T.serial(T.int64(0), T.int64(spec.levels)) as number:
        level = opaque(number)
        # Two passes, as rows wait for what decides each of them: the next row can begin meanwhile.
        with T.serial(T.int64(0), count) as row:
            measure(spec, parts, level, row)
        with T.serial(T.int64(0), count) as row:
            prepare(spec, parts, level, row)
        score(spec, parts, level, count)
        with T.serial(T.int64(0), count) as row:
            narrow(spec, parts, level, row)
        with T.serial(T.int64(0), count) as row:
            choose(spec, parts, level, first, row)
    if spec.values_out:
        with T.serial(T.int64(0), count) as row:
            is_lost = T.Bind(parts.lost[row] != 0)
            start, at = T.Bind((first + row) * spec.value_features), T.Bind(row * spec.value_padded)

            def write(off: Expr, valid: int, is_lost: Expr = is_lost, start: Expr = start, at: Expr = at) -> None:
                value = T.Bind(T.Select(is_lost, f32(float("nan")), parts.total[span(at + off)]))
                save(flat["values"], value, start + off, valid)

            each_vector(spec.value_features, write)


def pack(spec: Codebook, codes: Floats, bias: Floats | None, table: Floats) -> list[npt.NDArray[np.generic] | Packed]:
    """The constant arguments of `spec`, in order.

    codes: (levels, K, d) float32; bias: (levels, K) float32, -inf for a row that is never chosen, or None; table: (levels, K, v) float32.
    Raises LoweringError for shapes that do not fit, entries that are not finite or above LARGEST_CODE, and a level without a row to choose.
    """
    wanted = (spec.levels, spec.codes, spec.features), (spec.levels, spec.codes, spec.value_features)
    if (codes.shape, table.shape) != wanted or (bias is not None and bias.shape != wanted[0][:2]):
        raise LoweringError(
            f"{spec.name}: codes {codes.shape}, values {table.shape}, bias {None if bias is None else bias.shape}; needed {wanted[0]}, "
            f"{wanted[1]}, {wanted[0][:2]}"
        )
    start = np.zeros(wanted[0][:2], np.float32) if bias is None else bias
    if not (np.abs(codes) <= LARGEST_CODE).all() or not ((np.abs(start) <= LARGEST_CODE**2) | np.isneginf(start)).all():
        raise LoweringError(
            f"{spec.name}: the codebook holds NaN, an infinity or an entry above {LARGEST_CODE:g}; needed: smaller numbers"
        )
    if np.isneginf(start).all(axis=1).any():
        raise LoweringError(f"{spec.name}: a level has no code to choose, every bias is -inf; needed: one code or more")
    panels = spec.panels
    columns = np.full((spec.levels, panels.padded), -np.inf, np.float32)
    columns[:, : spec.codes] = start
    facts = np.zeros((spec.levels, FACTS), np.float32)
    used = ~np.isneginf(start)
    facts[:, 6] = np.where(used, np.abs(start), 0).max(1)
    facts[:, 5] = _up(np.sqrt(np.square(np.where(used[..., None], codes, 0).astype(np.float64)).sum(-1)).max(1))
    exact = np.zeros((spec.levels, spec.codes, spec.padded), np.float32)
    exact[:, : spec.codes, : spec.features] = codes
    packed: list[npt.NDArray[np.generic] | Packed]
    if spec.int8:
        coarse = spec.coarse
        made = [quantize_codebook(level, some, coarse.bytes) for level, some in zip(codes, used, strict=True)]
        mean = np.zeros((spec.levels, spec.padded), np.float32)
        mean[:, : spec.features] = [m.mean for m in made]
        matrix = np.concatenate([np.pad(m.weights, ((0, panels.padded - spec.codes), (0, 0))) for m in made])
        scale = np.zeros((spec.levels, panels.padded), np.float32)
        scale[:, : spec.codes] = [m.scale for m in made]
        facts[:, 0] = [m.part for m in made]
        facts[:, 7] = STEPS // UNROLL
        facts[:, 8] = [np.abs(m.mean).max() for m in made]
        facts[:, 1:5] = _up(np.array([[m.apart, m.diameter, m.off, m.radius] for m in made]))
        packed = [_several(matrix, coarse.layout, spec.levels)]
        starts = [pack_starts(coarse, m.weights) for m in made]
        if coarse.starts:
            packed.append(np.concatenate([s for s in starts if s is not None]))
        packed += [scale.reshape(-1), mean.reshape(-1)]
    else:
        matrix = np.pad(codes, ((0, 0), (0, panels.padded - spec.codes), (0, 0))).reshape(-1, spec.features)
        layout = Layout((panels.padded, spec.features), (panels.count, panels.width, spec.features), (0, 2, 1))
        packed = [_several(matrix, layout, spec.levels)]
    values = np.zeros((spec.levels, spec.codes, spec.value_padded), np.float32)
    values[..., : spec.value_features] = table
    return [*packed, columns.reshape(-1), facts.reshape(-1), exact.reshape(-1), values.reshape(-1)]


def _up(values: npt.NDArray[np.float64]) -> Floats:
    """The next float32 above."""
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))


def _several(matrix: npt.NDArray[np.generic], one: Layout, levels: int) -> Packed:
    """Matrices one below the other, each in the layout `one`."""
    rows, columns = one.padded
    axes = (0, *(a + 1 for a in one.axes))
    layout = Layout((levels * rows, columns), (levels, *one.blocks), axes)
    return Packed(layout.apply(matrix), matrix, layout)
