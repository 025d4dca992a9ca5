"""`smooth`: the program stays equivalent, folds only where that is safe, and says what it did."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from khtst_compile.capture.factory import capture_module
from khtst_compile.contract import run_passes
from khtst_compile.errors import PassError, UsageError
from khtst_compile.passes.rotate import Rotate
from khtst_compile.passes.smooth import Smooth
from khtst_compile.passes.w8a8 import W8A8
from khtst_compile.program import call_nodes
from khtst_compile.quant.trust import search

MUL = torch.ops.aten.mul.Tensor
# Equivalence: weights and activations are scaled and unscaled in float32, so outputs move by a few rounding steps of 6e-8 times the
# outlier's size, summed over 32 features.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def smoothed(program: Any, **options: Any) -> Any:
    return run_passes(program, [Smooth(**options)])


def history(program: Any) -> dict[str, Any]:
    return program.history[-1]


def test_golden(attention: Any, golden: Any) -> None:
    golden("smooth.txt", str(smoothed(attention, alpha=0.5).graph) + "\n")


@pytest.mark.parametrize("alpha", ["trust", 0.0, 0.5, 0.9])
def test_outputs_stay(attention: Any, evaluate: Any, alpha: Any) -> None:
    torch.testing.assert_close(evaluate(smoothed(attention, alpha=alpha, check=False)), evaluate(attention), **CLOSE)


def test_folds_into_a_norm_that_only_the_group_reads(attention: Any) -> None:
    after = smoothed(attention, alpha=0.5)
    details = history(after)["details"]
    assert details["query"]["folded"] == "layer_norm" and details["query"]["layers"] == ["query", "key", "value"]
    # out reads a sum and head a relu: neither can take a factor.
    assert details["out"]["folded"] is None and details["head"]["folded"] is None
    assert len(list(call_nodes(after.graph, MUL))) - len(list(call_nodes(attention.graph, MUL))) == 2
    assert history(after)["changed"] == 5


def test_a_batch_traced_at_the_number_of_features_still_varies() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.fc = nn.Parameter(torch.rand(64) + 0.5), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x * self.gain)

    after = run_passes(capture_module(Scaled(), (torch.randn(64, 64),)), [W8A8()])
    assert next(q.args[1] for q in call_nodes(after.graph, torch.ops.khtst.quantize_rows.default)) is not None  # the gain moved
    assert str(next(n for n in after.graph.nodes if n.name == "x").meta["val"].shape[0]) != "64"


def test_does_not_fold_where_a_residual_reads_too(residual: Any, evaluate: Any) -> None:
    after = smoothed(residual, alpha=0.5)
    assert history(after)["details"]["fc"]["folded"] is None
    torch.testing.assert_close(evaluate(after), evaluate(residual), **CLOSE)


def test_does_not_fold_where_a_reader_is_kept(attention: Any, evaluate: Any) -> None:
    after = smoothed(attention, alpha=0.5, keep_fp32="key;he*")
    assert history(after)["details"]["query"]["folded"] is None
    assert {s["site"] for s in history(after)["skipped"]} == {"key", "head"}
    torch.testing.assert_close(evaluate(after), evaluate(attention), **CLOSE)


class Written(nn.Module):
    """RMSNorm written out, as Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.fc = nn.Parameter(torch.ones(32)), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


class Viewed(nn.Module):
    """A GPT-2 Conv1D: addmm on a flattened LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w, self.b = nn.LayerNorm(32), nn.Parameter(torch.ones(32, 48)), nn.Parameter(torch.ones(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return torch.addmm(self.b, h.view(-1, h.size(-1)), self.w).view(*h.shape[:-1], 48)


@pytest.mark.parametrize(
    ("module", "producer", "muls"),
    [
        (lambda: nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 8)), "linear", 1),
        (lambda: nn.Sequential(nn.Linear(32, 24, bias=False), nn.Dropout(0.1), nn.Linear(24, 8)), "linear", 1),
        (lambda: nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 8)), "rms_norm", 0),
        (lambda: nn.Sequential(nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 8)), "layer_norm", 0),
        (Written, "mul_1", 2),
        (Viewed, "layer_norm", 0),
    ],
)
def test_folds_into_every_kind_of_producer(make: Any, evaluate: Any, module: Any, producer: str, muls: int) -> None:
    program = make(module())
    after = smoothed(program, alpha=0.5)
    assert producer in [d["folded"] for d in history(after)["details"].values()]
    assert len(list(call_nodes(after.graph, MUL))) == muls
    torch.testing.assert_close(evaluate(after), evaluate(program), **CLOSE)


class ViewedResidual(Viewed):
    """The LayerNorm under the view is read once more; the view itself is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y = torch.addmm(self.b, h.view(-1, h.size(-1)), self.w).view(*h.shape[:-1], 48)
        return y[..., :32] + h


def test_readers_between_the_producer_and_the_activation_count(make: Any, evaluate: Any) -> None:
    program = make(ViewedResidual())
    after = smoothed(program, alpha=0.5)
    assert [d["folded"] for d in history(after)["details"].values()] == [None]
    torch.testing.assert_close(evaluate(after), evaluate(program), **CLOSE)


class Doubled(nn.Module):
    """The activation is an output of the model as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(x)
        return h, self.fc(h)


def test_an_output_is_a_reader(make: Any, evaluate: Any) -> None:
    program = make(Doubled())
    after = smoothed(program, alpha=0.5)
    assert history(after)["details"]["fc"]["folded"] is None
    torch.testing.assert_close(evaluate(after), evaluate(program), **CLOSE)


def test_statistics_follow_what_was_folded(attention: Any) -> None:
    after = smoothed(attention, alpha=0.5)
    name = next(n.name for n in call_nodes(attention.graph, torch.ops.aten.layer_norm.default))
    seen = [program.stats.activations[name].absmax for program in (attention, after)]
    node = next(iter(call_nodes(after.graph, torch.ops.aten.layer_norm.default)))
    old = next(iter(call_nodes(attention.graph, torch.ops.aten.layer_norm.default)))
    ratio = after.tensors()[node.args[2].name] / attention.tensors()[old.args[2].name]
    torch.testing.assert_close(seen[1] / seen[0], ratio, rtol=1e-5, atol=0)
    assert seen[0] is attention.stats.activations[name].absmax, "the statistics of the old program were written into"


def test_gradients_follow_what_was_folded_into_a_linear_layer(make: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 8)))
    after = smoothed(program, alpha=0.5)
    (node, *_), (old, *_) = (list(call_nodes(p.graph, torch.ops.aten.linear.default)) for p in (after, program))
    inv_s = after.tensors()[node.args[2].name] / program.tensors()[old.args[2].name]  # the biases
    assert not torch.allclose(inv_s, torch.ones(24))
    for which in ("grads", "held_grads"):
        now, then = (
            next(g[old.name] for a in p.stats.activations.values() if old.name in (g := getattr(a, which)))
            for p in (after, program)
        )
        torch.testing.assert_close(now * inv_s, then, rtol=1e-5, atol=1e-6)


def test_the_given_program_is_untouched(attention: Any) -> None:
    text, weights = str(attention.graph), {k: v.clone() for k, v in attention.tensors().items()}
    smoothed(attention, alpha=0.5)
    assert str(attention.graph) == text
    assert all(torch.equal(v, attention.tensors()[k]) for k, v in weights.items())


def test_zero_channels_are_reported_and_left(make: Any, evaluate: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.fc = nn.Buffer((torch.arange(32) % 4 != 0).float()), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.relu(x * self.mask))

    program = make(Masked())
    after = smoothed(program, alpha=0.5)
    assert history(after)["details"]["fc"]["zero_channels"] == 8
    factor = next(v for k, v in after.tensors().items() if k.endswith("inv_smooth"))
    assert factor[::4].tolist() == [1.0] * 8
    torch.testing.assert_close(evaluate(after), evaluate(program), **CLOSE)


def test_the_search_counts_its_evaluations_and_reports_errors(attention: Any) -> None:
    details = history(smoothed(attention))["details"]
    for site in ("query", "out", "head"):
        facts = details[site]
        assert 2 <= facts["evals"] <= 15
        assert set(facts["error_db"]) == {"before", "after", "held"}
        assert facts["weighed"] == "output"
    model = details["(model)"]
    best = min(model["output_error_db"], key=lambda k: model["output_error_db"][k])
    assert model["output_error_db"][model["kept"]] == model["output_error_db"][best]


def test_a_group_better_off_without_is_left_alone_by_name(make: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 8)))
    flat = dataclasses.replace(next(iter(program.stats.activations.values())))
    # The ranges are of other data than the tokens: factors from them make things worse.
    flat.rows, flat.held_rows = (torch.randn(64, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    flat.absmax = 10 ** torch.linspace(-4, 4, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(3))]
    flat.grads, flat.held_grads = {}, {}
    stats = dataclasses.replace(program.stats, activations=dict.fromkeys(program.stats.activations, flat), held_samples=[])
    after = smoothed(program.with_stats(stats), max_evals=4)
    assert history(after)["changed"] == 0
    assert "not smoothed" in history(after)["skipped"][0]["reason"]
    assert next(iter(history(after)["details"].values()))["alpha"] == "none"


def test_without_gradients_a_layer_is_weighed_by_its_own_error(attention: Any) -> None:
    bare = {k: dataclasses.replace(v, grads={}, held_grads={}) for k, v in attention.stats.activations.items()}
    after = smoothed(attention.with_stats(dataclasses.replace(attention.stats, activations=bare)), check=False)
    assert {d["weighed"] for d in history(after)["details"].values()} == {"layer"}


def test_a_search_that_loses_on_held_out_samples_is_overruled(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def astray(evaluate: Any, options: Any) -> Any:
        result = search(evaluate, options)
        worst = max((c for c in result.tried if c.alpha is not None), key=lambda c: c.held)
        return dataclasses.replace(result, best=worst)

    monkeypatch.setattr("khtst_compile.passes.smooth.search", astray)
    details = history(smoothed(attention))["details"]
    model = details.pop("(model)")
    assert model["kept"] in ("half", "none")
    assert model["output_error_db"][model["kept"]] == min(model["output_error_db"].values())
    assert {d["alpha"] for d in details.values()} == {{"half": 0.5, "none": "none"}[model["kept"]]}


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": 0.3},
        {"lr": 0.01},
        {"e0": 1e-6},
        {"tau": 0.3},
        {"entropy": 3.0},
        {"balance": "monotone"},
        {"max_evals": 2},
        {"weigh": "layer"},
        {"block": 32},
        {"block": 32, "points": 2},
    ],
)
def test_every_option_of_the_search_has_an_effect(attention: Any, change: dict[str, Any]) -> None:
    usual, changed = (history(smoothed(attention, check=False, **o))["details"] for o in ({}, change))
    assert usual != changed


def test_fold_and_check_have_an_effect(attention: Any) -> None:
    kept = smoothed(attention, alpha=0.5, fold=False)
    assert history(kept)["details"]["query"]["folded"] is None
    assert "(model)" not in history(smoothed(attention, check=False))["details"]


def test_smoothing_helps_what_follows(attention: Any, evaluate: Any) -> None:
    reference = evaluate(attention)
    errors = [(evaluate(run_passes(attention, steps)) - reference).norm() for steps in ([W8A8()], [Smooth(), W8A8()])]
    assert errors[1] < 0.7 * errors[0]  # two outlier channels, 30 and 8 times the rest; measured 0.4


def test_refuses_without_calibration(make: Any) -> None:
    with pytest.raises(PassError, match=r"pass 'smooth'.*never calibrated"):
        smoothed(make(nn.Sequential(nn.Linear(32, 8)), calibrated=False))


def test_refuses_a_program_without_linear_layers(attention: Any) -> None:
    with pytest.raises(PassError, match="no linear layer is in the graph"):
        smoothed(run_passes(attention, [W8A8()]))


def test_refuses_weights_that_are_not_finite(make: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 8)))
    next(v for v in program.tensors().values() if v.dim() == 2)[0, 0] = float("nan")
    with pytest.raises(PassError, match="'0': its weight has NaN"):
        smoothed(program)


@pytest.mark.parametrize(
    "bad", [{"alpha": "half"}, {"alpha": 1.5}, {"balance": "flat"}, {"weigh": "input"}, {"max_evals": 1}, {"lr": 0.0}]
)
def test_refuses_options_that_mean_nothing(attention: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        smoothed(attention, **bad)


def test_chains_with_rotation(attention: Any, evaluate: Any) -> None:
    after = run_passes(attention, [Smooth(alpha=0.5), Rotate(block=32, check=False)])
    torch.testing.assert_close(evaluate(after), evaluate(attention), **CLOSE)
