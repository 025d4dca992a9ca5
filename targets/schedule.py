"""Schedules for the PrimFuncs that have no hand-written kernel: everything TVM fused out of ordinary operators.

Elementwise producers are inlined, outer spatial axes run in parallel, reductions stand inside them and the innermost contiguous axis is
vectorized. Each output element is reduced by one thread in one fixed order, so the bits depend neither on the number of threads nor
on the CPU. Attempts are made in order, best first; the last one always works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import s_tir, tirx

LANES = 16
PARALLEL_WORK = 16384  # elements below which a parallel region costs more than it saves


def schedule_module(module: Any) -> Any:
    """Schedule every PrimFunc of an IRModule that is not marked `tirx.is_scheduled`."""
    done = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and not (func.attrs and "tirx.is_scheduled" in func.attrs):
            done.update_func(var, schedule(func))
    return done


def schedule(func: Any) -> Any:
    """Schedule one PrimFunc made of loop nests (what FuseTIR makes)."""
    for attempt in ATTEMPTS:
        sch = s_tir.Schedule(func)
        try:
            attempt(sch)
        except s_tir.ScheduleError:
            continue
        return sch.mod["main"].with_attr("tirx.is_scheduled", True)
    return func


def _vectorized(sch: Any) -> None:
    root = sch.get_sblock("root")
    _inline(sch, root)
    for block in sch.get_child_blocks(root):
        _one(sch, block)


def _parallel_only(sch: Any) -> None:
    root = sch.get_sblock("root")
    for block in sch.get_child_blocks(root):
        spatial, _ = _loops(sch, block)
        _parallel(sch, spatial[:1], 1)


def _as_is(sch: Any) -> None:
    """Scalar code, one thread: for PrimFuncs that are no loop nests."""


ATTEMPTS: tuple[Callable[[Any], None], ...] = (_vectorized, _parallel_only, _as_is)


def _inline(sch: Any, root: Any) -> None:
    """Inline elementwise producers into their consumers, last first; what cannot be inlined keeps its own loops."""
    for block in reversed(sch.get_child_blocks(root)[:-1]):
        try:
            sch.compute_inline(block)
        except s_tir.ScheduleError:
            continue
    for block in sch.get_child_blocks(root)[1:]:
        try:
            sch.reverse_compute_inline(block)
        except s_tir.ScheduleError:
            continue


def _one(sch: Any, block: Any) -> None:
    spatial, reduced = _loops(sch, block)
    if not spatial:
        return
    lanes = _lanes(_extent(sch, spatial[-1]))
    if lanes == 1:
        if reduced:
            sch.reorder(*spatial, *reduced)
        # A last axis of its own: fused with the others, every element pays for two divisions by a symbol.
        apart = len(spatial) > 1 and not reduced
        _parallel(sch, spatial[:-1] if apart else spatial, (_extent(sch, spatial[-1]) or 1) if apart else 1)
        return
    rest, vector = sch.split(spatial[-1], [None, lanes])
    outer = [*spatial[:-1], rest]
    sch.reorder(*outer, *reduced, vector)
    _parallel(sch, outer, lanes)
    sch.vectorize(vector)
    if reduced:  # last: a block without its initialization no longer counts as a reduction
        init = sch.decompose_reduction(block, reduced[0])
        sch.vectorize(sch.get_loops(init)[-1])


def _loops(sch: Any, block: Any) -> tuple[list[Any], list[Any]]:
    """Spatial and reduction loops of a block, outermost first; nothing for a block that is no plain nest."""
    iters = sch.get(block).iter_vars
    loops = sch.get_loops(block)
    if len(loops) != len(iters):
        return [], []
    spatial = [loop for loop, v in zip(loops, iters, strict=True) if v.iter_type == tirx.IterVar.DataPar]
    reduced = [loop for loop, v in zip(loops, iters, strict=True) if v.iter_type == tirx.IterVar.CommReduce]
    return spatial, reduced


def _extent(sch: Any, loop: Any) -> int | None:
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else None


def _lanes(extent: int | None) -> int:
    """Widest power of two up to LANES that divides the extent; 1 for a symbolic one."""
    lanes = LANES
    while lanes > 1 and (extent is None or extent % lanes):
        lanes //= 2
    return lanes


def _parallel(sch: Any, loops: list[Any], inner: int) -> None:
    """Run the outer loops in parallel, unless their work is known to be too small to pay for it."""
    if not loops:
        return
    fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    extent = _extent(sch, fused)
    if extent is None or extent * inner >= PARALLEL_WORK:
        sch.parallel(fused)
