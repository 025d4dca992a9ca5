"""What the codebook quantizer claims, each claim as a check that a planted fault fails."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from khtst_compile.errors import UsageError
from khtst_compile.zoo import gsq
from khtst_compile.zoo.frozen import DELTA_ORT, FrozenQuantizer, FrozenResidual
from khtst_compile.zoo.gsq import Quantized, ResidualQuantizer, Schedule, StiefelQuantizer, perplexity, relaxed, straight_through
from khtst_compile.zoo.polar import delta_ort, polar

SIZES = [(16, 16), (16, 7), (9, 31), (33, 64)]  # d, K


def vectors(n: int, d: int, seed: int = 0) -> Tensor:
    """Around five directions, of uneven size."""
    torch.manual_seed(0)
    centers = torch.randn(5, d)
    torch.manual_seed(1 + seed)
    return centers[torch.randint(5, (n,))] * torch.rand(n, 1) * 3 + 0.1 * torch.randn(n, d)


def trained(d: int, codes: int, passes: int = 20, **options: object) -> StiefelQuantizer:
    made = StiefelQuantizer(d, codes, **options)  # type: ignore[arg-type]
    for seed in range(passes):
        made(vectors(64, d, seed))
    return made


@pytest.mark.parametrize("mode", gsq.MODES)
@pytest.mark.parametrize("d, codes", SIZES)
def test_frozen_codes_are_orthonormal(d: int, codes: int, mode: str) -> None:
    frozen = trained(d, codes, mode=mode).freeze()
    assert frozen.codes.dtype is torch.float32 and delta_ort(frozen.codes) <= DELTA_ORT == 1e-6


def test_a_codebook_that_is_not_is_refused() -> None:
    quantizer = StiefelQuantizer(8, 4)
    with torch.no_grad():
        quantizer.weight[1] = quantizer.weight[0]
    with pytest.raises(UsageError, match="lost rank"):
        quantizer.freeze()
    with pytest.raises(UsageError, match=r"shape \(4, 8\).*needed: 1e-06"):
        FrozenQuantizer(polar(torch.randn(4, 8, dtype=torch.float64)) * 1.00001, 1.0)


def detached_logits(z: Tensor, c: Tensor, noise: Tensor, tau: float, scale: float) -> Tensor:
    """The fault: no path of C through the logits."""
    return scale * (torch.softmax(z @ c.detach().T / tau + noise, -1) @ c)


def check_gradients(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    z, c = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(6, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z, c: function(z, c, noise, 0.7, 1.3), (z, c))


def test_gradients_are_exact_in_z_and_in_c() -> None:
    check_gradients(relaxed)
    with pytest.raises(RuntimeError, match="Jacobian mismatch for output 0 with respect to input 1"):
        check_gradients(detached_logits)


@pytest.mark.parametrize("d, codes", [(5, 3), (3, 5)])
def test_a_training_pass_has_exact_gradients_down_to_the_raw_matrix(d: int, codes: int) -> None:
    quantizer = StiefelQuantizer(d, codes).double()
    torch.manual_seed(0)
    z = torch.randn(6, d, dtype=torch.float64, requires_grad=True)
    start = copy.deepcopy(quantizer.state_dict())

    def run(z: Tensor, weight: Tensor) -> Tensor:
        fresh = {**{k: v.clone() for k, v in start.items()}, "weight": weight}
        found = torch.func.functional_call(quantizer, fresh, (z,))
        assert isinstance(found, Quantized)
        return found.values

    assert torch.autograd.gradcheck(run, (z, quantizer.weight.detach().clone().requires_grad_()))


def test_straight_through_is_the_code_with_the_gradient_of_z() -> None:
    quantizer = trained(9, 31, mode="ste_ema")
    z = vectors(17, 9).requires_grad_()
    c, scale = quantizer.codebook().detach(), quantizer.scale.clone()
    found = quantizer(z)
    # z + (v - z) is v but for the rounding of both terms.
    assert torch.allclose(found.values, scale * c[found.ids], rtol=0, atol=4e-6)
    weights = torch.randn(17, 9)
    (grad,) = torch.autograd.grad((found.values * weights).sum(), z)
    assert torch.equal(grad, weights) and quantizer.weight.grad is None
    value = torch.randn(17, 9, requires_grad=True)
    assert torch.autograd.grad(straight_through(z, value).sum(), value, allow_unused=True) == (None,)


def check_nearest(frozen: FrozenQuantizer, z: Tensor) -> None:
    """Its choice is the nearest code, by distances worked out one by one in float64."""
    distances = torch.cdist(z.double(), frozen.table.double(), compute_mode="donot_use_mm_for_euclid_dist")
    chosen = distances.gather(1, frozen(z).ids[:, None])[:, 0]
    # Two codes may be equally near up to the rounding of the float32 scores.
    assert bool((chosen - distances.min(1).values <= 1e-5).all())


@pytest.mark.parametrize("d, codes", SIZES)
def test_the_choice_is_the_nearest_code(d: int, codes: int) -> None:
    frozen = trained(d, codes).freeze()
    check_nearest(frozen, vectors(500, d, 99))
    assert (frozen.bias is not None) == (codes > d)
    if frozen.bias is not None:
        frozen.bias.zero_()
        with pytest.raises(AssertionError):
            check_nearest(frozen, vectors(500, d, 99))


def test_freezing_keeps_what_evaluation_gives() -> None:
    quantizer = trained(16, 7).eval()
    z = vectors(200, 16, 5).reshape(4, 50, 16)
    live, frozen = quantizer(z), quantizer.freeze()(z)
    assert torch.equal(live.ids, frozen.ids) and live.ids.shape == (4, 50) and live.ids.dtype is torch.int64
    assert torch.allclose(live.values, frozen.values, rtol=0, atol=1e-6)


def scales(root: bool, quantizer: StiefelQuantizer) -> list[tuple[float, float]]:
    """(R of the module, R by its definition) after each of ten passes."""
    expected, seen = quantizer.codes**-0.5, []
    for seed in range(10):
        z, c = vectors(64, quantizer.d, seed).double(), quantizer.codebook().detach().double()
        size = float((z @ c.T @ c).norm(dim=-1).mean()) / (quantizer.codes**0.5 if root else 1.0)
        expected = 0.99 * expected + 0.01 * size
        quantizer(z.float())
        seen.append((float(quantizer.scale), expected))
    return seen


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("d, codes", [(16, 7), (9, 31)])
def test_scale_is_an_average_of_projected_sizes(d: int, codes: int, root: bool) -> None:
    made = StiefelQuantizer(d, codes, root=root)
    assert float(made.scale) == pytest.approx(codes**-0.5, rel=1e-7)
    assert all(a == pytest.approx(b, rel=1e-6) for a, b in scales(root, made))
    with pytest.raises(AssertionError):
        assert all(a == pytest.approx(b, rel=1e-6) for a, b in scales(root, StiefelQuantizer(d, codes, root=not root)))


def test_evaluation_changes_nothing() -> None:
    quantizer = trained(9, 31).eval()
    before = copy.deepcopy(quantizer.state_dict())
    quantizer(vectors(64, 9))
    assert all(torch.equal(v, before[k]) for k, v in quantizer.state_dict().items())


class Endless(Schedule):
    """The fault: it goes on falling, below zero."""

    def at(self, step: Tensor) -> Tensor:
        return self.start + (self.end - self.start) * (step.float() / self.steps)


def check_schedule(schedule: Schedule) -> None:
    """From 1.0 to 0.2 within 8 steps."""
    assert [float(schedule.at(torch.tensor(n))) for n in (0, 2, 4, 8, 100)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])


def test_tau_falls_linearly_and_stays() -> None:
    check_schedule(Schedule(1.0, 0.2, 8))
    with pytest.raises(AssertionError):
        check_schedule(Endless(1.0, 0.2, 8))
    cold, hot = (StiefelQuantizer(16, 7, tau=Schedule(t, t, 1)) for t in (1e-3, 10.0))
    z = vectors(64, 16) * 100
    near = cold.scale * cold.codebook()[cold.eval()(z).ids]
    assert torch.allclose(cold.train()(z).values, near, atol=1e-3)
    assert not torch.allclose(hot(z).values, near, atol=1e-1)


def test_perplexity_runs_from_one_to_the_number_of_codes() -> None:
    assert perplexity(torch.full((31,), 4)) == pytest.approx(31)
    assert perplexity(torch.eye(31, dtype=torch.int64)[3]) == 1.0 and perplexity(torch.zeros(31, dtype=torch.int64)) == 0.0
    assert perplexity(torch.tensor([1, 3])) == pytest.approx(4 / 3**0.75)


def test_usage_and_dead_codes_are_reported() -> None:
    quantizer = StiefelQuantizer(8, 4)
    c = quantizer.codebook().detach()
    quantizer(torch.cat([c[:1].repeat(3, 1), c[2:3]]))
    report = quantizer.report()
    assert report.counts == (3, 0, 1, 0) and report.dead == (1, 3) and not report.tight_frame
    assert report.perplexity == pytest.approx(4 / 3**0.75) and report.delta_ort < 1e-6
    quantizer.forget()
    assert quantizer.report().counts == (0, 0, 0, 0) and quantizer.report().dead == (0, 1, 2, 3)


def error(quantizer: Callable[[Tensor], Quantized], z: Tensor) -> float:
    return float((quantizer(z).values - z).square().mean())


def test_straight_through_moves_the_codes_towards_what_chose_them() -> None:
    first = StiefelQuantizer(16, 16, mode="ste_ema").eval()
    last = trained(16, 16, 300, mode="ste_ema").eval()
    with torch.no_grad():
        first.scale.copy_(last.scale)
        z = vectors(512, 16, 1000)
        # Nothing but the codes differs.
        assert error(last, z) < 0.8 * error(first, z)


def check_residual(frozen: FrozenResidual, z: Tensor) -> None:
    """Each level quantizes what those before it left over, and so lowers the error."""
    found = frozen(z)
    assert found.ids.shape == (len(z), 3)
    rest, sums = z, torch.zeros_like(z)
    for number, level in enumerate(frozen.levels):
        values, ids = level(rest)
        assert torch.equal(ids, found.ids[:, number])
        sums, rest = sums + values, z - (sums + values)
    assert torch.equal(sums, found.values)
    errors = [float((z - t).square().mean()) for t in (0 * z, frozen.levels[0](z).values, found.values)]
    assert errors[0] > errors[1] > errors[2]


class Repeated(FrozenResidual):
    """The fault: every level quantizes z itself."""

    def forward(self, z: Tensor) -> Quantized:
        found = [level(z) for level in self.levels]
        return Quantized(torch.stack([f.values for f in found]).sum(0), torch.stack([f.ids for f in found], -1))


def test_each_level_takes_what_is_left() -> None:
    residual = ResidualQuantizer(16, 16, 3, seed=4)
    for seed in range(50):
        residual(vectors(64, 16, seed))
    assert len(residual.report()) == 3 and not torch.equal(residual.levels[0].weight, residual.levels[1].weight)
    frozen, z = residual.freeze(), vectors(256, 16, 77)
    check_residual(frozen, z)
    frozen.__class__ = Repeated
    with pytest.raises(AssertionError):
        check_residual(frozen, z)


@pytest.mark.parametrize("mode", gsq.MODES)
def test_a_run_is_its_seed_and_a_checkpoint_goes_on(mode: str) -> None:
    first, second, third = trained(9, 31, mode=mode), trained(9, 31, mode=mode), StiefelQuantizer(9, 31, mode=mode)
    third.load_state_dict(first.state_dict())
    z, global_state = vectors(64, 9, 50), torch.get_rng_state()
    results = [m(z) for m in (first, second, third)]
    assert all(torch.equal(r.values, results[0].values) for r in results)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert not torch.equal(trained(9, 31, mode=mode, seed=1)(z).values, results[0].values)


@pytest.mark.parametrize("mode", gsq.MODES)
def test_compiled_training_gives_the_same(mode: str) -> None:
    plain, other = StiefelQuantizer(16, 7, mode=mode), StiefelQuantizer(16, 7, mode=mode)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        assert torch.equal(plain(vectors(32, 16, seed)).values, compiled(vectors(32, 16, seed)).values)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), other.buffers(), strict=True))


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="mode is 'soft'; known: gsq, ste_ema"):
        StiefelQuantizer(4, 4, mode="soft")
    with pytest.raises(UsageError, match="temperatures above 0"):
        StiefelQuantizer(4, 4, tau=Schedule(1.0, 0.0, 5))
    with pytest.raises(UsageError, match=r"z is \(3, 5\); needed: \(\.\.\., 4\)"):
        StiefelQuantizer(4, 4)(torch.zeros(3, 5))
    with pytest.raises(UsageError, match="levels is 0"):
        ResidualQuantizer(4, 4, 0)


@pytest.mark.parametrize("mode", gsq.MODES)
def test_no_device_is_written_down(mode: str) -> None:
    """On "meta" anything made on another device fails."""
    found = StiefelQuantizer(16, 7, mode=mode).to("meta")(torch.zeros(2, 5, 16, device="meta"))
    assert found.values.device.type == found.ids.device.type == "meta" and found.ids.shape == (2, 5)
