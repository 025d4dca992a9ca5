"""The passes from scheduled TIR to code for a CPU: TVM's own list without what only GPUs need and without what is dear and changes nothing.

A third of a build was spent in three passes that never alter these kernels: shrinking buffers to what is read (they are allocated at
their size), hoisting conditions out of loops (kernels write them where they belong) and a simplification that a later one repeats.
Left out, the object code has the same size to within 24 bytes of 225 KB.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
from tvm.tirx.compilation_pipeline import register_tir_pipeline

CPU = "khtst_cpu"
"""The name to hand to `tirx.build` and `relax.build`."""


def _passes() -> list[Any]:
    s, t = s_tir.transform, tirx.transform
    return [
        s.CanonicalizeLoop(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        s.LowerMatchBuffer(),
        s.AnnotateIrregularLoop(),
        s.LowerOpaqueBlock(),
        t.FlattenBuffer(),
        t.BF16ComputeLegalize(),
        t.NarrowDataType(32),
        s.LoopPartition(),
        t.VectorizeLoop(True),
        t.StorageRewrite(),
        t.UnrollLoop(),
        s.RenormalizeSplitPattern(),
        t.StmtSimplify(),
        t.RemoveNoOp(),
        s.RewriteUnsafeSelect(),
        t.CommonSubexprElim(),
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        t.SplitHostDevice(),
        t.MakePackedAPI(),
        t.BF16StorageLegalize(),
    ]


def _pipeline() -> tuple[Any, Any, Any]:
    @tvm.transform.module_pass(opt_level=0)  # type: ignore[untyped-decorator]
    def lower(module: Any, _: Any) -> Any:
        return tvm.ir.transform.Sequential(_passes())(module)

    return lower, finalize_host_passes, finalize_device_passes


register_tir_pipeline(CPU, _pipeline)
