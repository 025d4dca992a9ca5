"""The step lookup kernel: ids and bits of values equal to torch's operator and to numpy, at every width and on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm

from khtst_compile.errors import LoweringError
from khtst_compile.ops.codebook import step_lookup_reference
from khtst_compile.targets.isa import AVX2, Isa
from khtst_compile.targets.kernels import step_lookup
from khtst_compile.targets.kernels.rows import PARALLEL_ELEMENTS, Lead
from khtst_compile.targets.kernels.step_lookup import StepLookup, pack
from tests.targets.codebooks import Grid, grid, step_rows
from tests.targets.test_rows import RUNNABLE, call

WIDTHS = (1, 7, 8, 9, 16, 31, 33, 64)
LEADS = ((0, 3), (1, 1), (1, 7), (3, 11))


def build(isa: Isa, spec: StepLookup) -> tvm.runtime.Module:
    lib = tvm.tirx.build(tvm.IRModule({spec.name: step_lookup.prim_func(spec)}), target=tvm.target.Target(isa.tvm_target()))
    return lib[spec.name]


def check(kernel: tvm.runtime.Module, made: Grid, x: np.ndarray) -> None:
    tables = (made.thresholds.numpy(), made.steps.numpy(), made.basis.numpy())
    values, ids = call(kernel, [x, *pack(*tables)], [(x.shape, "float32"), (x.shape[:-1], "int32")])
    want, want_ids = (t.numpy() for t in step_lookup_reference(torch.from_numpy(x), made.thresholds, made.steps, made.basis))
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(values.view(np.int32), want.view(np.int32))
    plain, plain_ids = step_lookup.reference(x, *tables)
    np.testing.assert_array_equal(ids, plain_ids)
    np.testing.assert_array_equal(values.view(np.int32), plain.view(np.int32))


@pytest.mark.parametrize(
    ("isa", "width", "most"),
    [(AVX2, width, most) for width, most in zip(WIDTHS, (2, 5, 8, 3, 64, 2, 16, 7), strict=True)]
    + [(isa, width, 6) for isa in RUNNABLE[1:] for width in (9, 33)],
    ids=lambda v: getattr(v, "name", v),
)
def test_ids_and_values_are_torchs(isa: Isa, width: int, most: int) -> None:
    made = grid(width, most)
    kernel = build(isa, StepLookup(width, most))
    for lead in LEADS:
        check(kernel, made, step_rows(made, max(1, int(np.prod(lead)))).numpy()[: int(np.prod(lead))].reshape(*lead, width))


@pytest.mark.parametrize("lead", [(5,), (2, 3, 4)])
def test_leading_axes(lead: tuple[int, ...]) -> None:
    made = grid(6, 5)
    for known in ((), lead):
        check(
            build(AVX2, StepLookup(6, 5, Lead(len(lead), known))),
            made,
            step_rows(made, int(np.prod(lead))).numpy().reshape(*lead, 6),
        )


def test_many_rows_in_parallel_are_the_same() -> None:
    made = grid(9, 4)
    x = step_rows(made, 2 * PARALLEL_ELEMENTS // 9).numpy()[None]
    check(build(AVX2, StepLookup(9, 4)), made, x)


def test_sums_wrap_as_int32_do() -> None:
    made = grid(16, 8)
    wide = Grid(made.thresholds, made.steps, torch.full((16,), 2**31 - 1, dtype=torch.int32))
    check(build(AVX2, StepLookup(16, 8)), wide, step_rows(wide, 40).numpy()[None])


@pytest.mark.parametrize(("width", "count"), [(0, 4), (3, 1), (3, 65)])
def test_what_is_no_grid_is_refused(width: int, count: int) -> None:
    with pytest.raises(LoweringError, match="2 to 64 steps"):
        StepLookup(width, count)
