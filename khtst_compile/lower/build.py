"""Relax module + target -> a shared library that TVM's runtime loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from khtst_compile.errors import LoweringError
from khtst_compile.lower.plan import plan_memory, trust_weights
from khtst_compile.targets.contract import Target
from khtst_compile.targets.link import link


def _view(builder: Any, call: Any) -> Any:
    """A reshape shares its input's memory. TVM's own rewrite to that end cannot look into hand-written kernels."""
    return relax.op.call_pure_packed("vm.builtin.reshape", call.args[0], call.args[1], ty_args=[call.ty])


def _legalize() -> Any:
    return relax.transform.LegalizeOps({"relax.reshape": _view})


# What becomes fused TIR before scheduling; our kernels are opaque to all of it.
_FUSION = (
    relax.backend.DispatchSortScan,
    _legalize,
    relax.transform.AnnotateTIROpPattern,
    relax.transform.FoldConstant,
    relax.transform.FuseOps,
    relax.transform.FuseTIR,
    relax.transform.DeadCodeElimination,
)
# From fused, scheduled TIR to VM bytecode, in TVM's own order but for where `main` keeps what it computes.
_TO_VM = (
    relax.transform.ToNonDataflow,
    relax.transform.RemovePurityChecking,
    relax.transform.CallTIRRewrite,
    relax.transform.CanonicalizeBindings,
    lambda: plan_memory,
    relax.transform.StaticPlanBlockMemory,
    relax.transform.LowerAllocTensor,
    relax.transform.LowerRuntimeBuiltin,
    relax.transform.ComputePrimValue,
    relax.transform.VMShapeLower,
    lambda: trust_weights,
    relax.transform.AttachGlobalSymbol,
)


def fuse_generic(module: Any) -> Any:
    """Turn the operators without a kernel into fused, unscheduled PrimFuncs."""
    for make in _FUSION:
        module = make()(module)
    return module


def build(module: Any, target: Target) -> Any:
    """Schedule and compile a module of `to_relax`; returns TVM's executable."""
    chip = tvm.target.Target(target.tvm_target())
    with chip:
        module = target.finalize(fuse_generic(module))
        for make in _TO_VM:
            module = make()(module)
        try:
            return relax.build(module, target=chip, relax_pipeline=tvm.transform.Sequential([]))
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoweringError(
                f"TVM cannot compile this program for {target.name}: {str(error).strip().splitlines()[-1]}"
            ) from error


def export_library(executable: Any, path: Path, target: Target) -> None:
    """Link the executable into a shared library at `path`. Raises EnvironmentProblem where there is no linker for the target."""
    link(executable, path, str(target.tvm_target()["mtriple"]))
