"""Which nodes of a graph multiply an activation by a constant matrix, and which of those int8 can serve.

Passes and calibration must agree on this, so it is decided once, here, from the graph's structure and never from names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from khtst_compile.errors import PassError
from khtst_compile.sizes import same_shape

if TYPE_CHECKING:
    from khtst_compile.calibrate import ActivationStats, Stats
    from khtst_compile.program import Program, Rewriter

aten = torch.ops.aten

# target -> (position of the activation, of the weight, of the bias or None, whether the weight is stored (in, out))
_FORMS: dict[object, tuple[int, int, int | None, bool]] = {
    aten.linear.default: (0, 1, 2, False),
    aten.addmm.default: (1, 2, 0, True),
    aten.mm.default: (0, 1, None, True),
    aten.matmul.default: (0, 1, None, True),
}


@dataclass(frozen=True, eq=False)
class Linear:
    """One product of an activation with a constant matrix.

    weight: (out_features, in_features), a view of the bound tensor whatever the stored
    orientation; bias: node of (out_features,) or None; refusal: why int8 cannot serve it, or None.
    """

    node: fx.Node
    weight: torch.Tensor
    bias: fx.Node | None
    refusal: str | None = None

    @property
    def x(self) -> fx.Node:
        """The activation it reads now, (..., in_features)."""
        x = self.node.args[_FORMS[self.node.target][0]]
        assert isinstance(x, fx.Node)
        return x

    @property
    def transposed(self) -> bool:
        """True where the graph stores the weight as (in_features, out_features)."""
        return _FORMS[self.node.target][3]

    def set_weight(self, weight: fx.Node) -> None:
        """Read another weight node, which must hold the stored orientation (see `stored`)."""
        self.node.update_arg(_FORMS[self.node.target][1], weight)

    def set_input(self, x: fx.Node) -> None:
        """Read another activation of the same shape."""
        self.node.update_arg(_FORMS[self.node.target][0], x)

    def set_bias(self, bias: fx.Node) -> None:
        """Read another bias, (out_features,); only where there is one already."""
        at = _FORMS[self.node.target][2]
        assert at is not None and self.bias is not None
        self.node.update_arg(at, bias)

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """weight: (out_features, in_features) -> contiguous, in the orientation this node stores."""
        return (weight.T if self.transposed else weight).contiguous()


MAX_RANK = 4  # kernels take one to three leading axes before the features


def find_linears(graph: fx.Graph, tensors: Mapping[str, torch.Tensor]) -> list[Linear]:
    """Every linear layer of `graph` in execution order, refused ones included; tensors: graph input name -> bound tensor.

    What no output depends on is left out. A product of two computed matrices (attention) is not a linear layer;
    `linear` with a computed weight is one, refused.
    """
    found = []
    live = _live(graph)
    for node in graph.nodes:
        form = _FORMS.get(node.target) if node in live else None
        if form is None:
            continue
        at_x, at_weight, at_bias, transposed = form
        x, weight = node.args[at_x], node.args[at_weight]
        bias = node.args[at_bias] if at_bias is not None and at_bias < len(node.args) else None
        value = tensors.get(weight.name) if weight.op == "placeholder" else None
        if value is None:
            if node.target is aten.linear.default:
                found.append(Linear(node, torch.empty(0, 0), bias, "its weight is computed, not a constant"))
            continue
        if value.dim() != 2 or (x.op == "placeholder" and x.name in tensors):
            continue
        found.append(Linear(node, value.T if transposed else value, bias, _refusal(node, x, value)))
    return found


_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
_REWRITE = "write it as torch.nn.Linear on the last axis to have it quantized"


def find_others(graph: fx.Graph, tensors: Mapping[str, torch.Tensor]) -> list[tuple[fx.Node, str]]:
    """Nodes that multiply an activation by constants as a linear layer does, in a form that `find_linears` does not see, and why each is
    left alone: convolutions of one point, einsum, products with a transposed or otherwise computed weight."""
    constant = {n for n in graph.nodes if n.op == "placeholder" and n.name in tensors}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    found, live = [], _live(graph)
    for node in graph.nodes:
        if node not in live or node in constant or not constant.intersection(node.all_input_nodes):
            continue
        if node.target in _CONVOLUTIONS:
            shape = node.args[1].meta["val"].shape
            if all(n == 1 for n in shape[2:]) and node.args[0].meta["val"].shape[1] == shape[1]:
                found.append((node, f"a convolution of one point; {_REWRITE}"))
        elif node.target is aten.einsum.default:
            found.append((node, f"einsum {node.args[0]!r} with a constant; {_REWRITE}"))
        elif node.target in _PRODUCTS and node.args[1] in constant and node.args[1].op != "placeholder":
            found.append((node, f"its weight is computed from constants ({node.args[1].target}); {_REWRITE}"))
    return found


def _live(graph: fx.Graph) -> set[fx.Node]:
    """The computed nodes that the graph's outputs depend on."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or not live.isdisjoint(node.users):
            live.add(node)
    return {node for node in live if node.op == "call_function"}


def _refusal(node: fx.Node, x: fx.Node, weight: torch.Tensor) -> str | None:
    if weight.dtype is not torch.float32:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, not float32"
    seen = x.meta.get("val")
    if isinstance(seen, torch.Tensor) and seen.dtype is not torch.float32:
        return f"its input is {str(seen.dtype).removeprefix('torch.')}, not float32"
    if isinstance(seen, torch.Tensor) and not 2 <= seen.dim() <= MAX_RANK:
        return f"its input has {seen.dim()} axes; int8 kernels take 2 to {MAX_RANK}"
    if node.target is aten.addmm.default:
        if any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
            return "addmm scales its terms (alpha or beta is not 1)"
        bias = node.args[0].meta.get("val")  # type: ignore[union-attr]
        if isinstance(bias, torch.Tensor) and bias.dim() != 1:
            return f"addmm adds a {bias.dim()}-dimensional term, not one bias per output feature"
    return None


def require_linears(program: Program, refusal: str) -> None:
    """Raise PassError(refusal) where the graph has no linear layer. Not where codebooks were frozen before: a model may have these
    alone, and then passes that follow change nothing."""
    frozen = any(entry["pass"] == "freeze_codebook" and entry["changed"] for entry in program.history)
    if not frozen and not find_linears(program.graph, program.tensors()):
        raise PassError(refusal)


def groups(linears: list[Linear]) -> dict[fx.Node, list[Linear]]:
    """Activation -> the linear layers that read it, in execution order of the first."""
    found: dict[fx.Node, list[Linear]] = {}
    for linear in linears:
        found.setdefault(linear.x, []).append(linear)
    return found


def is_kept(site: str, globs: str | None) -> bool:
    """Whether `site` matches one of the ';'-separated globs of layers to leave in float32."""
    return any(fnmatch.fnmatchcase(site, g.strip()) for g in (globs or "").split(";") if g.strip())


def scale_before(rewriter: Rewriter, x: fx.Node) -> tuple[fx.Node, torch.Tensor | None]:
    """The activation under a per-feature multiply, and its constant (features,) float32; (x, None) where x is no such product."""
    if x.op != "call_function" or x.target is not aten.mul.Tensor or x.kwargs:
        return x, None
    for at in (0, 1):
        source, constant = x.args[1 - at], x.args[at]
        if not isinstance(source, fx.Node) or not isinstance(constant, fx.Node):
            continue
        value, shape = rewriter.value(constant), x.meta["val"].shape
        same = same_shape(source.meta["val"].shape, shape) and source.meta["val"].dtype is torch.float32
        if value is not None and same and value.dtype is torch.float32 and value.shape == shape[-1:]:
            return source, value
    return x, None


def calibrated_rows(rewriter: Rewriter, stats: Stats | None, x: fx.Node) -> ActivationStats | None:
    """What calibration saw of the activation `x`, through a per-feature multiply that a pass put there since; None if nothing."""
    if stats is None or x.name in stats.activations:
        return None if stats is None else stats.activations[x.name]
    source, scale = scale_before(rewriter, x)
    seen = stats.activations.get(source.name)
    if seen is None or scale is None:
        return seen
    return seen.scaled(scale)
