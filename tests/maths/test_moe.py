"""Routing and experts: what the operators say, against plain torch and against transformers' own modules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import khtst_compile.ops  # noqa: F401
from khtst_compile.errors import UsageError
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.ops.w8a8_linear import w8a8_linear_reference

khtst = torch.ops.khtst
NAN, INF = math.nan, math.inf
SILU: tuple[Any, ...] = ("silu", True, [])


def route(logits: Tensor, top_k: int, **given: Any) -> tuple[Tensor, Tensor]:
    order = ["bias", "allowed", "score", "groups", "top_groups", "group_best", "normalize", "floor", "eps", "scale", "capacity"]
    known = dict(zip(order, (None, None, "softmax", 1, 1, 1, False, 0.0, 0.0, 1.0, -1), strict=True)) | given
    bias, allowed, *rest = (known[name] for name in order)
    ids, weights = khtst.route(logits, bias, allowed, top_k, *rest)
    return ids, weights


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 7), (33,)])
def test_softmax_then_top_k(shape: tuple[int, ...], normalize: bool) -> None:
    logits = drawn(*shape, 12)
    ids, weights = route(logits, 3, normalize=normalize)
    want, order = logits.softmax(-1).topk(3)
    if normalize:
        want = want / want.sum(-1, keepdim=True)
    assert torch.equal(ids, order.to(torch.int32))
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=0)


def test_top_k_then_softmax() -> None:
    logits = drawn(40, 8)
    ids, weights = route(logits, 2, score="chosen")
    values, order = logits.topk(2)
    assert torch.equal(ids, order.to(torch.int32))
    torch.testing.assert_close(weights, values.softmax(-1), rtol=2e-6, atol=0)


def test_ties_go_to_the_lower_number() -> None:
    ids, weights = route(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]


def test_every_expert_taken_sums_to_one() -> None:
    ids, weights = route(drawn(9, 8), 8)
    assert torch.equal(ids.sort(-1).values, torch.arange(8, dtype=torch.int32).expand(9, 8))
    torch.testing.assert_close(weights.sum(-1), torch.ones(9), rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_deepseek_v3_routes_the_same(normalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, norm_topk_prob=normalize
    )
    router = modeling.DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(drawn(16, 32, seed=1))
        router.e_score_correction_bias.copy_(drawn(16, seed=2) / 10)
    x = drawn(50, 32)
    with torch.no_grad():
        _, want, order = router(x)
    form = {
        "groups": 4,
        "top_groups": 2,
        "group_best": 2,
        "normalize": normalize,
        "eps": 1e-20,
        "scale": config.routed_scaling_factor,
    }
    ids, weights = route(F.linear(x, router.weight).detach(), 4, score="sigmoid", bias=router.e_score_correction_bias, **form)
    by_number = order.argsort(-1)
    assert torch.equal(ids.sort(-1).values, order.gather(-1, by_number).to(torch.int32))
    torch.testing.assert_close(weights.gather(-1, ids.argsort(-1)), want.gather(-1, by_number), rtol=1e-5, atol=0)


def test_best_groups_by_their_best_expert() -> None:
    ids, _ = route(torch.tensor([[5.0, 0.0, 3.0, 3.0, 4.0, 1.0]]), 3, groups=3, top_groups=2)
    assert ids.tolist() == [[0, 4, 5]]  # by its best one group 2 stands before group 1, whose two are better together


def test_capacity_keeps_the_most_probable_and_of_equal_ones_the_earlier() -> None:
    logits = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    kept = {c: route(logits, 1, capacity=c, normalize=True, floor=1e-6) for c in (0, 1, 2)}
    assert kept[0][0].flatten().tolist() == [-1, -1, -1, -1]
    assert kept[1][0].flatten().tolist() == [-1, 0, -1, 1]
    assert kept[2][0].flatten().tolist() == [-1, 0, 0, 1]
    assert kept[2][1].flatten().tolist() == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("capacity", [None, 1, 9, 20])
@pytest.mark.parametrize("masked", [False, True])
def test_the_zoo_routes_the_same(capacity: int | None, masked: bool) -> None:
    from khtst_compile.zoo.moe import route as eager

    logits = drawn(64, 6)
    allowed = drawn(64, 6, seed=5) > -0.2
    allowed[:, 0] = True
    want = eager(logits, 2, capacity, allowed if masked else None).weights
    given = {
        "allowed": allowed if masked else None,
        "capacity": -1 if capacity is None else capacity,
        "normalize": True,
        "floor": 1e-6,
    }
    ids, weights = route(logits, 2, **given)
    dense = torch.zeros(64, 7).scatter(1, ids.long() % 7, weights)[:, :6]  # -1 goes to column 6
    assert torch.equal(dense > 0, want > 0)
    torch.testing.assert_close(dense, want, rtol=2e-6, atol=0)


def test_lost_rows_and_rows_that_may_go_nowhere() -> None:
    logits = torch.tensor([[NAN, 1.0], [INF, 1.0], [-INF, -INF], [-INF, 1.0], [NAN, 1.0], [1.0, 1.0]])
    allowed = torch.tensor([[True, True]] * 4 + [[False, True], [False, False]])
    ids, weights = route(logits, 2, allowed=allowed)
    assert ids.tolist() == [[-1, -1], [-1, -1], [-1, -1], [1, -1], [1, -1], [-1, -1]]
    assert weights[:3].isnan().all() and weights[3:].tolist() == [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "bad",
    [
        {"top_k": 0}, {"top_k": 7}, {"score": "max"}, {"groups": 4}, {"groups": 3, "top_groups": 4}, {"groups": 6, "group_best": 2},
        {"capacity": -2},
    ],
)  # fmt: skip
def test_sizes_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"needed|known"):
        route(drawn(2, 6), **({"top_k": 2} | bad))


def test_weigh() -> None:
    ids, weights = khtst.weigh(torch.tensor([[0.0, 0.5, -0.0], [1.0, NAN, 0.0]]))
    assert ids.tolist() == [[-1, 1, -1], [-1, -1, -1]]
    assert weights[0].tolist() == [0.0, 0.5, 0.0] and weights[1].isnan().all()


def one(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, down_bias: Tensor | None, form: tuple[Any, ...]) -> Tensor:
    """One expert in plain torch."""
    act, gated, numbers = form
    h = F.linear(x, up, bias)
    if act == "clamped_swiglu":
        gate, rest = h.chunk(2, -1)
        gate = gate.clamp(max=numbers[1])
        h = (rest.clamp(-numbers[1], numbers[1]) + 1) * gate * torch.sigmoid(gate * numbers[0])
    elif gated:
        gate, rest = h.chunk(2, -1)
        h = F.silu(gate) * rest
    else:
        h = F.gelu(h)
    return F.linear(h, down, down_bias)


FORMS: list[tuple[Any, ...]] = [SILU, ("gelu", False, []), ("clamped_swiglu", True, [1.702, 1.5])]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f[0])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 11)])
def test_experts_are_the_weighted_sum(form: tuple[Any, ...], extra: bool, shape: tuple[int, ...]) -> None:
    count, wide = 5, 16
    x, up, down = drawn(*shape, 24), drawn(count, 2 * wide if form[1] else wide, 24, seed=1), drawn(count, 20, wide, seed=2)
    biases = (drawn(*up.shape[:2], seed=3), drawn(*down.shape[:2], seed=4)) if extra else (None, None)
    residual = drawn(*shape, 20, seed=6) if extra else None
    ids, weights = route(drawn(*shape, count, seed=5), 2, capacity=7)
    got = khtst.experts(x, ids, weights, up, biases[0], down, biases[1], *form, residual)
    want = torch.zeros(*shape, 20) if residual is None else residual.clone()
    for e in range(count):
        share = torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
        want = want + share * one(
            x, up[e], None if not extra else biases[0][e], down[e], None if not extra else biases[1][e], form
        )  # type: ignore[index]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)  # sums of 24 and 16 terms of up to 60, in other orders


def int8(count: int, h: int, f: int, inner: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(7)
    up = torch.randint(-127, 128, (count, f, h), generator=draws, dtype=torch.int8)
    down = torch.randint(-127, 128, (count, n, inner), generator=draws, dtype=torch.int8)
    return up, drawn(count, f, seed=8).abs() / 100, down, drawn(count, n, seed=9).abs() / 100


@pytest.mark.parametrize("block, points", [(0, 0), (16, 16)])
@pytest.mark.parametrize("smooth", [False, True])
def test_int8_experts_are_linears_one_by_one(block: int, points: int, smooth: bool) -> None:
    count, inner = 6, 32
    codes, scale = quantize_rows_reference(drawn(19, 24), None, None, 0, 0)
    up, up_scale, down, down_scale = int8(count, 24, 2 * inner, inner, 20)
    inv_smooth = drawn(count, inner, seed=3).exp() if smooth else None
    ids, weights = route(drawn(19, count, seed=5), 3)
    got = khtst.w8a8_experts(
        codes, scale, ids, weights, up, up_scale, None, inv_smooth, block, points, down, down_scale, None, *SILU, None
    )
    want = torch.zeros(19, 20)
    for e in range(count):
        gate, rest = w8a8_linear_reference(codes, scale, up[e], up_scale[e], None).chunk(2, -1)
        middle, its = quantize_rows_reference(
            F.silu(gate) * rest, None if inv_smooth is None else inv_smooth[e], None, block, points
        )
        want += torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True) * w8a8_linear_reference(
            middle, its, down[e], down_scale[e], None
        )
    # silu as a polynomial moves codes that are next to a tie by one
    assert 20 * torch.log10((got - want).norm() / want.norm()) < -55


def test_lost_rows_give_nan_and_dropped_ones_the_residual() -> None:
    x, up, down, residual = drawn(3, 8), drawn(2, 8, 8), drawn(2, 5, 4), drawn(3, 5)
    ids = torch.tensor([[-1], [-1], [1]], dtype=torch.int32)
    weights = torch.tensor([[NAN], [0.0], [0.0]])
    got = khtst.experts(x, ids, weights, up, None, down, None, *SILU, residual)
    assert got[0].isnan().all() and torch.equal(got[1:], residual[1:])
    codes, scale = quantize_rows_reference(x, None, None, 0, 0)
    eight = (torch.ones(2, 8, 8, dtype=torch.int8), torch.ones(2, 8), None, None, 0, 0, torch.ones(2, 5, 4, dtype=torch.int8))
    got = khtst.w8a8_experts(codes, scale, ids, weights, *eight, torch.ones(2, 5), None, *SILU, residual)
    assert got[0].isnan().all() and torch.equal(got[1:], residual[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"up": (2, 7, 8)},
        {"down": (3, 5, 4)},
        {"down": (2, 5, 8)},
        {"form": ("tanh", True, [])},
        {"form": ("clamped_swiglu", True, [])},
    ],
)
def test_experts_that_do_not_fit(change: dict[str, Any]) -> None:
    shapes: dict[str, Any] = {"up": (2, 8, 8), "down": (2, 5, 4), "form": SILU} | change
    ids = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(UsageError, match="experts"):
        khtst.experts(
            drawn(3, 8), ids, torch.ones(3, 1), drawn(*shapes["up"]), None, drawn(*shapes["down"]), None, *shapes["form"], None
        )


def test_operators_and_their_fakes_agree() -> None:
    logits, x = drawn(2, 7, 6), drawn(2, 7, 8)
    ids, weights = route(logits, 2)
    check = lambda op, *args: torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))  # noqa: E731
    check(khtst.route.default, logits, None, None, 2, "softmax", 1, 1, 1, True, 0.0, 0.0, 1.0, -1)
    check(khtst.weigh.default, weights)
    check(khtst.experts.default, x, ids, weights, drawn(6, 8, 8), None, drawn(6, 5, 4), None, *SILU, None)
    codes, scale = quantize_rows_reference(x, None, None, 0, 0)
    up, up_scale, down, down_scale = int8(6, 8, 8, 4, 5)
    check(
        khtst.w8a8_experts.default,
        *(codes, scale, ids, weights, up, up_scale, None, None, 0, 0, down, down_scale, None, *SILU, None),
    )
