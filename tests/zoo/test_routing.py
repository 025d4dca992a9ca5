"""Who takes which token: every rule against loops over lists, and every mistake that was once made shown to be caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.moe import Routing, SonicMoe, balance, fair_capacity, route
from khtst_compile.zoo.moe import routing as routing_module
from khtst_compile.zoo.moe.routing import preference

Router = Callable[..., Routing]


def in_loops(p: Tensor, top_k: int, capacity: int | None, allowed: Tensor) -> tuple[list[list[int]], list[int], int]:
    """p: (n, E) probabilities -> tokens of each expert, loads, dropped: token by token, with Python's stable sort."""
    p, (n, experts) = p.detach(), p.shape
    wants = [sorted((e for e in range(experts) if allowed[t, e]), key=lambda e: -float(p[t, e]))[:top_k] for t in range(n)]
    takes = [sorted((t for t in range(n) if e in wants[t]), key=lambda t: -float(p[t, e]))[:capacity] for e in range(experts)]
    return takes, [len(t) for t in takes], n - len({t for took in takes for t in took})


def logits(n: int, experts: int, ties: bool, seed: int = 0) -> Tensor:
    """Ties: between experts of a token, and between twins among the tokens."""
    drawn = torch.randn(n, experts, generator=torch.Generator().manual_seed(seed)) * 2
    return drawn.round().repeat_interleave(2, 0)[:n] if ties else drawn


def check_routing(router: Router) -> None:
    for n, experts, top_k, capacity in (
        (1, 2, 1, 1),
        (7, 4, 2, 2),
        (33, 8, 3, 9),
        (31, 6, 6, 40),
        (64, 8, 2, None),
        (40, 4, 1, 3),
    ):
        for ties in (False, True):
            given = logits(n, experts, ties)
            allowed = torch.ones(n, experts, dtype=torch.bool)
            got = router(given, top_k, capacity)
            takes, load, dropped = in_loops(given.softmax(-1), top_k, capacity, allowed)
            assert [torch.nonzero(column).flatten().tolist() for column in got.weights.T] == [sorted(t) for t in takes]
            assert got.load.tolist() == load and int(got.dropped) == dropped
            assert capacity is None or max(load) <= capacity
            total = got.weights.sum(-1)
            # Shares of E numbers, each rounded once, and their sum.
            assert bool(((total - 1).abs() <= experts * 2**-23).logical_or(total == 0).all())
            assert int((total == 0).sum()) == dropped


def test_routing_is_that_of_loops() -> None:
    check_routing(route)


def least_likely(given: Tensor, top_k: int, capacity: int | None = None) -> Routing:
    """The fault: sorted descending, then reversed."""
    return route(-given, top_k, capacity)


def without_capacity(given: Tensor, top_k: int, capacity: int | None = None) -> Routing:
    return route(given, top_k)


def drops_per_expert(given: Tensor, top_k: int, capacity: int | None = None) -> Routing:
    """The fault: what an expert refuses counts as dropped, though another took it."""
    found = route(given, top_k, capacity)
    return found._replace(dropped=top_k * len(given) - found.load.sum())


def in_order_of_arrival(scores: Tensor) -> Tensor:
    return (scores >= 0).to(torch.int64).cumsum(0) - 1


def last_comes_first(scores: Tensor) -> Tensor:
    """The fault: a sort that turns equal elements around."""
    flipped = scores.flip(0).argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return flipped.flip(0)


@pytest.mark.parametrize("fault", [least_likely, without_capacity, drops_per_expert], ids=lambda f: f.__name__)
def test_wrong_routers_are_caught(fault: Router) -> None:
    with pytest.raises(AssertionError):
        check_routing(fault)


@pytest.mark.parametrize("queue", [in_order_of_arrival, last_comes_first], ids=lambda f: f.__name__)
def test_wrong_queues_are_caught(queue: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_module, "queue", queue)
    with pytest.raises(AssertionError):
        check_routing(route)


def test_ties_between_experts_go_to_the_lower_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preference(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])).tolist() == [[4, 0, 1, 3, 2]]
    monkeypatch.setattr(routing_module, "preference", lambda s: preference(s.flip(-1)).flip(-1))
    with pytest.raises(AssertionError):
        check_routing(route)


def test_only_allowed_experts_are_chosen_even_where_their_probability_is_0() -> None:
    given = torch.tensor([[200.0, -200.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1e4, 1e4, -1e4, -1e4]])
    allowed = torch.tensor([[True, True, False, False], [False, False, False, True], [True, False, True, False]])
    for top_k in (1, 2, 3):
        got = route(given, top_k, allowed=allowed)
        takes, load, dropped = in_loops(given.masked_fill(~allowed, -torch.inf).softmax(-1), top_k, None, allowed)
        assert got.load.tolist() == load and int(got.dropped) == dropped == 0
        assert not bool(got.weights[~allowed].any()) and bool(got.weights.isfinite().all())
    assert takes == [[0, 2], [0], [2], [1]]


def check_balance(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    draws = torch.Generator().manual_seed(0)
    for experts in (2, 3, 8, 64):
        uniform = torch.full((experts,), 1 / experts, dtype=torch.float64)
        assert abs(float(function(uniform, uniform)) - 1) <= experts * 2**-52  # E products and sums of float64
        for _ in range(50):
            p = (uniform.log() + 0.1 * torch.randn(experts, generator=draws, dtype=torch.float64)).softmax(-1)
            assert float(function(p, p)) > 1


def test_auxiliary_loss_is_at_least_1_and_1_where_all_is_uniform() -> None:
    check_balance(balance)
    given = torch.zeros(8, 4) + torch.eye(4).repeat(
        2, 1
    )  # every expert is first choice of two tokens, and as probable as the others
    assert float(route(given, 1).auxiliary) == 1.0
    skewed = logits(64, 4, False) + torch.tensor([2.0, 0, 0, 0])
    p = skewed.softmax(-1)
    share = nn.functional.one_hot(p.argmax(-1), 4).float().mean(0)
    assert float(route(skewed, 1).auxiliary) == float(4 * (share * p.mean(0)).sum()) > 1
    with pytest.raises(AssertionError):
        check_balance(lambda f, p: (f * p).sum())  # E forgotten


class InLists(SonicMoe):
    """The fault: weights that went through Python's lists."""

    def forward(self, x: Tensor) -> object:  # type: ignore[override]
        routing = route(self.router(x), self.top_k, self.capacity)
        return routing._replace(weights=self.experts(x, torch.tensor(routing.weights.tolist()), range(4)))


def check_gradients(moe: SonicMoe) -> None:
    """Through the output alone: what the auxiliary loss adds would hide a router that the output does not reach."""
    moe.zero_grad()
    moe(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))[0].square().sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name


def test_gradients_reach_router_and_experts() -> None:
    torch.manual_seed(0)
    check_gradients(SonicMoe(16, 4, 2, capacity=24))
    with pytest.raises(AssertionError, match="router"):
        check_gradients(InLists(16, 4, 2, capacity=24))


def test_gradient_of_the_weights() -> None:
    given = logits(9, 4, False).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda g: route(g, 2, 4).weights, (given,))
    assert torch.autograd.gradcheck(lambda g: route(g, 2, 4).auxiliary, (given,))


def check_output(moe: SonicMoe) -> None:
    """The output of every token by itself, from the experts that took it."""
    x = torch.randn(33, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    p = moe.router(x).softmax(-1)
    takes, load, dropped = in_loops(p, moe.top_k, moe.capacity, torch.ones_like(p, dtype=torch.bool))
    got = moe(x)
    for t in range(len(x)):
        mine = [e for e, took in enumerate(takes) if t in took]
        want = sum((p[t, e] * moe.experts.experts[e](x[t]) for e in mine), torch.zeros(16, dtype=torch.float64))
        want = want / max(sum(float(p[t, e]) for e in mine), 1e-6)
        torch.testing.assert_close(got.output[t], want, rtol=1e-12, atol=1e-14)  # float64, 16 and 32 terms in another order
    assert dropped > 0 and int(got.dropped) == dropped and got.load.tolist() == load


def test_output_is_the_weighted_sum_of_the_experts_that_took_the_token() -> None:
    torch.manual_seed(0)
    check_output(SonicMoe(16, 4, 2, capacity=7).double())
    wrong = SonicMoe(16, 4, 2, capacity=7).double()
    wrong.experts.forward = lambda x, w, numbers: sum(e(x) for e in wrong.experts.experts)  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError):
        check_output(wrong)


def test_three_axes_are_one_list_of_tokens() -> None:
    torch.manual_seed(0)
    moe, x = SonicMoe(16, 4, 2, capacity=20), torch.randn(4, 8, 16)
    for a, b in zip(moe(x), moe(x.reshape(32, 16)), strict=True):
        assert torch.equal(a.flatten(), b.flatten())


def test_it_compiles_as_one_graph_and_exports_with_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    moe, x = SonicMoe(16, 4, 2, capacity=20).eval(), torch.randn(32, 16)
    compiled = torch.compile(moe, fullgraph=True, backend="eager")
    exported = torch.export.export(moe, (x,), dynamic_shapes=({0: torch.export.Dim("n", max=512)},), strict=False).module()
    for rows in (x, torch.randn(65, 16)):
        for made in (compiled, exported):
            assert all(torch.equal(a, b) for a, b in zip(made(rows), moe(rows), strict=True))


@pytest.mark.parametrize(
    "sizes, message", [((4, 5), "top_k is 5; needed: 1 to 4"), ((4, 0), "top_k"), ((4, 2, 0), "capacity is 0")]
)
def test_sizes_that_cannot_be(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SonicMoe(16, *sizes)


def test_fair_capacity() -> None:
    assert fair_capacity(64, 8, 2, 1.0) == 16 and fair_capacity(65, 8, 2, 1.0) == 17 and fair_capacity(64, 8, 2) == 20
