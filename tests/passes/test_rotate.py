"""`rotate`: the program stays equivalent, and what does not fit is left alone by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from khtst_compile.contract import run_passes
from khtst_compile.errors import PassError, UsageError
from khtst_compile.passes.rotate import Rotate
from khtst_compile.passes.w8a8 import W8A8
from khtst_compile.program import call_nodes

ROTATE = torch.ops.khtst.rotate.default
# The butterflies and the folded weight add in another order: float32 rounding of sums of up to 128 outlier-sized terms.
CLOSE = {"rtol": 1e-5, "atol": 1e-4}


def rotated(program: Any, **options: Any) -> Any:
    return run_passes(program, [Rotate(**options)])


def forms(program: Any) -> list[tuple[int, int]]:
    return [(n.args[1], n.args[2]) for n in call_nodes(program.graph, ROTATE)]


def test_golden(attention: Any, golden: Any) -> None:
    golden("rotate.txt", str(rotated(attention, block=32, check=False).graph) + "\n")


@pytest.mark.parametrize(("block", "points"), [(128, None), (32, None), (32, 2), (16, 16)])
def test_outputs_stay(attention: Any, evaluate: Any, block: int, points: int | None) -> None:
    torch.testing.assert_close(
        evaluate(rotated(attention, block=block, points=points, check=False)), evaluate(attention), **CLOSE
    )


def test_one_rotation_for_layers_that_share_an_activation(attention: Any) -> None:
    after = rotated(attention, block=32, check=False)
    assert forms(after) == [(32, 32)] * 3  # query+key+value, out, head
    assert after.history[-1]["changed"] == 5
    assert after.history[-1]["details"]["query"]["layers"] == ["query", "key", "value"]


def test_the_block_shrinks_to_what_divides_and_keeps_its_form(make: Any) -> None:
    program = make(nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 8)), features=96)
    after = rotated(program, block=128, check=False)
    assert forms(after) == [(32, 32), (16, 16)]
    assert after.history[-1]["skipped"] == [
        {"site": "4", "reason": "not rotated: no power of two of at least 16 divides its 24 input features"}
    ]
    assert forms(rotated(program, block=128, points=8, check=False)) == [(32, 2), (16, 16)]


def test_weights_stored_transposed_are_rotated_along_their_inputs(make: Any, evaluate: Any) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(32, 24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    program = make(Product())
    after = rotated(program, check=False)
    assert after.history[-1]["changed"] == 1
    torch.testing.assert_close(evaluate(after), evaluate(program), **CLOSE)


def test_leaves_alone_what_rotation_makes_worse(make: Any) -> None:
    program = make(nn.Sequential(nn.Linear(128, 16)), features=128)
    stats = next(iter(program.stats.activations.values()))
    for rows in (stats.rows, stats.held_rows):
        rows.copy_(rows.sign())  # every entry exactly on a level: int8 is exact without rotation
    with torch.no_grad():
        next(v for v in program.tensors().values() if v.dim() == 2).sign_()
    skipped = rotated(program).history[-1]["skipped"]
    assert skipped[0]["site"] == "0" and "held-out error" in skipped[0]["reason"]
    assert rotated(program, check=False).history[-1]["changed"] == 1


def test_rotation_helps_where_there_are_outliers(make: Any, evaluate: Any) -> None:
    program = make(nn.Sequential(nn.Linear(128, 16)), features=128)
    reference = evaluate(program, 128)
    errors = [(evaluate(run_passes(program, steps), 128) - reference).norm() for steps in ([W8A8()], [Rotate(), W8A8()])]
    assert errors[1] < errors[0] / 2  # one channel is 30 times the rest: its share of a row's step falls by 128 ** 0.5
    facts = rotated(program).history[-1]["details"]["0"]["held_db"]
    assert facts["after"] < facts["before"] - 6


def test_works_without_calibration(make: Any, evaluate: Any) -> None:
    program = make(nn.Sequential(nn.Linear(32, 8)), calibrated=False)
    after = rotated(program)
    assert after.history[-1]["changed"] == 1
    torch.testing.assert_close(evaluate(after), evaluate(program), **CLOSE)


def test_keeps_what_is_named(attention: Any) -> None:
    history = rotated(attention, check=False, keep_fp32="head").history[-1]
    assert history["skipped"] == [{"site": "head", "reason": "kept float32 as asked"}] and history["changed"] == 4


@pytest.mark.parametrize("bad", [{"block": 24}, {"block": 8}, {"block": 128, "points": 4}, {"block": 16, "points": 1}])
def test_refuses_forms_that_do_not_exist(attention: Any, bad: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"pass .rotate.: rotation: (block|points) is"):
        rotated(attention, **bad)


def test_refuses_block_zero_and_quantized_programs(attention: Any) -> None:
    with pytest.raises(UsageError, match="leave the pass out"):
        rotated(attention, block=0)
    with pytest.raises(PassError, match="no linear layer is in the graph"):
        rotated(run_passes(attention, [W8A8()]))
