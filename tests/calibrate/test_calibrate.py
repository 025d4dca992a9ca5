"""Statistics against brute force: ranges, reservoirs, gradients, and every error."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from khtst_compile.calibrate import Samples, calibrate
from khtst_compile.capture import capture_module
from khtst_compile.errors import CalibrationError
from khtst_compile.program import Program

torch.set_num_threads(1)
Batch = dict[str, torch.Tensor]


class Masked(nn.Module):
    """Token features straight into a linear, so that what calibration should see is known without running anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        return (hidden * attention_mask.unsqueeze(-1)).sum(1)


@pytest.fixture(scope="module")
def masked() -> Program:
    torch.manual_seed(0)
    example = {"x": torch.randn(2, 4, 6), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    return capture_module(Masked().eval(), example, shapes={"seq": (1, 64)})


def batches(count: int, size: int = 2, seq: int = 8, seed: int = 0) -> list[Batch]:
    """Padding from position 5 on in every second sample, with garbage in the padded features."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        x = torch.randn(size, seq, 6, generator=generator)
        mask = torch.ones(size, seq, dtype=torch.int64)
        mask[1::2, 5:] = 0
        x[mask == 0] = 1e6
        made.append({"x": x, "attention_mask": mask})
    return made


def samples(made: list[Batch], size: int = 2) -> Samples:
    def again() -> Iterator[Batch]:
        return iter(made)

    return Samples(len(made) * size, "test", False, again)


def real_rows(made: list[Batch]) -> torch.Tensor:
    return torch.cat([b["x"][b["attention_mask"] != 0] for b in made])


def contains(rows: torch.Tensor, row: torch.Tensor) -> bool:
    return bool((rows == row).all(1).any())


def test_absmax_is_that_of_real_tokens(masked: Program) -> None:
    made = batches(6)
    stats = calibrate(masked, samples(made))
    want = real_rows(made)
    seen = stats.activations["x"]
    assert torch.equal(seen.absmax, want.abs().amax(0)) and seen.absmax.max() < 100
    assert seen.tokens == len(want) and stats.samples == 12 and stats.source == "test"
    assert list(stats.activations) == ["x", "tanh"]


def test_rows_are_real_disjoint_and_from_different_samples(masked: Program) -> None:
    made = batches(6)
    seen = calibrate(masked, samples(made), rows=20, held_rows=20).activations["x"]
    everything = real_rows(made)
    owner = torch.cat(
        [torch.arange(2).repeat_interleave(8).reshape(2, 8)[b["attention_mask"] != 0] + 2 * i for i, b in enumerate(made)]
    )
    sources = []
    for rows in (seen.rows, seen.held_rows):
        assert rows.shape == (20, 6)
        sources.append({int(owner[(everything == row).all(1)][0]) for row in rows if contains(everything, row)})
        assert all(contains(everything, row) for row in rows), "a padded token was kept"
    assert sources[0].isdisjoint(sources[1])


def test_moments_are_those_of_real_tokens_that_are_not_held_out(masked: Program) -> None:
    made = batches(6)
    seen = calibrate(masked, samples(made), rows=100, held_rows=100, moments=True).activations["x"]  # keeps every token
    assert seen.moments is not None and len(seen.rows) + len(seen.held_rows) == seen.tokens
    # Sums of at most 60 products of float32, in another order.
    assert torch.allclose(seen.moments, seen.rows.T @ seen.rows, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(seen.moments, real_rows(made).T @ real_rows(made), rtol=1e-2)


def test_moments_are_summed_over_a_bounded_number_of_tokens(masked: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    made = batches(6)
    some = calibrate(masked, samples(made), rows=100, held_rows=100, moments=True).activations["x"]
    monkeypatch.setattr("khtst_compile.calibrate.MOMENT_TOKENS", 5)
    few = calibrate(masked, samples(made), rows=100, held_rows=100, moments=True).activations["x"]
    assert some.moments is not None and few.moments is not None
    # The trace is a sum over tokens of positive terms: five of some forty are left.
    assert 0 < float(few.moments.trace()) < 0.4 * float(some.moments.trace())
    assert torch.linalg.matrix_rank(few.moments) <= 5


def test_moments_are_summed_only_when_asked_for(masked: Program) -> None:
    assert calibrate(masked, samples(batches(2))).activations["x"].moments is None


def test_scaled_statistics_are_those_of_the_scaled_activation(masked: Program) -> None:
    factor = torch.tensor([1.0, -2.0, 0.5, 4.0, 1.0, 8.0])
    seen = calibrate(masked, samples(batches(6)), rows=100, held_rows=100, moments=True).activations["x"].scaled(factor)
    assert seen.moments is not None
    # Sums of at most 60 products of float32, in another order.
    assert torch.allclose(seen.moments, seen.rows.T @ seen.rows, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen.absmax, torch.cat([seen.rows, seen.held_rows]).abs().amax(0))


def test_few_samples_are_split_by_token(masked: Program) -> None:
    made = batches(1)
    seen = calibrate(masked, samples(made)).activations["x"]
    assert len(seen.rows) + len(seen.held_rows) == 13 and len(seen.rows) and len(seen.held_rows)
    assert not any(contains(seen.held_rows, row) for row in seen.rows)


def test_memory_does_not_grow_with_samples(masked: Program) -> None:
    sizes = []
    for count in (8, 80):
        seen = calibrate(masked, samples(batches(count)), rows=16, held_rows=8).activations
        sizes.append([(a.rows.numel(), a.held_rows.numel(), a.grads[n].numel()) for a in seen.values() for n in a.grads])
    assert sizes[0] == sizes[1] and sizes[0][0][:2] == (16 * 6, 8 * 6)


def test_gradients_are_autograds(masked: Program) -> None:
    """One batch, so the projection is the first seeded draw; gradients are found again by their token's row."""
    made = batches(1)
    stats = calibrate(masked, samples(made), rows=32, held_rows=32, seed=5)
    tensors = {str(s.target): masked.tensors()[s.arg.name] for s in masked.ep.graph_signature.input_specs if s.target}
    model = Masked()
    model.load_state_dict({k.removeprefix("khtst_model."): v for k, v in tensors.items()})
    first = model.first(made[0]["x"])
    second = model.second(torch.tanh(first))
    out = (second * made[0]["attention_mask"].unsqueeze(-1)).sum(1)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5 * 1_000_003))
    wanted = torch.autograd.grad((out * weight).sum(), [first, second])
    found = {"x": made[0]["x"], "tanh": torch.tanh(first).detach()}
    for (activation, linear), want in zip([("x", "linear"), ("tanh", "linear_1")], wanted, strict=True):
        seen = stats.activations[activation]
        checked = 0
        for rows, grads in ((seen.rows, seen.grads[linear]), (seen.held_rows, seen.held_grads[linear])):
            assert len(rows) == len(grads)
            for row, grad in zip(rows, grads, strict=True):
                at = ((found[activation] - row).abs().amax(-1) < 1e-5).nonzero()[0]
                # The same float32 products, summed over at most 5 features.
                assert torch.allclose(grad, want[at[0], at[1]], atol=1e-6)
                checked += 1
        assert checked == 13


def test_gradients_of_kept_rows_survive_later_batches(masked: Program) -> None:
    """With more batches than room, each kept row's gradient is that of its own batch: d(out)/d(second) is the projection itself."""
    made = batches(12)
    seen = calibrate(masked, samples(made), rows=10, held_rows=10, seed=2).activations["tanh"]
    projections = [torch.randn(2, 3, generator=torch.Generator().manual_seed(2 * 1_000_003 + i)) for i in range(12)]
    allowed = torch.cat(projections)
    assert all(float((allowed - g).abs().amax(1).min()) < 1e-6 for g in seen.grads["linear_1"])
    assert len({tuple(g.tolist()) for g in seen.grads["linear_1"]}) > 2


def test_seed_decides_everything(masked: Program) -> None:
    made = batches(6)
    one, two, three = (calibrate(masked, samples(made), rows=9, held_rows=9, seed=s).activations["x"] for s in (1, 1, 2))
    assert torch.equal(one.rows, two.rows) and torch.equal(one.grads["linear"], two.grads["linear"])
    assert not torch.equal(one.rows, three.rows)


def test_without_gradients_ranges_are_the_same(masked: Program) -> None:
    made = batches(4)
    with_them, without = (calibrate(masked, samples(made), gradients=g).activations["tanh"] for g in (True, False))
    assert torch.equal(with_them.absmax, without.absmax) and torch.equal(with_them.rows, without.rows)
    assert with_them.grads and not without.grads


def test_zero_channels_are_counted(masked: Program) -> None:
    made = batches(4)
    for b in made:
        b["x"][..., 2:4] = 0
    assert calibrate(masked, samples(made)).activations["x"].zero_channels == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_finite_names_site_and_sample(masked: Program, value: float) -> None:
    made = batches(5)
    made[3]["x"][1, 2, 4] = value
    with pytest.raises(CalibrationError, match=r"sample 7: the input of 'first' is not finite"):
        calibrate(masked, samples(made))


def test_not_finite_in_padding_is_nobodys_business(masked: Program) -> None:
    made = batches(5)
    made[3]["x"][1, 6, 4] = torch.nan
    assert bool(torch.isfinite(calibrate(masked, samples(made), gradients=False).activations["x"].absmax).all())


def test_no_samples(masked: Program) -> None:
    with pytest.raises(CalibrationError, match="no samples"):
        calibrate(masked, [])


def test_missing_input(masked: Program) -> None:
    with pytest.raises(CalibrationError, match="'attention_mask' is missing"):
        calibrate(masked, [{"x": torch.ones(2, 3, 6)}])


def test_integer_outputs_give_no_gradients_but_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.score(x).argmax(-1)

    program = capture_module(Pick().eval(), (torch.randn(3, 4),))
    with caplog.at_level(logging.WARNING):
        stats = calibrate(program, [{"x": torch.randn(3, 4)}])
    (seen,) = stats.activations.values()
    assert seen.tokens == 3 and seen.grads == {} and "no gradient reaches 1 of 1" in caplog.text


def test_progress_counts_samples(masked: Program) -> None:
    class Count:
        done = 0

        def advance(self, n: int = 1, note: str = "") -> None:
            self.done += n

    counter = Count()
    calibrate(masked, samples(batches(3)), progress=counter)
    assert counter.done == 6
