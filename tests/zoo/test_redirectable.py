"""The redirectable mixture: what holds at birth, between its roles and when they are exchanged."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.moe import DECODER, ENCODER, RedirectableMoe, Roles, Routed
from khtst_compile.zoo.moe.redirectable import SelfAttention

D, EXPERTS = 16, 6


def made(kind: type[RedirectableMoe] = RedirectableMoe, gain: float = 0.5) -> RedirectableMoe:
    torch.manual_seed(0)
    block = kind(D, EXPERTS, 2, capacity=20, heads=4)
    with torch.no_grad():
        block.gain.fill_(gain)
    return block.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def equal(a: Routed, b: Routed) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_birth(block: RedirectableMoe) -> None:
    for x in (tokens(33), tokens(3, 11)):
        assert torch.equal(block.attend(x).view(torch.int32), x.view(torch.int32))


class NearlyClosed(RedirectableMoe):
    """The fault: a gain that starts small instead of at 0."""

    def __init__(self, *args: int, **options: int) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        nn.init.constant_(self.gain, 1e-6)


def test_at_birth_attention_changes_no_bit_and_learns() -> None:
    torch.manual_seed(0)
    block = RedirectableMoe(D, EXPERTS, 2, heads=4)
    check_birth(block)
    block(tokens(3, 11)).output.square().sum().backward()
    assert block.gain.grad is not None and float(block.gain.grad) != 0
    with pytest.raises(AssertionError):
        check_birth(NearlyClosed(D, EXPERTS, 2, heads=4))


def check_heads(attention: SelfAttention) -> None:
    """Against a loop over heads and tokens."""
    x, size = tokens(2, 7).double(), D // attention.heads
    q, k, v = attention.query(x), attention.key(x), attention.value(x)
    mixed = torch.zeros_like(x)
    for b in range(2):
        for h in range(attention.heads):
            part = slice(h * size, (h + 1) * size)
            for t in range(7):
                scores = torch.stack([q[b, t, part] @ k[b, s, part] for s in range(7)]) / size**0.5
                mixed[b, t, part] = scores.softmax(0) @ v[b, :, part]
    torch.testing.assert_close(attention(x), attention.out(mixed), rtol=1e-12, atol=1e-13)  # float64, sums in another order


class MixesTokensWithHeads(SelfAttention):
    """The fault: (B, N, d) reshaped straight to (B, heads, N, d/heads)."""

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), self.heads, x.shape[1], -1)


def test_heads_are_parts_of_the_features() -> None:
    torch.manual_seed(0)
    check_heads(SelfAttention(D, 4).double())
    with pytest.raises(AssertionError):
        check_heads(MixesTokensWithHeads(D, 4).double())


def check_disjoint(block: RedirectableMoe) -> None:
    """A role's pass, its loss included, reaches its own experts and its own rows of the router, and no others."""
    for role in (ENCODER, DECODER):
        block.zero_grad()
        found = block(tokens(4, 16), role)
        (found.output.square().sum() + found.auxiliary).backward()
        router = block.router.weight.grad
        assert router is not None
        for i, name in enumerate(block.roles.names):
            own = [p.grad is not None and bool(p.grad.any()) for p in block.experts.experts[i].parameters()]
            assert own == [name == role] * 2 and bool(router[i].any()) == (name == role)


class ForgetsRoles(RedirectableMoe):
    """The fault: the router is not masked."""

    def forward(self, x: Tensor, role: str = ENCODER) -> Routed:
        roles = self.roles
        self.roles = Roles((role,) * len(roles.names))
        try:
            return super().forward(x, role)
        finally:
            self.roles = roles


def test_roles_use_disjoint_experts_and_gradients_reach_all_of_them() -> None:
    check_disjoint(made())
    with pytest.raises(AssertionError):
        check_disjoint(made(ForgetsRoles))


def check_side_by_side(block: RedirectableMoe) -> None:
    encoded, decoded = tokens(4, 16), tokens(4, 16, seed=1)
    with torch.no_grad():
        one_by_one = block(encoded, ENCODER), block(decoded, DECODER)
        together = block.both(encoded, decoded)
        with ThreadPoolExecutor(2) as pool:
            parallel = [list(pool.map(block.__call__, (encoded, decoded), (ENCODER, DECODER))) for _ in range(8)]
    for pair in (together, *parallel):
        assert all(equal(a, b) for a, b in zip(pair, one_by_one, strict=True))


class OneQueue(RedirectableMoe):
    """The fault: both roles' tokens wait for experts in one queue."""

    def both(self, encoded: Tensor, decoded: Tensor) -> tuple[Routed, Routed]:
        joined = self(torch.cat([encoded, decoded]), ENCODER)
        first, second = joined.output.chunk(2)
        return joined._replace(output=first), joined._replace(output=second)


def test_side_by_side_gives_the_bits_of_one_after_the_other() -> None:
    check_side_by_side(made())
    with pytest.raises(AssertionError):
        check_side_by_side(made(OneQueue))


def check_exchange(block: RedirectableMoe) -> None:
    """All roles exchanged: loads and losses of the family stay, to the bit, its passes change places and no weight moves."""
    x = tokens(4, 16)
    weights = copy.deepcopy(dict(block.named_parameters()))
    with torch.no_grad():
        before = block.both(x, x)
        block.redirect(block.roles.exchange())
        after = block.both(x, x)
    assert sum(int(r.load.sum()) for r in after) == sum(int(r.load.sum()) for r in before)
    assert torch.equal(after[0].auxiliary + after[1].auxiliary, before[0].auxiliary + before[1].auxiliary)
    assert equal(after[0], before[1]) and equal(after[1], before[0])
    assert all(torch.equal(p, weights[n]) for n, p in block.named_parameters())


class RedirectsHalf(RedirectableMoe):
    def redirect(self, permutation: object) -> None:
        super().redirect([1, 0, *range(2, EXPERTS)])


class MovesTheRouter(RedirectableMoe):
    def redirect(self, permutation: object) -> None:
        super().redirect(list(permutation))  # type: ignore[call-overload]
        with torch.no_grad():
            self.router.weight.copy_(self.router.weight[list(permutation)])  # type: ignore[call-overload]


def test_exchanging_all_roles_conserves_load_and_auxiliary_loss() -> None:
    block = made()
    check_exchange(block)
    assert block.roles.of(ENCODER) == (1, 3, 5)
    for fault in (RedirectsHalf, MovesTheRouter):
        with pytest.raises(AssertionError):
            check_exchange(made(fault))


def test_redirecting_back_is_as_if_nothing_had_been() -> None:
    block, x = made(), tokens(4, 16)
    with torch.no_grad():
        before = block(x)
        block.redirect((1, 2, 0, 3, 5, 4))
        assert block.roles.names == (DECODER, ENCODER, ENCODER, DECODER, DECODER, ENCODER) and not equal(block(x), before)
        block.redirect((2, 0, 1, 3, 5, 4))
        assert equal(block(x), before)


def test_a_state_dict_keeps_the_roles() -> None:
    block, other = made(), made()
    block.redirect(block.roles.exchange())
    other.load_state_dict(block.state_dict())
    assert other.roles == block.roles != Roles.alternating(EXPERTS)
    with pytest.raises(UsageError, match="half of them true"):
        other.set_extra_state(torch.tensor([True, True, False, True]))


def test_it_compiles_as_one_graph_and_exports_each_role() -> None:
    block, batch = made(), torch.export.Dim("b", max=64)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    for role in (ENCODER, DECODER):
        exported = torch.export.export(block, (tokens(4, 16), role), dynamic_shapes=({0: batch}, None), strict=False).module()
        for x in (tokens(4, 16), tokens(5, 16)):
            assert equal(compiled(x, role), block(x, role)) and equal(exported(x, role), block(x, role))


def test_refusals() -> None:
    for make, message in (
        (lambda: RedirectableMoe(D, 5, 2), "5 experts; needed: an even number"),
        (lambda: RedirectableMoe(D, 6, 4), "top_k is 4; needed: 1 to 3"),
        (lambda: RedirectableMoe(D, 6, 2, heads=3), "3 heads for 16 features"),
        (lambda: made()(tokens(3), "judge"), "role 'judge'"),
        (lambda: made().redirect((0, 0, 1, 2, 3, 4)), "no permutation"),
    ):
        with pytest.raises(UsageError, match=message):
            make()
