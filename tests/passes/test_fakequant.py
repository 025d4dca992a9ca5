"""The whole-model error that `smooth` decides by is the error the quantized program then has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from khtst_compile.contract import run_passes
from khtst_compile.fakequant import OutputError, Treatment
from khtst_compile.linears import find_linears
from khtst_compile.passes.rotate import Rotate
from khtst_compile.passes.w8a8 import W8A8


@pytest.mark.parametrize(("block", "points"), [(0, 0), (32, 32), (32, 2)])
def test_it_predicts_the_quantized_program(attention: Any, block: int, points: int) -> None:
    batches = attention.stats.held_samples
    assert batches and sum(len(next(iter(b.values()))) for b in batches) <= 32
    linears = find_linears(attention.graph, attention.tensors())
    with torch.no_grad():
        predicted = OutputError(attention, linears, batches)({n.node.name: Treatment(None, block, points) for n in linears})
    steps: list[Any] = [Rotate(block=block, points=points, check=False)] if block else []
    quantized = run_passes(attention, [*steps, W8A8(rounding="nearest")])
    difference = exact = 0.0
    for batch in batches:
        (y,), (reference,) = (p.run(batch).values() for p in (quantized, attention))
        difference += float((y - reference).detach().square().sum())
        exact += float(reference.detach().square().sum())
    # The rotation adds in another order, so a few codes land one step apart; int8 codes are otherwise the same.
    assert predicted == pytest.approx(difference / exact, rel=0.05)


def test_layers_that_are_not_named_stay_exact(attention: Any) -> None:
    linears = find_linears(attention.graph, attention.tensors())
    measure = OutputError(attention, linears, attention.stats.held_samples)
    assert measure({}) == 0.0
    with torch.no_grad():
        one = measure({linears[0].node.name: Treatment()})
        every = measure({linear.node.name: Treatment() for linear in linears})
    assert 0 < one < every
