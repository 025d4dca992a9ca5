"""`w8a8`: linear layers to int8 weights and int8 activations.

linear(chain(x), W, b) -> w8a8_linear(codes, scale, Wq, Ws, b), with `codes, scale = quantize_rows(x, ...)`. The chain is an optional
multiply by a constant vector (a smoothing factor, an RMSNorm weight) and an optional rotation; both move into the quantizer. Layers
that read one activation share one quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from khtst_compile.contract import Outcome, Skipped
from khtst_compile.errors import PassError, UsageError
from khtst_compile.linears import Linear, calibrated_rows, find_linears, find_others, is_kept, require_linears, scale_before
from khtst_compile.ops.rotate import rotate_reference
from khtst_compile.ops.w8a8_linear import MAX_FEATURES
from khtst_compile.program import Program, Rewriter, call_nodes, site_of
from khtst_compile.quant.rounding import Compensation, output_error
from khtst_compile.quant.scales import dequantize_weight, quantize_weight, static_scale
from khtst_compile.quant.smoothing import decibels

if TYPE_CHECKING:
    from khtst_compile.calibrate import Stats

khtst = torch.ops.khtst
ACTIVATIONS = ("dynamic", "static")
ROUNDINGS = ("gptq", "nearest")


@dataclass(frozen=True)
class W8A8:
    """rounding: "gptq" (errors of weights cancel over the calibration tokens; kept where the held-out error falls) or "nearest";
    activations: "dynamic" (one scale per token, at run time) or "static" (one per tensor, from calibration); percentile: of |x| over the
    calibration rows that a static scale spans, 100 for the largest; keep_fp32: ';'-separated globs of sites to leave alone;
    min_features: layers with fewer input features stay float32, where int8 gains nothing."""

    name: ClassVar[str] = "w8a8"

    rounding: str = "gptq"
    activations: str = "dynamic"
    percentile: float = 100.0
    keep_fp32: str | None = None
    min_features: int = 16

    def check_options(self) -> None:
        if self.activations not in ACTIVATIONS:
            raise UsageError(f"activations is {self.activations!r}; known: {', '.join(ACTIVATIONS)}")
        if self.rounding not in ROUNDINGS:
            raise UsageError(f"rounding is {self.rounding!r}; known: {', '.join(ROUNDINGS)}")
        if not 0 < self.percentile <= 100:
            raise UsageError(f"percentile is {self.percentile}; needed: above 0, at most 100")

    def requires(self, program: Program) -> None:
        if self.activations == "static" and program.stats is None:
            raise PassError(
                "static activation scales come from calibration and the program was never calibrated; give data, or use dynamic"
            )
        require_linears(program, "no linear layer with a constant weight is in the graph, so there is nothing to quantize")

    def run(self, program: Program) -> Outcome:
        rewriter = Rewriter(program)
        skipped: list[Skipped] = []
        chosen: list[tuple[Linear, _Weight, torch.Tensor | None]] = []
        rounder = _Rounder(rewriter, program.stats if self.rounding == "gptq" else None)
        for linear in find_linears(rewriter.graph, rewriter.tensors):
            site = site_of(linear.node)
            reason = self._reason_to_keep(linear, site)
            # What calibration saw is looked up by node name, so before any node is replaced.
            scale = self._static_scale(rewriter, program, linear.x) if reason is None else None
            if reason is None and scale is None and self.activations == "static":
                reason = "kept float32: calibration saw nothing at its input, so there is no static scale"
            if reason is None:
                chosen.append((linear, rounder.round(linear), scale))
            else:
                skipped.append(Skipped(site, reason))
        skipped += [Skipped(site_of(n), f"kept float32: {why}") for n, why in find_others(rewriter.graph, rewriter.tensors)]
        quantizers: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        details: dict[str, Any] = {}
        for linear, weight, scale in chosen:
            if linear.x not in quantizers:
                quantizers[linear.x] = _quantizer(rewriter, linear, scale)
            details[_free_key(details, site_of(linear.node))] = _replace(rewriter, linear, weight, *quantizers[linear.x])
        return Outcome(rewriter.finish(), len(chosen), tuple(skipped), details)

    def ensures(self, before: Program, after: Program) -> None:
        made = list(call_nodes(after.graph, khtst.w8a8_linear.default))
        bound = after.tensors()
        for node in made:
            weight = node.args[2]
            assert isinstance(weight, fx.Node)
            codes = bound[weight.name]
            if codes.dtype is not torch.int8 or int(codes.min()) < -127:
                raise PassError(f"linear {site_of(node)!r}: its weight codes are not int8 in [-127, 127]")
        total = len(find_linears(before.graph, before.tensors()))
        left = len(find_linears(after.graph, after.tensors()))
        if total != left + len(made) - len(list(call_nodes(before.graph, khtst.w8a8_linear.default))):
            raise PassError(f"{total} linear layers went in, {len(made)} quantized and {left} float32 came out")

    def _reason_to_keep(self, linear: Linear, site: str) -> str | None:
        """Why this layer stays float32, or None. Raises PassError where its weight is not finite."""
        if is_kept(site, self.keep_fp32):
            return "kept float32 as asked"
        if linear.refusal is not None:
            return f"kept float32: {linear.refusal}"
        features = linear.weight.shape[1]
        if features < self.min_features:
            return f"kept float32: {features} input features are fewer than min_features={self.min_features}"
        if features > MAX_FEATURES:
            return f"kept float32: {features} input features could overflow an int32 sum; at most {MAX_FEATURES} cannot"
        if not bool(linear.weight.isfinite().all()):
            raise PassError(
                f"linear {site!r}: its weight has NaN or infinite entries; repair the checkpoint or name it in keep_fp32"
            )
        return None

    def _static_scale(self, rewriter: Rewriter, program: Program, x: fx.Node) -> torch.Tensor | None:
        """(1,) float32 from the calibration rows as they reach the codes, or None (dynamic, or nothing known)."""
        if self.activations == "dynamic":
            return None
        chain = _Chain.above(rewriter, x)
        seen = calibrated_rows(rewriter, program.stats, chain.rotated_from or x)
        if seen is None:
            return None
        rows = torch.cat([seen.rows, seen.held_rows])
        return static_scale(rotate_reference(rows, chain.block, chain.points), self.percentile)


@dataclass(frozen=True, eq=False)
class _Chain:
    """What a quantizer takes in: source, the activation it reads; inv_smooth: constant node (features,) or None; block, points: the
    rotation or 0, 0; rotated_from: the node under the rotation, where there is one."""

    source: fx.Node
    inv_smooth: fx.Node | None
    block: int
    points: int
    rotated_from: fx.Node | None

    @staticmethod
    def above(rewriter: Rewriter, x: fx.Node) -> _Chain:
        inner, block, points = x, 0, 0
        if x.op == "call_function" and x.target is khtst.rotate.default:
            inner, block, points = x.args  # type: ignore[assignment]
        source, value = scale_before(rewriter, inner)
        constant = None
        if value is not None:
            constant = next(a for a in inner.args if isinstance(a, fx.Node) and a is not source)
        return _Chain(source, constant, block, points, inner if block else None)


@dataclass(frozen=True)
class _Weight:
    """codes: (out, in) int8; scales: (out,) float32; rounding: how they were rounded; held: relative squared error of the outputs on
    held-out tokens, of (nearest, the one chosen), or None."""

    codes: torch.Tensor
    scales: torch.Tensor
    rounding: str
    held: tuple[float, float] | None = None


class _Rounder:
    """Rounds the weights of layer after layer; stats: what calibration saw, or None to round to nearest."""

    def __init__(self, rewriter: Rewriter, stats: Stats | None):
        self._rewriter, self._stats = rewriter, stats
        self._latest: tuple[fx.Node | None, Compensation | None] = (None, None)

    def round(self, linear: Linear) -> _Weight:
        codes, scales = quantize_weight(linear.weight)
        nearest = _Weight(codes, scales, "nearest")
        chain = _Chain.above(self._rewriter, linear.x)
        seen = calibrated_rows(self._rewriter, self._stats, chain.rotated_from or linear.x)
        if seen is None or seen.moments is None or not len(seen.held_rows):
            return nearest
        if self._latest[0] is not linear.x:  # layers that share an activation follow each other
            half = rotate_reference(seen.moments, chain.block, chain.points)
            self._latest = (linear.x, Compensation(rotate_reference(half.T, chain.block, chain.points)))
        compensation = self._latest[1]
        assert compensation is not None
        if not compensation.usable:
            return nearest
        rows = rotate_reference(seen.held_rows, chain.block, chain.points)
        grads = seen.held_grads.get(linear.node.name)
        found = compensation.round(linear.weight, scales)
        errors = [output_error(linear.weight, dequantize_weight(c, scales), rows, grads) for c in (codes, found)]
        if not errors[1] < errors[0]:
            return _Weight(codes, scales, "nearest", (errors[0], errors[0]))
        return _Weight(found, scales, "gptq", (errors[0], errors[1]))


def _quantizer(rewriter: Rewriter, linear: Linear, scale: torch.Tensor | None) -> tuple[fx.Node, fx.Node]:
    """codes and scale nodes for the activation of `linear`."""
    chain = _Chain.above(rewriter, linear.x)
    given = None if scale is None else rewriter.add_tensor(f"{site_of(linear.node)}_scale", scale)
    args = (chain.source, chain.inv_smooth, given, chain.block, chain.points)
    both = rewriter.call(khtst.quantize_rows.default, *args, before=linear.node)
    return rewriter.getitem(both, 0, linear.node), rewriter.getitem(both, 1, linear.node)


def _free_key(taken: dict[str, Any], site: str) -> str:
    """`site`, numbered where one module is called more than once."""
    return site if site not in taken else next(k for n in range(2, len(taken) + 3) if (k := f"{site}#{n}") not in taken)


def _replace(rewriter: Rewriter, linear: Linear, weight: _Weight, codes: fx.Node, scale: fx.Node) -> dict[str, Any]:
    """Put the int8 layer in the place of `linear`; returns facts about it."""
    site = site_of(linear.node)
    error = (dequantize_weight(weight.codes, weight.scales) - linear.weight).double().square().sum()
    error /= linear.weight.double().square().sum()
    weight_node = rewriter.add_tensor(f"{site}_int8", weight.codes)
    scale_node = rewriter.add_tensor(f"{site}_weight_scale", weight.scales)
    args = (codes, scale, weight_node, scale_node, linear.bias)
    node = rewriter.call(khtst.w8a8_linear.default, *args, before=linear.node)
    quantizer = codes.args[0]
    assert isinstance(quantizer, fx.Node)
    _, inv_smooth, static, block, points = quantizer.args
    rewriter.replace(linear.node, node)
    return {
        "in": linear.weight.shape[1],
        "out": linear.weight.shape[0],
        "smoothed": inv_smooth is not None,
        "block": block,
        "points": points,
        "activations": "dynamic" if static is None else "static",
        "weight_error_db": decibels(float(error)),
        "rounding": weight.rounding,
        "held_db": None if weight.held is None else {"nearest": decibels(weight.held[0]), "chosen": decibels(weight.held[1])},
    }
