"""Relax module + target -> a shared library that TVM's runtime loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from tvm import relax, te, tirx

from khtst_compile.errors import LoweringError
from khtst_compile.lower.plan import plan_memory, trust_weights
from khtst_compile.lower.step import add_step
from khtst_compile.targets.contract import Target
from khtst_compile.targets.link import link
from khtst_compile.targets.pipeline import CPU


def _view(builder: Any, call: Any) -> Any:
    """A reshape shares its input's memory. TVM's own rewrite to that end cannot look into hand-written kernels."""
    return relax.op.call_pure_packed("vm.builtin.reshape", call.args[0], call.args[1], ty_args=[call.ty])


def _product(builder: Any, call: Any) -> Any:
    """A product of floats is rounded before anything is added to it: LLVM would fuse the two on one processor and not on another."""
    product = call.op.get_attr("FLegalize")(builder, call)
    if str(call.ty.dtype) not in ("float32", "float64"):
        return product
    return builder.call_te(_fence, builder.emit(product), primfunc_name_hint="round")


def _fence(x: Any) -> Any:
    name = f"llvm.arithmetic.fence.f{tvm.DataType(x.dtype).bits}"
    return te.compute(x.shape, lambda *i: tirx.call_llvm_pure_intrin(x.dtype, name, x(*i)), name="round")


def _power(builder: Any, call: Any) -> Any:
    """A square is a product, and LLVM would make it one."""
    exponent = getattr(call.args[1], "value", None)  # of a constant
    if exponent is not None and exponent.numpy().size == 1 and exponent.numpy().item() == 2:
        return _product(builder, builder.normalize(relax.op.multiply(call.args[0], call.args[0])))
    return call.op.get_attr("FLegalize")(builder, call)


def _legalize() -> Any:
    return relax.transform.LegalizeOps({"relax.reshape": _view, "relax.multiply": _product, "relax.power": _power})


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
    lambda: add_step,
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
    # What calls a kernel is the program around it, whose inputs both runtimes check: a kernel's own checks of its arguments would be four
    # fifths of the code.
    with chip, tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        module = target.finalize(fuse_generic(module))
        for make in _TO_VM:
            module = make()(module)
        try:
            return relax.build(module, target=chip, relax_pipeline=tvm.transform.Sequential([]), tir_pipeline=CPU)
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoweringError(
                f"TVM cannot compile this program for {target.name}: {str(error).strip().splitlines()[-1]}"
            ) from error


def export_library(executable: Any, path: Path, target: Target) -> None:
    """Link the executable into a shared library at `path`. Raises EnvironmentProblem where there is no linker for the target."""
    link(executable, path, str(target.tvm_target()["mtriple"]))
