"""`freeze_codebook`: ids are the model's own, values too to one unit in the last place, whatever way the codebook was written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vector_quantize_pytorch import SimVQ

from khtst_compile.calibrate import Samples, calibrate
from khtst_compile.capture import capture, capture_module
from khtst_compile.codebooks.find import find_codebooks
from khtst_compile.codebooks.found import Steps, Vectors
from khtst_compile.codebooks.watch import CodebookStats, Watch, ulps
from khtst_compile.contract import run_passes
from khtst_compile.errors import PassError
from khtst_compile.passes.freeze_codebook import FreezeCodebook
from khtst_compile.program import Program, call_nodes
from khtst_compile.recipe import parse
from tests.quantizers import LOOKUPS, STEPS, VECTORS, Residual, model, samples

VECTOR_LOOKUP, STEP_LOOKUP = torch.ops.khtst.codebook_lookup.default, torch.ops.khtst.step_lookup.default
ALONE = {"rounded", "signs"}  # take and give six features; the rest sixteen


def captured(quantizer: nn.Module, d: int = 16) -> Program:
    return capture_module(model(quantizer, d), (samples(0, 3),))


def calibrated(program: Program, batches: int = 6) -> Program:
    def each() -> Iterator[dict[str, torch.Tensor]]:
        for i in range(batches):
            yield {"x": samples(10 + i)}

    return program.with_stats(calibrate(program, Samples(64 * batches, "noise", False, each)))


def frozen(program: Program, **options: Any) -> Program:
    return run_passes(program, [FreezeCodebook(**options)])


def compare(before: Program, after: Program, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with torch.no_grad():
        return list(before.run({"x": x}).values()), list(after.run({"x": x}).values())


@pytest.mark.parametrize("kind", [*VECTORS, *STEPS])
def test_ids_and_values_are_the_models_own(kind: str) -> None:
    torch.manual_seed(0)
    made = {**VECTORS, **STEPS}[kind]()
    program = calibrated(captured(made, 6 if kind in ALONE else 16))
    after = frozen(program)
    entries = after.meta["codebooks"]
    nodes = [n.name for n in call_nodes(after.graph, VECTOR_LOOKUP, STEP_LOOKUP)]
    assert [e["node"] for e in entries] == nodes and len(nodes) == LOOKUPS.get(kind, 1)
    assert after.history[-1]["changed"] == len(nodes) and after.history[-1]["skipped"] == []
    assert {e["kind"] for e in entries} == {"steps" if kind in STEPS else "vectors"}
    left = {str(n.target) for n in after.graph.nodes if n.op == "call_function"}
    assert not left & {
        "aten.argmax.default",
        "aten.argmin.default",
        "aten.einsum.default",
        "aten.one_hot.default",
        "aten.round.default",
    }
    expected, found = compare(program, after, samples(99, 256))
    for spec, now, want, have in zip(program.outputs, after.outputs, expected, found, strict=True):
        assert spec == now and have.dtype == want.dtype and have.shape == want.shape
    assert torch.equal(found[1], expected[1])
    if kind == "classic":
        # The model adds and takes off its vector; what is left is the value but for that sum's rounding.
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=8 * 2.0**-23)
    else:
        assert float(ulps(found[0], expected[0]).max()) <= 1
    for entry in entries:
        assert entry["differ"] == 0 and entry["near_ties"] == 0 and entry["value_ulp"] <= 1
        assert entry["vectors"] == 6 * 64 * 10 * (2 if kind in ("shared heads", "fsq groups") else 1) and entry["lost"] == 0
        assert [sum(c) for c in entry["counts"]] == [entry["vectors"]] * entry["levels"]


def test_the_whole_default_recipe_leaves_the_lookup_alone() -> None:
    torch.manual_seed(0)
    program = calibrated(captured(VECTORS["stiefel"]()))
    after = run_passes(program, parse("w8a8-rotated"))
    assert len(list(call_nodes(after.graph, VECTOR_LOOKUP))) == 1
    assert after.history[-1]["changed"] == 1  # the decoder; the encoder has too few features
    assert any("min_features" in s["reason"] for s in after.history[-1]["skipped"])
    assert not any("calibration saw nothing" in s["reason"] for step in after.history for s in step["skipped"])


def test_a_program_without_codebooks_stays_as_it_is() -> None:
    program = capture_module(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), (samples(0, 3),))
    after = frozen(program)
    assert after.graph is program.graph and after.history[-1]["changed"] == 0 and "codebooks" not in after.meta


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(x)
        return scores, scores.argmax(-1)


def test_a_classifiers_decision_is_no_codebook() -> None:
    after = frozen(capture_module(Classifier(), (samples(0, 3),)))
    assert after.history[-1]["changed"] == 0 and after.history[-1]["skipped"] == []


def test_residual_levels_are_one_lookup_and_smaller_ones_are_filled_up() -> None:
    torch.manual_seed(0)
    after = frozen(calibrated(captured(Residual())))
    (entry,) = after.meta["codebooks"]
    assert entry["levels"] == 2 and entry["codes"] == [20, 12] and entry["ids"] == {"output": "output_1"}
    (node,) = call_nodes(after.graph, VECTOR_LOOKUP)
    codes, bias = (after.tensors()[node.args[i].name] for i in (1, 2))  # type: ignore[union-attr]
    assert codes.shape == (2, 20, 16) and bool((bias[1, 12:] == -torch.inf).all()) and bool(bias[1, :12].isfinite().all())


class WithValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantizer = Residual(values=True, d=12)

    def forward(self, x: torch.Tensor) -> Any:
        return self.quantizer(x)


def test_levels_whose_values_are_read_stay_lookups_of_their_own() -> None:
    torch.manual_seed(0)
    program = calibrated(capture_module(WithValues(), (samples(0, 3),)))
    after = frozen(program)
    assert len(after.meta["codebooks"]) == 2
    assert [s["reason"] for s in after.history[-1]["skipped"]] == [
        "its 2 levels stay lookups of their own: 'index', which lies between them, is read elsewhere"
    ]
    expected, found = compare(program, after, samples(99))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Lengths(nn.Module):
    """Weighted sums of decisions that are no ids."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ((x > 0).long() * 2 ** torch.arange(12)).sum(-1), ((x > 0).long() * torch.arange(1, 13)).sum(-1)


def test_sums_of_decisions_without_values_are_no_codebook() -> None:
    after = frozen(capture_module(Lengths(), (samples(0, 3),)))
    assert after.history[-1]["changed"] == 0 and after.history[-1]["skipped"] == []


class ValuesAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantizer = STEPS["fsq"]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.quantizer(x)[0]
        return values


def test_a_quantizer_whose_ids_nobody_asks_for_is_named() -> None:
    after = frozen(capture_module(ValuesAlone().eval(), (torch.randn(3, 10, 16),)))
    assert after.history[-1]["skipped"] == [
        {"site": "quantizer", "reason": "it rounds, and no ids are computed from that; return its ids to have it frozen"}
    ]


@pytest.mark.parametrize("kind", ["fsq", "lfq", "stiefel residual", "differences"])
def test_an_exported_file_gives_the_same_lookup(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = model({**VECTORS, **STEPS}[kind]())
    batch = torch.export.Dim("batch", min=1, max=512)
    with torch.no_grad():
        exported = torch.export.export(module, (samples(0, 3),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "model.pt2")
    entries = [
        frozen(calibrated(p)).meta["codebooks"]
        for p in (capture(tmp_path / "model.pt2"), capture_module(module, (samples(0, 3),)))
    ]
    (found,), (wanted,) = entries
    assert found["sha256"] == wanted["sha256"] and found["site"] == "quantizer" and found["source"] == wanted["source"]


class Scaled(nn.Module):
    """Each code's score has a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.factors = nn.Parameter(torch.randn(20, 16)), nn.Parameter(torch.rand(20) + 0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = ((x @ self.codes.T) * self.factors).argmax(-1)
        return self.codes[ids], ids


class AcrossAxis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(20, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = (self.codes @ x.transpose(1, 2)).argmax(1)
        return self.codes[ids], ids


class Flat(nn.Module):
    """Scores through a function that is flat somewhere: ties there are the model's own, and the first code wins."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.codes, self.function = nn.Parameter(torch.randn(20, 16)), function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.function(x @ self.codes.T).argmax(-1)
        return self.codes[ids], ids


class Parts(nn.Module):
    """Four codebooks along the axis before the last, written without a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, 8, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = (x.unflatten(-1, (4, 4)).unsqueeze(-2) - self.codes).square().sum(-1).argmin(-1)
        return self.codes[torch.arange(4), ids].flatten(-2), ids


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (Scaled, "come from aten.mul.Tensor"),
        (AcrossAxis, "along axis 1"),
        (Parts, "come from aten.sum.dim_IntList"),
        (lambda: Flat(torch.sigmoid), "go through aten.sigmoid.default"),
        (lambda: Flat(torch.exp), "go through aten.exp.default"),
        (lambda: Flat(lambda s: s.clamp(-1, 1)), "go through aten.clamp.default"),
        (lambda: Flat(lambda s: -(-s).clamp(min=0)), "go through a lower bound"),
    ],
)
def test_what_is_not_understood_is_named_with_its_reason(quantizer: Callable[[], nn.Module], reason: str) -> None:
    program = calibrated(captured(quantizer()))
    after = frozen(program)
    assert after.history[-1]["changed"] == 0
    (skipped,) = after.history[-1]["skipped"]
    assert skipped["site"] == "quantizer" and reason in skipped["reason"]
    assert all(torch.equal(a, b) for a, b in zip(*compare(program, after, samples(99)), strict=True))


def judged(book: Vectors | Steps, program: Program) -> CodebookStats:
    """What calibration would have seen of `book` in `program`."""
    kept: dict[str, torch.Tensor] = {}
    watch = Watch(book, 64)
    program.run({"x": samples(5)}, lambda n, v: kept.__setitem__(n.name, v) or v if n.name in watch.needs() else v)
    rows = kept[book.z].numel() // kept[book.z].shape[-1]
    watch.see(kept, torch.ones(rows, dtype=torch.bool), torch.rand(rows))
    return watch.result()


@pytest.mark.parametrize("kind", ["stiefel", "euclidean", "stiefel frame", "residual", "softmax"])
def test_planted_faults_are_found(kind: str) -> None:
    torch.manual_seed(0)
    program = captured(VECTORS[kind]())
    (book,) = find_codebooks(program).codebooks
    assert isinstance(book, Vectors)
    good = judged(book, program)
    assert good.differ == 0 and good.near_ties == 0 and good.value_ulp == 0
    level, used = book.levels[-1], int(good.counts[-1].argmax())

    wrong_row = level.table.clone()
    wrong_row[used, 3] = torch.nextafter(torch.nextafter(wrong_row[used, 3], torch.tensor(9.0)), torch.tensor(9.0))
    seen = judged(replace(book, levels=(*book.levels[:-1], replace(level, table=wrong_row))), program)
    assert seen.value_ulp > 1

    bias = torch.zeros(len(level.codes)) if level.bias is None else level.bias
    shifted = bias.clone()
    shifted[used] -= 0.02 * float(level.codes.norm(dim=-1).mean())
    seen = judged(replace(book, levels=(*book.levels[:-1], replace(level, bias=shifted))), program)
    assert seen.differ > 0 and "the model chooses" in seen.example

    swapped = level.codes.clone()
    swapped[[0, used]] = swapped[[used, 0]] if used else swapped[[1, 0]]
    assert judged(replace(book, levels=(*book.levels[:-1], replace(level, codes=swapped))), program).differ > 0


def test_planted_faults_in_steps_are_found() -> None:
    torch.manual_seed(0)
    program = captured(STEPS["fsq"]())
    (book,) = find_codebooks(program).codebooks
    assert isinstance(book, Steps)
    assert judged(book, program).differ == 0
    moved = book.thresholds.clone()
    moved[1, 2] += 0.05
    assert judged(replace(book, thresholds=moved), program).differ > 0
    wrong = book.steps.clone()
    wrong[0] += 1e-3
    assert judged(replace(book, steps=wrong), program).value_ulp > 1


def test_thresholds_are_the_smallest_floats_of_their_steps() -> None:
    book = find_codebooks(captured(STEPS["signs"](), 6)).codebooks[0]
    assert isinstance(book, Steps)
    assert torch.equal(book.thresholds, torch.full((6, 1), 0.25))
    lfq = find_codebooks(captured(STEPS["lfq"]())).codebooks[0]
    assert isinstance(lfq, Steps)
    assert torch.equal(lfq.thresholds, torch.full((8, 1), 2.0**-149))  # x > 0: the smallest positive number


def test_a_difference_stops_the_pass() -> None:
    program = calibrated(captured(VECTORS["euclidean"]()))
    assert program.stats is not None
    seen = program.stats.codebooks["quantizer"]
    broken = replace(program.stats, codebooks={"quantizer": replace(seen, differ=3, example="vector 7, level 0: ...")})
    with pytest.raises(PassError, match=r"quantizer.*3 of 3840 calibration vectors.*vector 7"):
        frozen(program.with_stats(broken))
    off = replace(program.stats, codebooks={"quantizer": replace(seen, value_ulp=2.0)})
    with pytest.raises(PassError, match=r"2 units in the last place.*needed: 1"):
        frozen(program.with_stats(off))


def test_ties_of_float32_are_counted_and_let_through() -> None:
    """Pairs of codes a rounding apart: whose score is larger is for the order of additions to say."""
    torch.manual_seed(0)
    quantizer = VECTORS["distances"]()
    with torch.no_grad():
        codes = quantizer.codes
        assert isinstance(codes, torch.Tensor)
        codes[16:] = codes[:16] * (1 + 2.0**-23 * torch.randint(-1, 2, (16, 16)))
    program = calibrated(captured(quantizer))
    assert program.stats is not None
    seen = program.stats.codebooks["quantizer"]
    assert seen.differ == 0 and seen.near_ties > 0
    assert frozen(program).meta["codebooks"][0]["near_ties"] == seen.near_ties


def test_the_golden_graph(golden: Any) -> None:
    torch.manual_seed(0)
    golden("freeze_codebook.txt", str(frozen(calibrated(captured(VECTORS["residual"]()))).graph) + "\n")


def test_straight_through_forms_hand_gradients_on_during_calibration() -> None:
    """Else every error before a codebook would count for nothing."""
    torch.manual_seed(0)
    program = calibrated(captured(VECTORS["classic"]()))
    assert program.stats is not None
    encoder, *_, decoder = program.stats.activations.values()
    ((_, before),), ((_, after),) = encoder.grads.items(), decoder.grads.items()
    assert before.shape[1] == 16 and after.shape[1] == 5
    weight = next(t for n, t in program.tensors().items() if n.endswith("decoder_weight"))
    assert bool(before.norm(dim=-1).gt(0).all()) and before.norm() <= after.norm() * torch.linalg.matrix_norm(weight, 2) * (
        1 + 1e-5
    )


def test_a_codebook_has_to_be_frozen_before_it_is_changed() -> None:
    torch.manual_seed(0)
    program = calibrated(captured(VECTORS["stiefel"]()))
    with pytest.raises(PassError, match="first step of the recipe"):
        run_passes(program, parse("smooth{alpha=0.5,check=false} | freeze_codebook"))


def test_an_infinite_feature_takes_its_last_step_where_others_have_more() -> None:
    """Thresholds of a feature with fewer steps are filled up; what fills them up is no threshold of infinity either."""
    torch.manual_seed(0)
    after = frozen(calibrated(captured(STEPS["fsq"]())))
    bound = after.tensors()
    (node,) = call_nodes(after.graph, STEP_LOOKUP)
    tables = [bound[a.name] for a in node.all_input_nodes[1:]]
    values, ids = torch.ops.khtst.step_lookup(torch.tensor([[torch.inf] * 4, [-torch.inf] * 4]), *tables)
    assert ids.tolist() == [8 * 5 * 5 * 5 - 1, 0] and bool(values.isfinite().all())


def test_a_codebook_whose_table_is_indexed_out_of_order_gives_its_ids() -> None:
    (book,) = find_codebooks(captured(SimVQ(dim=16, codebook_size=32))).codebooks
    assert book.source == "SimVQ" and book.site == "quantizer" and book.ids == {"output": "output_1"}


class Convolutions(nn.Module):
    """An image model without a linear layer: (batch, 1, 8, 8) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 16, 2, 2), nn.ConvTranspose2d(16, 1, 2, 2)
        self.codes = nn.Embedding(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.down(x).permute(0, 2, 3, 1)
        ids = torch.cdist(z.flatten(0, 2), self.codes.weight).argmin(-1)
        return self.up(self.codes(ids).reshape(z.shape).permute(0, 3, 1, 2))


def test_a_model_with_no_linear_layer_goes_through_the_default_recipe() -> None:
    torch.manual_seed(0)
    program = capture_module(Convolutions(), (torch.randn(4, 1, 8, 8),))
    batches = [{"x": torch.randn(8, 1, 8, 8)} for _ in range(4)]
    after = run_passes(program.with_stats(calibrate(program, batches)), parse("w8a8-rotated"))
    assert [e["changed"] for e in after.history] == [1, 0, 0, 0]
    before, frozen_ = compare(program, after, torch.randn(5, 1, 8, 8))
    torch.testing.assert_close(frozen_[0], before[0], rtol=1e-6, atol=1e-6)  # another order of sums behind equal ids
    with pytest.raises(PassError, match="no linear layer"):
        run_passes(program.with_stats(calibrate(program, batches)), parse("smooth | w8a8"))
