"""Products of a computed vector with constant codes, in the forms they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.evaluate import Evaluator
from khtst_compile.program import arguments

aten = torch.ops.aten

_DISTANCES = (aten.cdist.default, aten._cdist_forward.default, aten._euclidean_dist.default)


@dataclass
class Product:
    """One product with constants: z, (heads, K, d) codes, and what it adds besides. squared: it is |z - c|^2; root: |z - c|."""

    z: fx.Node
    origin: fx.Node
    codes: torch.Tensor
    squared: bool = False
    root: bool = False
    extra: list[tuple[fx.Node, float]] = field(default_factory=list)
    factor: float = 1.0


def _constant(ev: Evaluator, node: Any) -> torch.Tensor | None:
    if not isinstance(node, fx.Node) or node not in ev.constants:
        return None
    value = ev.value(node)
    return value if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else None


def _headed(value: torch.Tensor) -> torch.Tensor | None:
    """(..., K, d) -> (heads, K, d); None where more than one leading axis is longer than 1. The same codes over and over are one head."""
    flat = value.reshape(-1, *value.shape[-2:])
    if len(flat) and bool((flat == flat[:1]).all()):
        return flat[:1]
    lead = [n for n in value.shape[:-2] if n != 1]
    return value.reshape(lead[0] if lead else 1, *value.shape[-2:]) if len(lead) <= 1 else None


def _read_linear(ev: Evaluator, node: fx.Node) -> Product | None:
    z, weight, bias = (*arguments(node), None)[:3]
    codes = _constant(ev, weight)
    if codes is None or codes.dim() != 2:
        return None
    return Product(z, weight, codes[None], extra=[] if bias is None else [(bias, 1.0)])


def _read_matmul(ev: Evaluator, node: fx.Node) -> Product | None:
    z, weight = arguments(node)[:2]
    value = _constant(ev, weight)
    if value is None or value.dim() < 2:
        return None
    codes = _headed(value.transpose(-1, -2))
    return None if codes is None else Product(z, weight, codes)


def _read_addmm(ev: Evaluator, node: fx.Node) -> Product | None:
    added, z, weight = arguments(node)[:3]
    value = _constant(ev, weight)
    if value is None:
        return None
    alpha, beta = (float(node.kwargs.get(k, 1)) for k in ("alpha", "beta"))  # type: ignore[arg-type]
    return Product(z, weight, value.T[None], extra=[(added, beta)], factor=alpha)


def _read_einsum(ev: Evaluator, node: fx.Node) -> Product | None:
    equation, operands = arguments(node)[:2]
    left, _, out = str(equation).replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != 2 or not out or "." in left:
        return None
    for at in (0, 1):
        value = _constant(ev, operands[at])
        if value is None:
            continue
        fixed, moving = parts[at], parts[1 - at]
        inner = [c for c in fixed if c in moving and c not in out]
        if len(inner) != 1 or moving[-1] != inner[0] or out[-1] not in fixed or out[-1] in moving or out[:-1] != moving[:-1]:
            return None
        heads = "".join(c for c in fixed if c not in (inner[0], out[-1]))
        if any(c not in moving for c in heads) or (heads and moving[: len(heads)] != heads):
            return None
        codes = _headed(torch.einsum(f"{fixed}->{heads}{out[-1]}{inner[0]}", value))
        return None if codes is None else Product(operands[1 - at], operands[at], codes.contiguous())
    return None


def _read_distance(ev: Evaluator, node: fx.Node) -> Product | None:
    z, weight, *rest = arguments(node)
    if rest and rest[0] != 2:
        return None
    value = _constant(ev, weight)
    codes = None if value is None else _headed(value)
    return None if codes is None else Product(z, weight, codes, squared=True, root=True)


def _read_norm(ev: Evaluator, node: fx.Node) -> Product | None:
    """|z - c| by linalg.vector_norm."""
    source, order, dims = (*arguments(node), None, None)[:3]
    if order not in (2, None) or not _is_last(dims, source) or (len(node.args) > 3 and node.args[3]):
        return None
    found = _difference(ev, source)
    return None if found is None else Product(*found, squared=True, root=True)


def _read_squares(ev: Evaluator, node: fx.Node) -> Product | None:
    """The sum of (z - c)^2 over the last axis."""
    source, dims = arguments(node)[:2]
    if not _is_last(dims, source) or (len(node.args) > 2 and node.args[2]) or not isinstance(source, fx.Node):
        return None
    given = arguments(source)
    square = (source.target is aten.pow.Tensor_Scalar and given[1] == 2) or source.target is aten.square.default
    if not square and not (source.target is aten.mul.Tensor and given[0] is given[1]):
        return None
    found = _difference(ev, given[0])
    return None if found is None else Product(*found, squared=True)


def _is_last(dims: Any, source: Any) -> bool:
    if not isinstance(source, fx.Node) or dims is None:
        return False
    listed = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    return len(listed) == 1 and listed[0] % source.meta["val"].dim() == source.meta["val"].dim() - 1


def _difference(ev: Evaluator, node: Any) -> tuple[fx.Node, fx.Node, torch.Tensor] | None:
    """z - c or c - z with z (..., 1, d) and constant c (..., K, d) -> z (..., 1, d), c and (1, K, d)."""
    if not isinstance(node, fx.Node) or node.target is not aten.sub.Tensor or node.kwargs:
        return None
    for z, weight in (arguments(node)[:2], arguments(node)[1::-1]):
        value = _constant(ev, weight)
        if value is None or value.dim() < 2 or not isinstance(z, fx.Node) or z in ev.constants:
            continue
        codes = _headed(value)
        while z.target is aten.expand.default:
            z = arguments(z)[0]
        if codes is None or len(codes) != 1 or ev.shape(z)[-2:-1] != (1,) or ev.shape(z)[-1] != codes.shape[2]:
            continue
        return z, weight, codes
    return None


READERS: dict[Any, Callable[[Evaluator, fx.Node], Product | None]] = {
    aten.linear.default: _read_linear,
    aten.mm.default: _read_matmul,
    aten.matmul.default: _read_matmul,
    aten.bmm.default: _read_matmul,
    aten.addmm.default: _read_addmm,
    aten.einsum.default: _read_einsum,
    **dict.fromkeys(_DISTANCES, _read_distance),
    aten.linalg_vector_norm.default: _read_norm,
    aten.sum.dim_IntList: _read_squares,
}
