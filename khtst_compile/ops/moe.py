"""khtst::route, khtst::weigh, khtst::experts and khtst::w8a8_experts: a mixture of experts between its router's logits and its output.

All float arithmetic is written out (exact.py), so torch, kernels and thread counts give the same bits: which expert takes a token must not
hang on the order in which an engine happened to add.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from khtst_compile import exact
from khtst_compile.errors import UsageError
from khtst_compile.exact import Floats
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.ops.rotate import check_rotation
from khtst_compile.ops.w8a8_linear import MAX_FEATURES, int8_matmul

Ids = npt.NDArray[np.int32]

SCORES = ("softmax", "sigmoid", "chosen")
CLAMPED = "clamped_swiglu"
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", CLAMPED)


def route_reference(
    logits: Floats,
    bias: Floats | None,
    allowed: npt.NDArray[np.bool_] | None,
    top_k: int,
    score: str,
    groups: int,
    top_groups: int,
    group_best: int,
    normalize: bool,
    floor: float,
    eps: float,
    scale: float,
    capacity: int,
) -> tuple[Ids, Floats]:
    """`route` of logits (n, E), bias (E,), allowed (E,) or (n, E) -> ids (n, top_k), weights (n, top_k)."""
    n, experts = logits.shape
    least = np.float32(-np.inf)
    may: npt.NDArray[np.bool_] = np.broadcast_to(np.bool_(True) if allowed is None else allowed, (n, experts))
    seen = np.where(may, logits, least)
    with np.errstate(all="ignore"):
        goes = np.asarray(may.any(-1, keepdims=True), bool)
        none = goes[:, 0] & ~(seen > least).any(-1)
        lost = np.asarray((np.isnan(seen) | (seen == np.inf)).any(-1) | none, bool)
        clean = np.where(lost[:, None], np.float32(0), seen)
        if score == "softmax":
            most = clean.max(-1, keepdims=True, initial=least)
            powers = exact.exp_nonpositive_reference(exact.padded(clean, -np.inf) - np.where(np.isinf(most), np.float32(0), most))
            given = (powers * (np.float32(1) / exact.sum_reference(powers)))[:, :experts]
            given = np.where(goes, given, np.float32(0))
        elif score == "sigmoid":
            given = exact.sigmoid_reference(clean)
        else:
            given = clean
        key = clean if score != "sigmoid" and bias is None and group_best == 1 else given
        if bias is not None:
            key = key + bias
        open_: npt.NDArray[np.bool_] = may & (clean > least) & ~lost[:, None]
        key = np.where(open_, key, least)
        if groups > 1:
            open_ = open_ & np.repeat(_best_groups(key, open_, groups, top_groups, group_best), experts // groups, -1)
            key = np.where(open_, key, least)
        order = np.argsort(-key, axis=-1, kind="stable")[:, :top_k]  # of equal ones the lower number
        taken = np.take_along_axis(open_, order, -1)
        weights = np.take_along_axis(given, order, -1).astype(np.float32)
        if capacity >= 0:
            taken = _within(order, taken, weights, experts, capacity)
        if score == "chosen":
            weights = exact.exp_nonpositive_reference(weights - weights[:, :1])
        weights = np.where(taken, weights, np.float32(0))
        if normalize or score == "chosen":
            total = np.zeros(n, np.float32)
            for slot in range(weights.shape[1]):
                total = total + weights[:, slot]
            weights = weights / (np.maximum(total, np.float32(floor)) + np.float32(eps))[:, None]
            weights = np.where(taken, weights, np.float32(0))
        weights = weights * np.float32(scale)
    ids = np.where(taken, order, -1).astype(np.int32)
    weights[lost] = np.float32(np.nan)
    ids[lost] = -1
    return ids, weights


def _best_groups(
    key: Floats, open_: npt.NDArray[np.bool_], groups: int, top_groups: int, group_best: int
) -> npt.NDArray[np.bool_]:
    """(n, groups): those of the largest key, or of the largest sum of two; of equal ones the first."""
    parts = np.sort(key.reshape(len(key), groups, -1), -1)[..., ::-1]
    best = parts[..., 0]
    if group_best == 2:
        second = parts[..., 1]
        best = best + np.where(second == -np.inf, np.float32(0), second)
    best = np.where(open_.reshape(len(key), groups, -1).any(-1), best, np.float32(-np.inf))
    found = np.argsort(-best, axis=-1, kind="stable")[:, :top_groups]
    chosen = np.zeros((len(key), groups), bool)
    np.put_along_axis(chosen, found, True, -1)
    return chosen


def _within(
    order: npt.NDArray[np.intp], taken: npt.NDArray[np.bool_], weights: Floats, experts: int, capacity: int
) -> npt.NDArray[np.bool_]:
    """Of the slots that ask for an expert, those of the `capacity` largest weights; of equal ones the earlier tokens."""
    kept = np.zeros_like(taken)
    for expert in range(experts):
        token, slot = np.nonzero(taken & (order == expert))
        first = np.argsort(-weights[token, slot], kind="stable")[:capacity]
        kept[token[first], slot[first]] = True
    return kept


def check_route(
    shape: tuple[int, ...], top_k: int, score: str, groups: int, top_groups: int, group_best: int, capacity: int
) -> None:
    """Raise UsageError where `route` has no meaning for logits of that shape."""
    experts = shape[-1]
    where = f"route: {experts} experts"
    if not 1 <= top_k <= experts:
        raise UsageError(f"{where}, top_k {top_k}; needed: 1 to {experts}")
    if score not in SCORES:
        raise UsageError(f"{where}, score {score!r}; known: {', '.join(SCORES)}")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise UsageError(f"{where} in {groups} groups, {top_groups} taken; needed: groups that divide them, 1 to {groups} taken")
    if group_best not in (1, 2) or (group_best == 2 and experts // groups < 2):
        raise UsageError(f"{where} in {groups} groups, judged by {group_best} of each; needed: 1, or 2 where a group has them")
    if capacity < -1:
        raise UsageError(f"{where}, capacity {capacity}; needed: 0 or more, or -1 for no limit")


@torch.library.custom_op("khtst::route", mutates_args=())
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    allowed: torch.Tensor | None,
    top_k: int,
    score: str,
    groups: int,
    top_groups: int,
    group_best: int,
    normalize: bool,
    floor: float,
    eps: float,
    scale: float,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts take a token, and what each counts.

    logits: (..., E) float32; rows are taken in row-major order. bias: (E,) float32, added to scores to choose by, not to weights; or None.
    allowed: (E,) or (..., E) bool, the experts a row may go to; or None for all.

    score p of an expert: "softmax" over the allowed ones; "sigmoid"; or "chosen", the softmax over a row's chosen experts, which are
    chosen by their logits. An expert is a candidate where it is allowed and its logit is above -inf. It is chosen by p + bias (by the logit
    where that is the same order: no bias, no sums of two, not "sigmoid"). With `groups` > 1 only experts of the `top_groups` best groups
    are candidates; a group counts as much as its best candidate, or its best two together (`group_best`). Best first; of equal ones the
    lower number.

    capacity: rows an expert takes at most, those of highest p (for "chosen": logit), of equal ones the earlier; -1 for no limit.
    Weights are p over the slots kept; with `normalize` (always for "chosen") divided by max(their sum in slot order, floor) + eps; then
    times scale.

    ids: (..., top_k) int32, best first, -1 where nothing was taken (weight 0). A row that holds NaN or +inf among its allowed experts, or
    allowed experts with nothing above -inf, is lost: ids -1, weights NaN, and so is what experts make of it.

    Returns ids, weights (..., top_k) float32. Raises UsageError for sizes that cannot be.
    """
    check_route(tuple(logits.shape), top_k, score, groups, top_groups, group_best, capacity)
    experts = logits.shape[-1]
    flat = logits.detach().reshape(-1, experts).numpy()
    may = None if allowed is None else allowed.expand(logits.shape).reshape(-1, experts).numpy()
    numbers = None if bias is None else bias.detach().numpy()
    ids, weights = route_reference(
        flat, numbers, may, top_k, score, groups, top_groups, group_best, normalize, floor, eps, scale, capacity
    )
    lead = (*logits.shape[:-1], top_k)
    return torch.from_numpy(ids).reshape(lead), torch.from_numpy(weights).reshape(lead)


@route.register_fake
def _(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    allowed: torch.Tensor | None,
    top_k: int,
    score: str,
    groups: int,
    top_groups: int,
    group_best: int,
    normalize: bool,
    floor: float,
    eps: float,
    scale: float,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    lead = (*logits.shape[:-1], top_k)
    return logits.new_empty(lead, dtype=torch.int32), logits.new_empty(lead)


@torch.library.custom_op("khtst::weigh", mutates_args=())
def weigh(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing written as a weight for every expert, most of them 0, as ids and weights. weights: (..., E) float32.

    ids: (..., E) int32, e in slot e, -1 where the weight is 0; weights as they are (0 for -0). A row with a NaN is lost: ids -1, weights
    NaN.
    """
    experts = weights.shape[-1]
    lost = weights.isnan().any(-1, keepdim=True)
    numbers = torch.arange(experts, dtype=torch.int32, device=weights.device).expand(weights.shape)
    ids = numbers.masked_fill((weights == 0) | lost, -1)
    return ids, (weights + 0.0).masked_fill(lost, float("nan"))


@weigh.register_fake
def _(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(weights, dtype=torch.int32), torch.empty_like(weights)


def activate(value: Floats, act: str, gated: bool, numbers: list[float]) -> Floats:
    """What stands between an expert's two products: value (n, F) -> (n, I), to the bit.

    Gated: act(gate) * up, gate the first half and up the second. CLAMPED (GPT-OSS), numbers [alpha, limit]: gate = min(gate, limit),
    up = clamp(up, -limit, limit), (up + 1) * (gate * sigmoid(alpha * gate)). Every step is rounded to float32.
    """
    with np.errstate(all="ignore"):
        if not gated:
            return exact.REFERENCES[act](value)
        gate, up = np.ascontiguousarray(value[:, : value.shape[1] // 2]), value[:, value.shape[1] // 2 :]
        if act != CLAMPED:
            result: Floats = exact.REFERENCES[act](gate) * up
            return result
        alpha, limit = (np.float32(v) for v in numbers)
        gate = np.where(limit < gate, limit, gate)
        up = np.where(limit < up, limit, np.where(-limit > up, -limit, up))
        clamped: Floats = (up + np.float32(1)) * (gate * exact.sigmoid_reference(gate * alpha))
        return clamped


def check_experts(
    x: tuple[int, ...], up: tuple[int, ...], down: tuple[int, ...], act: str, gated: bool, numbers: list[float]
) -> None:
    """Raise UsageError where the shapes of x (..., H), up (E, F, H) and down (E, N, I) do not fit, or the activation is none we know."""
    inner = up[1] // 2 if gated else up[1]
    if len(up) != 3 or len(down) != 3 or up[2] != x[-1] or down[0] != up[0] or down[2] != inner or (gated and up[1] % 2):
        raise UsageError(
            f"experts: x {x}, up {up}, down {down}, {'gated' if gated else 'not gated'}; needed: x (.., H), up (E, F, H), "
            "down (E, N, I), I = F / 2 of gated experts and F of others"
        )
    if act not in ACTIVATIONS or (act == CLAMPED) != (len(numbers) == 2) or (act == CLAMPED and not gated):
        raise UsageError(
            f"experts: activation {act!r} with numbers {numbers}; known: {', '.join(ACTIVATIONS)}, the last one gated"
        )


def _combine(
    rows: int,
    ids: Ids,
    weights: Floats,
    residual: Floats | None,
    features: int,
    results: dict[int, tuple[npt.NDArray[np.intp], Floats]],
) -> Floats:
    """y = residual or 0; then, experts ascending, y = fma(weight, f, y). results: expert -> (rows, f of them); lost rows become NaN."""
    y = np.zeros((rows, features), np.float32) if residual is None else residual.copy()
    for expert in sorted(results):
        tokens, f = results[expert]
        token_weights = weights[tokens, (ids[tokens] == expert).argmax(-1)]
        y[tokens] = exact.fma_reference(token_weights[:, None], f, y[tokens])
    y[np.isnan(weights).any(-1)] = np.nan
    return y


@torch.library.custom_op("khtst::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    act: str,
    gated: bool,
    numbers: list[float],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """sum_j weights_j down_e act(up_e x) over a row's experts e = ids_j, in float32.

    x: (..., H). ids: (..., k) int32, -1 for none, no expert twice in a row; weights: (..., k) float32, of `route` or `weigh`.
    up: (E, F, H), up_bias (E, F) or None; down: (E, N, I), down_bias (E, N) or None. act, gated, numbers: see `activate`.
    The output starts as residual (..., N), or 0; experts are added in ascending order, each with one fused multiply-add.
    Returns (..., N) float32; NaN for rows whose weights are NaN. Products of matrices are summed in any order.
    """
    check_experts(tuple(x.shape), tuple(up.shape), tuple(down.shape), act, gated, numbers)
    flat, slots, parts = _flat(x, ids, weights)
    results = {}
    for expert in range(up.shape[0]):
        tokens = np.nonzero((slots == expert).any(-1))[0]
        if len(tokens):
            inner = torch.nn.functional.linear(flat[tokens], up[expert], None if up_bias is None else up_bias[expert])
            middle = torch.from_numpy(activate(inner.detach().numpy(), act, gated, numbers))
            f = torch.nn.functional.linear(middle, down[expert], None if down_bias is None else down_bias[expert])
            results[expert] = (tokens, f.detach().numpy())
    y = _combine(len(flat), slots, parts, _rows(residual, down.shape[1]), down.shape[1], results)
    return torch.from_numpy(y).reshape(*x.shape[:-1], down.shape[1])


@experts.register_fake
def _(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    act: str,
    gated: bool,
    numbers: list[float],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], down.shape[1]))


def _flat(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Ids, Floats]:
    k = ids.shape[-1]
    return x.reshape(-1, x.shape[-1]), ids.reshape(-1, k).numpy(), weights.detach().reshape(-1, k).numpy()


def _rows(tensor: torch.Tensor | None, features: int) -> Floats | None:
    return None if tensor is None else tensor.detach().reshape(-1, features).numpy()


@torch.library.custom_op("khtst::w8a8_experts", mutates_args=())
def w8a8_experts(
    codes: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    block: int,
    points: int,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    act: str,
    gated: bool,
    numbers: list[float],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """`experts` in int8, to the bit: codes (..., H) int8 and scale (...) float32 of `quantize_rows` instead of x.

    Of expert e, as in `w8a8_linear`: h = fma(acc, scale * up_scale[e], up_bias[e] or 0); middle = `activate`(h), quantized row by row as
    `quantize_rows` does with inv_smooth[e] and the rotation (block, points); f = fma(acc, its scale * down_scale[e], down_bias[e] or 0).

    up: (E, F, H) int8, up_scale (E, F), up_bias (E, F) or None; inv_smooth: (E, I) or None; down: (E, N, I) int8, down_scale (E, N),
    down_bias (E, N) or None; the rest as in `experts`. Returns (..., N) float32.
    """
    check_experts(tuple(codes.shape), tuple(up.shape), tuple(down.shape), act, gated, numbers)
    check_rotation(block, points, down.shape[2])
    if max(up.shape[2], down.shape[2]) > MAX_FEATURES:
        raise UsageError(f"w8a8_experts: {max(up.shape[2], down.shape[2])} input features; at most {MAX_FEATURES} fit int32 sums")
    flat, slots, parts = _flat(codes, ids, weights)
    row_scale = scale.reshape(-1)
    results = {}
    for expert in range(up.shape[0]):
        tokens = np.nonzero((slots == expert).any(-1))[0]
        if len(tokens):
            h = _product(
                flat[tokens], row_scale[tokens], up[expert], up_scale[expert], None if up_bias is None else up_bias[expert]
            )
            middle = torch.from_numpy(activate(h, act, gated, numbers))
            smooth = None if inv_smooth is None else inv_smooth[expert]
            again, its = quantize_rows_reference(middle, smooth, None, block, points)
            bias = None if down_bias is None else down_bias[expert]
            results[expert] = (tokens, _product(again, its, down[expert], down_scale[expert], bias))
    y = _combine(len(flat), slots, parts, _rows(residual, down.shape[1]), down.shape[1], results)
    return torch.from_numpy(y).reshape(*codes.shape[:-1], down.shape[1])


def _product(
    codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> Floats:
    acc = int8_matmul(codes, weight).to(torch.float32).numpy()
    both = (scale.unsqueeze(-1) * weight_scale).numpy()
    return exact.fma_reference(acc, both, np.float32(0) if bias is None else bias.numpy())


@w8a8_experts.register_fake
def _(
    codes: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
    inv_smooth: torch.Tensor | None,
    block: int,
    points: int,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    act: str,
    gated: bool,
    numbers: list[float],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    return scale.new_empty((*codes.shape[:-1], down.shape[1]))
