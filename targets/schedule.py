"""Schedules for the PrimFuncs that have no hand-written kernel: everything TVM fused out of ordinary operators.

One rule: inline what is elementwise, run the outer spatial axes in parallel, put reductions inside them and vectorize the innermost
contiguous axis. Each output element is reduced by one thread in one fixed order (16 interleaved partial sums where the reduced axis
is the contiguous one), so the bits do not depend on the number of threads or the CPU.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx

LANES = 16
PARALLEL_WORK = 16384  # elements below which a parallel region costs more than it saves


def schedule_module(module: Any) -> Any:
    """Schedule every PrimFunc of an IRModule that is not marked `tirx.is_scheduled`."""
    done = tvm.IRModule(dict(module.functions), attrs=module.attrs)
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and not (func.attrs and "tirx.is_scheduled" in func.attrs):
            done.update_func(var, schedule(func))
    return done


def schedule(func: Any) -> Any:
    """Schedule one PrimFunc whose blocks are perfect loop nests (what FuseTIR makes)."""
    sch = s_tir.Schedule(func)
    root = sch.get_sblock("root")
    _inline(sch, root)
    for block in sch.get_child_blocks(root):
        _one(sch, block)
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)


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
    kinds = [str(v.iter_type) for v in sch.get(block).iter_vars]
    loops = sch.get_loops(block)
    if len(loops) != len(kinds) or not loops:
        return
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if _is_spatial(kind)]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if not _is_spatial(kind)]
    if not reduced:
        _spatial(sch, spatial)
    else:
        _reduction(sch, block, spatial, reduced)


def _is_spatial(kind: str) -> bool:
    return kind in ("0", "DataPar", "kDataPar") or kind.endswith("DataPar")


def _extent(sch: Any, loop: Any) -> int | None:
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, (tirx.IntImm, tvm.ir.IntImm if hasattr(tvm.ir, "IntImm") else tirx.IntImm)) else None


def _lanes(extent: int | None) -> int:
    """Widest power of two up to LANES that divides the extent; 1 for a symbolic one."""
    lanes = LANES
    while extent is None or extent % lanes:
        lanes //= 2
        if lanes <= 1:
            return 1
    return lanes


def _spatial(sch: Any, spatial: list[Any]) -> None:
    lanes = _lanes(_extent(sch, spatial[-1]))
    outer = spatial
    if lanes > 1:
        rest, vector = sch.split(spatial[-1], [None, lanes])
        sch.vectorize(vector)
        outer = [*spatial[:-1], rest]
    _parallel(sch, outer, lanes)


def _parallel(sch: Any, loops: list[Any], inner: int) -> None:
    """Run the outer loops in parallel, unless their static work is too small to pay for it."""
    if not loops:
        return
    fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    extent = _extent(sch, fused)
    if extent is not None and extent * inner < PARALLEL_WORK:
        return
    sch.parallel(fused)


def _reduction(sch: Any, block: Any, spatial: list[Any], reduced: list[Any]) -> None:
    lanes = _lanes(_extent(sch, spatial[-1])) if spatial else 1
    if spatial and lanes > 1:
        rest, vector = sch.split(spatial[-1], [None, lanes])
        outer = [*spatial[:-1], rest]
        sch.reorder(*outer, *reduced, vector)
        sch.decompose_reduction(block, reduced[0])
        sch.vectorize(vector)
        init = sch.get_child_blocks(sch.get_sblock("root"))[0]
        del init
        _parallel(sch, outer, lanes)
        return
    if spatial:
        sch.reorder(*spatial, *reduced)
        _parallel(sch, spatial, 1)
