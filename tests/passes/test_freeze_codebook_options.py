"""`freeze_codebook`: what each option changes, and what it does with codebooks and vectors that are bad."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.calibrate import calibrate
from khtst_compile.capture import capture_module
from khtst_compile.codebooks.frozen import digest
from khtst_compile.contract import run_passes
from khtst_compile.errors import PassError, UsageError
from khtst_compile.passes.freeze_codebook import FreezeCodebook
from khtst_compile.program import Program, call_nodes
from khtst_compile.quant.stiefel import delta_ort, polar
from khtst_compile.recipe import parse, with_options
from khtst_compile.zoo.gsq import StiefelQuantizer

LOOKUP = torch.ops.khtst.codebook_lookup.default


class Nearest(nn.Module):
    """The nearest of given codes: squares of differences, so that equal codes have equal distances."""

    def __init__(self, codes: torch.Tensor) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = ((z.unsqueeze(-2) - self.codes) ** 2).sum(-1).argmin(-1)
        return self.codes[ids], ids


class Stray(nn.Module):
    """A frozen codebook whose codes were changed after it was checked."""

    def __init__(self, off: float, d: int = 16, codes: int = 16) -> None:
        super().__init__()
        self.quantizer = StiefelQuantizer(d, codes).freeze()
        noise = torch.randn(codes, d, generator=torch.Generator().manual_seed(3))
        self.quantizer.codes.add_(off * noise)
        self.quantizer.table.copy_(0.25 * self.quantizer.codes)

    def forward(self, z: torch.Tensor) -> Any:
        return self.quantizer(z)


def drawn(d: int, seed: int = 1, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))


def program_of(model: nn.Module, d: int, batches: list[torch.Tensor] | None = None) -> Program:
    program = capture_module(model.eval(), (drawn(d, 0, 4),))
    given = batches if batches is not None else [drawn(d, i) for i in range(4)]
    return program.with_stats(calibrate(program, [{"z": b} for b in given]))


def frozen(program: Program, **options: Any) -> Program:
    return run_passes(program, [FreezeCodebook(**options)])


def entry(program: Program) -> dict[str, Any]:
    (found,) = program.meta["codebooks"]
    json.dumps(found)
    return dict(found)


def bound(program: Program) -> list[torch.Tensor | None]:
    (node,) = call_nodes(program.graph, LOOKUP)
    return [None if a is None else program.tensors()[a.name] for a in node.args[1:4]]  # type: ignore[union-attr]


def test_lost_orthonormality_is_refused_with_the_figure_and_the_way_out() -> None:
    program = program_of(Stray(1e-3), 16)
    off = delta_ort(program.tensors()["b_khtst_model_quantizer_codes"])
    with pytest.raises(PassError, match=rf"quantizer.*{off:.1e} from the identity; needed: 1e-06.*--retract") as caught:
        frozen(program)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("codes", [16, 40])
def test_retract_projects_in_float64_and_says_how_far(codes: int) -> None:
    model = Stray(1e-3, codes=codes)
    program = program_of(model, 16)
    made = entry(after := frozen(program, retract=True))
    (before,), (now,) = made["delta_ort"]["before"], made["delta_ort"]["after"]
    assert before > 1e-3 and now < 1e-6 and made["orthonormal"] and made["tight_frame"] == (codes > 16)
    wanted = polar(model.quantizer.codes.double())
    exact, bias, table = bound(after)
    assert exact is not None and table is not None
    assert torch.equal(exact[0], wanted.float())
    assert torch.equal(table[0], (0.25 * wanted).float())
    assert (bias is None) == (codes == 16)


def test_within_the_bound_nothing_is_changed() -> None:
    program = program_of(StiefelQuantizer(16, 16), 16)
    assert entry(frozen(program, retract=True))["sha256"] == entry(frozen(program))["sha256"]


def test_codes_that_lost_rank_cannot_be_projected() -> None:
    model = Stray(0.0)
    model.quantizer.codes[3] = model.quantizer.codes[2]
    model.quantizer.table.copy_(0.25 * model.quantizer.codes)
    with pytest.raises(PassError, match="lost rank"):
        frozen(program_of(model, 16), retract=True)


def test_orthonormal_can_be_demanded_of_every_codebook() -> None:
    program = program_of(Nearest(drawn(8, 5, 8)), 8)
    assert entry(frozen(program))["orthonormal"] is False
    with pytest.raises(PassError, match="orthonormal=require asks for it"):
        frozen(program, orthonormal="require")


def test_dead_codes_are_named_and_pruned_with_their_old_ids() -> None:
    codes = drawn(8, 5, 12)
    codes[[2, 7]] += 100
    program = program_of(Nearest(codes), 8)
    plain, made = entry(frozen(program)), entry(after := frozen(program, prune_dead=True))
    dead = plain["dead"][0]
    assert {2, 7} <= set(dead) and plain["pruned"] is None
    kept = [i for i in range(12) if i not in dead]
    assert (
        made["pruned"] == [kept] and made["codes"] == [len(kept)] and made["dead"] == [[]] and len(made["counts"][0]) == len(kept)
    )
    z = drawn(8, 1)
    before, now = program.run({"z": z}), after.run({"z": z})
    assert torch.equal(torch.tensor(kept)[now["output_1"]], before["output_1"])
    assert torch.equal(now["output_0"], before["output_0"]) and now["output_1"].dtype == torch.int64


class Counted(Nearest):
    def forward(self, z: torch.Tensor) -> Any:
        value, ids = super().forward(z)
        return value, nn.functional.one_hot(ids, len(self.codes)).float().mean(0)


def test_ids_that_are_computed_with_are_not_renumbered() -> None:
    codes = drawn(8, 5, 12)
    codes[2] += 100
    program = program_of(Counted(codes), 8)
    after = frozen(program, prune_dead=True)
    assert entry(after)["pruned"] is None
    assert [s["reason"] for s in after.history[-1]["skipped"]] == ["not pruned: its ids are read by aten.one_hot.default"]
    z = drawn(8, 1)
    assert all(torch.equal(a, b) for a, b in zip(program.run({"z": z}).values(), after.run({"z": z}).values(), strict=True))


def test_int8_is_searched_first_where_it_pays() -> None:
    large = program_of(StiefelQuantizer(64, 64), 64)
    small = program_of(StiefelQuantizer(16, 16), 16)
    made = entry(frozen(large))
    assert made["certified"] is True and 0 < made["rescored"] <= 1 and 1 < made["candidates"] <= 4
    assert entry(frozen(small))["certified"] is False
    assert entry(frozen(large, certified=False))["certified"] is False
    after = frozen(small, certified=True)
    assert entry(after)["certified"] is True and next(call_nodes(after.graph, LOOKUP)).args[-1] is True


def test_kept_codebooks_are_left_alone_by_name() -> None:
    program = program_of(Stray(0.0), 16)
    after = frozen(program, keep="quant*")
    assert after.history[-1]["changed"] == 0 and after.history[-1]["skipped"] == [
        {"site": "quantizer", "reason": "kept as asked"}
    ]
    with pytest.raises(PassError, match="keep=encoder fits no codebook; there are quantizer"):
        frozen(program, keep="encoder")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e19])
def test_rows_without_a_code_are_counted_or_refused(value: float) -> None:
    bad = drawn(8, 2)
    bad[[3, 9]] = value
    program = program_of(Nearest(drawn(8, 5, 12)), 8, [drawn(8, 1), bad])
    after = frozen(program)
    assert entry(after)["lost"] == 2 and entry(after)["vectors"] == 128 and sum(entry(after)["counts"][0]) == 126
    values, ids = after.run({"z": bad}).values()
    assert bool(values[[3, 9]].isnan().all()) and bool((ids[[3, 9]] == 0).all()) and int(values.isnan().sum()) == 16
    with pytest.raises(PassError, match=r"2 of 128 calibration vectors have no code"):
        frozen(program, strict=True)


@pytest.mark.parametrize(("d", "codes"), [(8, 1), (1, 6), (1, 1), (3, 40), (16, 16)])
def test_odd_sizes(d: int, codes: int) -> None:
    program = program_of(Nearest(drawn(d, 5, codes)), d)
    after = frozen(program)
    assert entry(after)["codes"] == [codes] and entry(after)["features"] == d
    z = drawn(d, 9, 200)
    assert all(torch.equal(a, b) for a, b in zip(program.run({"z": z}).values(), after.run({"z": z}).values(), strict=True))


def test_an_empty_batch_gives_empty_results() -> None:
    after = frozen(program_of(Nearest(drawn(8, 5, 12)), 8))
    values, ids = after.run({"z": torch.empty(0, 8)}).values()
    assert values.shape == (0, 8) and ids.shape == (0,) and ids.dtype == torch.int64


def test_of_equal_codes_the_first_wins() -> None:
    codes = drawn(8, 5, 6).repeat(2, 1)
    after = frozen(program := program_of(Nearest(codes), 8))
    ids = after.run({"z": drawn(8, 9)})["output_1"]
    assert int(ids.max()) < 6 and torch.equal(ids, program.run({"z": drawn(8, 9)})["output_1"])
    assert entry(after)["dead"][0] == [6, 7, 8, 9, 10, 11]


def test_entries_that_are_not_finite_are_refused_by_place() -> None:
    codes = drawn(8, 5, 12)
    codes[4, 2] = float("nan")
    program = capture_module(Nearest(codes), (drawn(8, 0, 4),))
    with pytest.raises(PassError, match=r"its codes hold nan in row 4, feature 2.*repair the checkpoint"):
        frozen(program)


def test_a_codebook_of_zeros_was_never_initialized() -> None:
    with pytest.raises(PassError, match="never initialized"):
        frozen(capture_module(Nearest(torch.zeros(12, 8)), (drawn(8, 0, 4),)))


def test_without_calibration_nothing_is_proved() -> None:
    with pytest.raises(PassError, match="no calibration vector has reached it"):
        frozen(capture_module(Nearest(drawn(8, 5, 12)), (drawn(8, 0, 4),)))


def test_padding_is_not_counted() -> None:
    class Masked(Nearest):
        def forward(self, z: torch.Tensor, attention_mask: torch.Tensor) -> Any:  # type: ignore[override]
            value, ids = super().forward(z)
            return value * attention_mask[..., None], ids

    program = capture_module(Masked(drawn(8, 5, 12)), (drawn(8, 0, 12).view(3, 4, 8), torch.ones(3, 4)))
    z, mask = drawn(8, 1, 20).view(5, 4, 8), torch.ones(5, 4)
    mask[:, 3] = 0
    z[:, 3] = float("nan")
    program = program.with_stats(calibrate(program, [{"z": z, "attention_mask": mask}]))
    made = entry(frozen(program, strict=True))
    assert made["vectors"] == 15 and made["lost"] == 0


def test_the_digest_is_that_of_the_tables() -> None:
    first, second = (frozen(program_of(Nearest(drawn(8, seed, 12)), 8)) for seed in (5, 6))
    assert entry(first)["sha256"] != entry(second)["sha256"] and len(entry(first)["sha256"]) == 64
    assert entry(first)["sha256"] == digest(bound(first))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"certified": "maybe"}, "known: auto, true, false"), ({"orthonormal": "yes"}, "known: auto, require")],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FreezeCodebook(**options).check_options()


def test_every_option_is_written_in_recipes() -> None:
    text = "freeze_codebook{retract=true,prune_dead=true,certified=false,orthonormal=require,strict=true,keep=a.*;b}"
    (step,) = parse(text)
    assert step == FreezeCodebook(True, True, False, "require", True, "a.*;b")
    assert {f.name for f in dataclasses.fields(FreezeCodebook)} == {o.split("=")[0] for o in text[16:-1].split(",")}
    assert with_options([FreezeCodebook()], "freeze_codebook", retract=True, strict=False) == [FreezeCodebook(retract=True)]
    with pytest.raises(UsageError, match=r"--prune-dead: the recipe has no step 'freeze_codebook'"):
        with_options(parse("w8a8"), "freeze_codebook", prune_dead=True)


@pytest.mark.parametrize(
    ("make", "options", "check"),
    [
        ("vq_model", {}, lambda e: e["source"] == "VectorQuantize" and e["pruned"] is None),
        ("vq_model", {"prune_dead": True}, lambda e: len(e["pruned"][0]) == e["codes"][0] < 32),
        ("stray_model", {"retract": True}, lambda e: e["delta_ort"]["after"][0] < 1e-6 < e["delta_ort"]["before"][0]),
    ],
)
def test_quantize_writes_the_description(
    make: str, options: dict[str, Any], check: Callable[[dict[str, Any]], bool], tmp_path: Path
) -> None:
    made = kc.quantize(
        f"tests.quantizers:{make}", tmp_path / "q", recipe="freeze_codebook | w8a8", random=True, limit=4, **options
    )
    (found,) = made.manifest["meta"]["codebooks"]
    assert check(found) and found["site"] == "quantizer"
    step = made.manifest["passes"][0]
    assert step["pass"] == "freeze_codebook" and all(step["options"][k] for k in options)
    assert all(f"{k}=true" in made.manifest["recipe"] for k in options)
    assert kc.api.load_program(kc.artifact.read(tmp_path / "q")).meta["codebooks"] == [found]


def test_quantize_refuses_a_stray_codebook_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="--retract"):
        kc.quantize("tests.quantizers:stray_model", tmp_path / "q", random=True, limit=4)
    assert not (tmp_path / "q").exists()
