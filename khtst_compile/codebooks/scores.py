"""From the scores an argmax is taken of, back to the vector and the codes whose products they are.

Every step on the way keeps the order of a row's scores: signs and positive factors, monotone functions, terms that are the same for all
codes. Constants that differ between codes become the bias.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.evaluate import Evaluator
from khtst_compile.codebooks.products import READERS, Product
from khtst_compile.ops.codebook import score_error
from khtst_compile.program import arguments

aten = torch.ops.aten

SHAPES = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.expand.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.slice.Tensor,
)
"""Hand rows on in their order where the last axis stays as it is and none is lost."""
_RISING = (aten.sqrt.default, aten.log.default)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default)
_SATURATING = (aten.exp.default, aten.sigmoid.default, aten.tanh.default, aten.clamp_max.default, *_CLAMPS)
"""Where they are flat, scores that differ become one, and the first of them wins: another id than the largest score's."""
_FLAT = "its scores go through {}, which makes scores that differ the same where it is flat"
_LARGEST_FLOOR = 1e-6  # of distances: what is below it is rounding
_NORMALIZED = (aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default)
_EXPONENTIAL = 2.0**-20
"""exp is off by a few units in the last place and a division by one more: what lies behind it tells scores apart to about this."""
_POSITIVE = (
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
    aten.exp.default,
    aten.clamp_min.default,
    aten.sqrt.default,
)
_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.add.Scalar, aten.sub.Scalar)
_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


class NotUnderstood(Exception):
    """Scores of another kind; the text is the reason to give."""


class NoProduct(NotUnderstood):
    """No product of a computed vector with constants: these are no scores of codes."""


@dataclass(frozen=True)
class Scores:
    """score = <z, codes> + bias, and the largest wins. z: (..., d); codes: (heads, K, d) float32; bias: (heads, K) float32 or None.
    product: the node that multiplies; origin: the constant it multiplies with; slack: what an exponential on the way rounds off, in
    units of the scores."""

    z: fx.Node
    product: fx.Node
    origin: fx.Node
    codes: torch.Tensor
    bias: torch.Tensor | None
    euclidean: bool
    slack: float = 0.0


@dataclass
class _Terms:
    """A sum taken apart. constants: float64 tensors; others: (node, factor) that are neither constant nor the same for all codes."""

    constants: list[torch.Tensor] = field(default_factory=list)
    others: list[tuple[fx.Node, float]] = field(default_factory=list)
    scaled_by_row: bool = False


def read_scores(ev: Evaluator, scores: fx.Node, largest: bool) -> Scores:
    """scores: (..., K), of which the largest or the smallest of each row is taken. Raises NotUnderstood with the reason."""
    width = ev.shape(scores)[-1]
    node, factor = scores, 1.0 if largest else -1.0
    bias: list[torch.Tensor] = []
    rounded, floored = 0.0, False
    while True:
        terms = _Terms()
        _expand(ev, node, factor, width, terms)
        if not terms.others:
            raise NoProduct("its scores are no product of a computed vector with constant codes")
        if len(terms.others) > 1:
            names = ", ".join(str(n.target) for n, _ in terms.others)
            raise NotUnderstood(
                f"its scores are a sum of several computed terms ({names}); needed: one product with constant codes"
            )
        node, factor = terms.others[0]
        if terms.scaled_by_row and (bias or terms.constants):
            raise NotUnderstood("its scores are scaled row by row and shifted code by code, which no bias can say")
        bias += terms.constants
        product = _product(ev, node, width)
        if product is not None:
            made = _finish(ev, node, product, factor, bias, width)
            if floored and not made.euclidean:
                raise NotUnderstood(_FLAT.format("a lower bound"))
            return replace(made, slack=rounded / abs(factor * product.factor))
        floor = factor < 0 and _is_floor(node)
        floored = floored or floor
        if node.target in _SATURATING and not floor and _has_codes(ev, node):
            raise NotUnderstood(_FLAT.format(node.target))
        if node.target in _NORMALIZED or node.target in _RISING or floor:
            if node.target in _NORMALIZED and arguments(node)[1] % node.meta["val"].dim() != node.meta["val"].dim() - 1:
                raise NotUnderstood("its scores are normalized over another axis than the codes'")
            if bias:
                raise NotUnderstood(f"a term that differs between codes is added behind {node.target}, which no bias can say")
            rounded = _EXPONENTIAL if node.target in _NORMALIZED else rounded
            node, factor = arguments(node)[0], 1.0 if factor > 0 else -1.0
            continue
        kind = NotUnderstood if _has_codes(ev, node) else NoProduct
        raise kind(
            f"its scores come from {node.target}; needed: a product with constant codes, but for steps that keep a row's order"
        )


def _expand(ev: Evaluator, node: fx.Node, factor: float, width: int, terms: _Terms) -> None:
    """Take sums, signs, constant factors and shape changes apart."""
    given: Any = arguments(node)
    if node in ev.constants:
        terms.constants.append(factor * ev.value(node).double())
    elif not _has_product(ev, node, width) and _same_for_all_codes(ev, node):
        return
    elif node.target in _SUMS:
        alpha = float(node.kwargs.get("alpha", given[2] if len(given) > 2 else 1))  # type: ignore[arg-type]
        signs = {aten.sub.Tensor: (1.0, -alpha), aten.sub.Scalar: (1.0, -alpha), aten.rsub.Scalar: (-alpha, 1.0)}
        for term, sign in zip(given[:2], signs.get(node.target, (1.0, alpha)), strict=True):
            if isinstance(term, fx.Node):
                _expand(ev, term, factor * sign, width, terms)
    elif node.target is aten.neg.default:
        _expand(ev, given[0], -factor, width, terms)
    elif node.target in _SCALES:
        _expand_scale(ev, node, factor, width, terms)
    elif node.target in SHAPES and isinstance(given[0], fx.Node) and keeps_rows(ev, given[0], node):
        _expand(ev, given[0], factor, width, terms)
    else:
        terms.others.append((node, factor))


def _expand_scale(ev: Evaluator, node: fx.Node, factor: float, width: int, terms: _Terms) -> None:
    first, second = arguments(node)[:2]
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    if isinstance(first, fx.Node) and first in ev.constants and isinstance(second, fx.Node) and not divides:
        first, second = second, first
    by: Any = second
    if isinstance(second, fx.Node) and second in ev.constants:
        by = ev.value(second)
        if isinstance(by, torch.Tensor):
            if by.numel() != 1:
                terms.others.append((node, factor))
                return
            by = float(by)
    if isinstance(by, (int, float)):
        _expand(ev, first, factor / by if divides else factor * by, width, terms)
    elif _positive(second) and _same_for_all_codes(ev, second):
        terms.scaled_by_row = True
        _expand(ev, first, factor, width, terms)
    else:
        terms.others.append((node, factor))


def _is_floor(node: fx.Node) -> bool:
    """Whether a node only keeps distances from falling below 0, or as good as 0."""
    if node.target not in _CLAMPS:
        return False
    low, high = (*arguments(node)[1:], None, None)[:2]
    return high is None and isinstance(low, (int, float)) and 0 <= low <= _LARGEST_FLOOR


def _positive(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in _POSITIVE


def _same_for_all_codes(ev: Evaluator, node: fx.Node) -> bool:
    while node.target is aten.expand.default:
        node = arguments(node)[0]
    return not isinstance(node.meta.get("val"), torch.Tensor) or ev.shape(node)[-1:] in ((), (1,))


def _has_product(ev: Evaluator, node: fx.Node, width: int, depth: int = 24) -> bool:
    """Whether a product with codes lies behind `node`, through steps that may stand between it and the argmax."""
    if node in ev.constants or depth == 0:
        return False
    if _product(ev, node, width) is not None:
        return True
    if node.target not in (*_SUMS, *_SCALES, *SHAPES, *_RISING, *_SATURATING, *_NORMALIZED, aten.neg.default):
        return False
    return any(_has_product(ev, n, width, depth - 1) for n in node.all_input_nodes)


def _has_codes(ev: Evaluator, node: fx.Node) -> bool:
    """Whether a product with constants lies anywhere closely behind `node`."""
    pending, seen = [node], set[fx.Node]()
    while pending and len(seen) < 16:
        here = pending.pop(0)
        if here in seen or here in ev.constants:
            continue
        seen.add(here)
        if here.target in READERS and READERS[here.target](ev, here) is not None:
            return True
        pending.extend(here.all_input_nodes)
    return False


def _product(ev: Evaluator, node: fx.Node, width: int) -> Product | None:
    """The product a node is, or None."""
    read = READERS.get(node.target)
    found = read(ev, node) if read is not None and node not in ev.constants else None
    return found if found is not None and found.codes.shape[1] == width else None


def _finish(ev: Evaluator, node: fx.Node, product: Product, factor: float, bias: list[torch.Tensor], width: int) -> Scores:
    """score = factor * product + bias -> codes and bias of a product whose largest score wins."""
    codes = product.codes
    heads = len(codes)
    for added, scale in product.extra:
        terms = _Terms()
        _expand(ev, added, factor * scale, width, terms)
        if terms.others or terms.scaled_by_row:
            raise NotUnderstood("a computed term that differs between codes is added to its scores")
        bias = [*bias, *terms.constants]
    if product.root and bias:
        raise NotUnderstood("a term that differs between codes is added to distances that were not squared")
    factor *= product.factor
    norms = codes.double().square().sum(-1)
    total = torch.zeros(heads, width, dtype=torch.float64)
    for term in bias:
        total = total + _per_code(term, heads, width)
    if product.squared:
        total, factor = total + factor * norms, -2 * factor
    if not factor:
        raise NotUnderstood("its scores are multiplied by 0")
    total = total / abs(factor)
    if factor < 0:
        codes = -codes
    euclidean = bool(((total + norms / 2).abs() <= 2 * score_error(codes.shape[2]) * norms).all()) and bool(norms.any())
    if euclidean:
        total = -norms / 2  # without the rounding of the model's own squares
    spread = total.amax(-1) - total.amin(-1)
    # Norms that are equal but for the rounding of their codes say nothing.
    flat = bool((spread <= (2.0**-22 * total.abs().amax(-1) if euclidean else 0.0)).all())
    return Scores(product.z, node, product.origin, codes.contiguous(), None if flat else total.float(), euclidean)


def _per_code(term: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """A constant of the scores, broadcast over rows -> (heads or 1, K). Raises NotUnderstood where rows differ."""
    if term.dim() == 0 or term.shape[-1] == 1 != width:
        return torch.zeros(1, width, dtype=torch.float64)
    flat = term.reshape(-1, width)
    if bool((flat == flat[:1]).all()):
        return flat[:1]
    flat = term.reshape(heads, -1, width) if heads > 1 and flat.shape[0] % heads == 0 else flat[None]
    if len(flat) != heads or not bool((flat == flat[:, :1]).all()):
        raise NotUnderstood("a constant that differs from row to row is added to its scores")
    return flat[:, 0]


def upstream(ev: Evaluator, node: fx.Node) -> list[fx.Node]:
    """`node` (..., d) and what it is a mere reshape of, row for row, nearest first."""
    found = [node]
    while True:
        node = found[-1]
        source: Any = arguments(node)[0] if node.op == "call_function" and node.args else None
        if node.target is aten.cat.default and isinstance(source, (list, tuple)) and len(source) == 1:
            source = source[0]
        elif node.target is aten.sub.Tensor and not node.kwargs and _is_zero(ev, arguments(node)[1]):
            pass
        elif node.target is operator.getitem or node.target not in SHAPES:
            return found
        if not isinstance(source, fx.Node) or source in ev.constants or source.meta["val"].dtype is not node.meta["val"].dtype:
            return found
        if not keeps_rows(ev, source, node):
            return found
        found.append(source)


def _is_zero(ev: Evaluator, node: Any) -> bool:
    if isinstance(node, (int, float)):
        return node == 0
    value = ev.value(node) if isinstance(node, fx.Node) and node in ev.constants else None
    return isinstance(value, torch.Tensor) and not bool(value.any())


def keeps_rows(ev: Evaluator, before: fx.Node, after: fx.Node) -> bool:
    """Whether two tensors have as many rows, as long."""
    first, second = ev.shape(before), ev.shape(after)
    return first[-1:] == second[-1:] and _count(first) == _count(second)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
