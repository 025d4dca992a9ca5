"""Refined prototypes, on handwritten digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from khtst_compile.errors import UsageError
from khtst_compile.zoo.data import digits
from khtst_compile.zoo.moe import DECODER, ENCODER, Refinement, Refiner, k_means, nearest, refine
from khtst_compile.zoo.water_filling import even


@pytest.fixture(scope="module")
def data() -> Tensor:
    return digits()[0].flatten(1)


@pytest.fixture(scope="module")
def refined(data: Tensor) -> Refinement:
    return refine(data[:1300], data[1300:], k_means(data[:1300], 8, seed=0), 16, seed=0, steps=100)


def test_k_means_is_a_fixed_point_and_its_seed(data: Tensor) -> None:
    centers = k_means(data, 8, seed=0, rounds=100)
    unit = nearest(data, centers)
    means = torch.stack([data[unit == i].mean(0) for i in range(8)])
    torch.testing.assert_close(means, centers, rtol=0, atol=1e-6)  # means of 1,797 numbers below 1, in another order
    assert torch.equal(centers, k_means(data, 8, seed=0, rounds=100))
    assert not torch.equal(centers, k_means(data, 8, seed=1, rounds=100))


def test_nearest_is_the_nearest_and_of_equals_the_first(data: Tensor) -> None:
    centers = data[:20]
    assert torch.equal(nearest(data[:20], centers), torch.arange(20))
    assert nearest(torch.zeros(1, 2), torch.tensor([[3.0, 0], [0, 1], [1, 0]])).tolist() == [1]


def test_correction_helps_and_redirected_experts_decode(data: Tensor, refined: Refinement) -> None:
    assert refined.after < 0.8 * refined.before and refined.uniform < 0.8 * refined.before
    assert sum(refined.placement) == 16 and refined.placement != even(8, 16)
    # A decoder sees the prototype alone, so it can do no better than the mean of a cell: the prototype itself, on the training data.
    assert refined.before * 0.95 < refined.decoder < refined.before * 1.1


def test_the_same_seed_gives_the_same_bits(data: Tensor, refined: Refinement) -> None:
    again = refine(data[:1300], data[1300:], k_means(data[:1300], 8, seed=0), 16, seed=0, steps=100)
    assert (again.after, again.uniform, again.decoder) == (refined.after, refined.uniform, refined.decoder)


def check_owners(refiner: Refiner, x: Tensor) -> None:
    """A token's gradient reaches experts of its own prototype and of the role alone."""
    for role in (ENCODER, DECODER):
        for row in x:
            refiner.zero_grad()
            refiner(row.unsqueeze(0), role).square().sum().backward()
            reached = {
                i for i, e in enumerate(refiner.experts.experts) if e.down.weight.grad is not None and e.down.weight.grad.any()
            }
            unit = int(nearest(row, refiner.prototypes))
            own = {i for i in refiner.roles.of(role) if int(refiner.owner[i]) == unit}
            assert reached and reached <= own and len(reached) == min(len(own), refiner.top_k)


def test_tokens_go_to_the_experts_of_their_prototype(data: Tensor) -> None:
    torch.manual_seed(0)
    refiner = Refiner(data[:3], (1, 2, 3))
    check_owners(refiner, data[:30])
    refiner.redirect()
    assert refiner.roles.of(DECODER) == (0, 2, 4, 6, 8, 10)
    check_owners(refiner, data[:30])
    wrong = Refiner(data[:3], (1, 2, 3))
    wrong.owner.zero_()
    wrong.owner[-1] = 1
    real = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    assert torch.equal(refiner.owner, real)
    with pytest.raises(AssertionError):
        check_owners(wrong, data[:30])


def test_a_state_dict_keeps_roles_and_owners(data: Tensor, refined: Refinement) -> None:
    other = Refiner(torch.zeros(8, 64), refined.placement)
    other.load_state_dict(refined.refiner.state_dict())
    for role in (ENCODER, DECODER):
        assert torch.equal(other(data[:50], role), refined.refiner(data[:50], role))


def test_refusals(data: Tensor) -> None:
    with pytest.raises(UsageError, match=r"placement \(1, 2\) for 3 prototypes"):
        Refiner(data[:3], (1, 2))
    with pytest.raises(UsageError, match="placement"):
        Refiner(data[:2], (0, 2))
