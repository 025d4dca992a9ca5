"""What a target is: the chip flags, whether it can run here, and which kernel serves which operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from khtst_compile.layout import Packed
from khtst_compile.targets.isa import Isa

if TYPE_CHECKING:  # listing targets loads no torch
    from torch import fx


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel, as a rule hands it to the lowering.

    func: the TIR PrimFunc. key: equal keys mean equal functions, so that each is built once.
    operands: arguments before the outputs; a graph node is a tensor at run time, anything else a weight.
    outputs: (last axis or None for a per-row value, dtype) of each output; leading axes are those of the first operand, `swapped` where
    positions come before the batch.
    slots: index of each output in the operator's result; outputs nothing reads are left out.
    macs: multiply-adds per row of the first operand's leading axes.
    pair_macs: multiply-adds per row of the first operand and row of the second that shares its batch (attention).
    products: what is multiplied, "int8" or "float32".
    """

    func: Any
    key: str
    operands: tuple[fx.Node | npt.NDArray[Any] | Packed, ...]
    outputs: tuple[tuple[int | None, str], ...]
    slots: tuple[int, ...] = (0,)
    macs: int = 0
    pair_macs: int = 0
    products: str = "float32"
    swapped: bool = False


Constants = Callable[[Any], npt.NDArray[Any] | None]
"""Graph node -> the weight bound to it as an array; None for None. Raises LoweringError for a computed value."""
KernelRule = Callable[["fx.Node", Constants], KernelCall | None]
"""Returns None where the rule does not serve this node; the next rule is asked."""


class Target(Protocol):
    """A place where a lowered program runs. The same members, in the same order, for every target."""

    name: str
    isa: Isa

    def tvm_target(self) -> dict[str, Any]:
        """The only place with chip flags."""

    def unavailable(self) -> str | None:
        """One sentence why programs for this target cannot run on this machine, or None."""

    def kernels(self) -> dict[str, tuple[KernelRule, ...]]:
        """Operator ("khtst.w8a8_gemm") -> rules, asked in order."""

    def tuned(self, tiles: Mapping[tuple[object, ...], Any]) -> Target:
        """The same target with choices that were measured, by what they hold for; those for other targets may be among them."""

    def on(self, triple: str) -> Target:
        """The same target on another system, by LLVM's name of processor and system. Raises UsageError where nothing is linked for it."""

    def finalize(self, module: Any) -> Any:
        """Schedule what has no kernel of its own: an IRModule of fused PrimFuncs -> the same, fit to compile."""


def array(value: Any) -> npt.NDArray[Any]:
    """A torch tensor as a contiguous array."""
    return np.ascontiguousarray(value.detach().cpu().numpy())
