"""The codebook kernel: torch's ids and bits of values on every x86 variant, however its coarse scores are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from khtst_compile.errors import LoweringError
from khtst_compile.layout import Packed
from khtst_compile.ops.codebook import exact_scores
from khtst_compile.targets.isa import AVX2, Isa
from khtst_compile.targets.kernels import codebook
from khtst_compile.targets.kernels.codebook import Codebook
from khtst_compile.targets.kernels.rows import Lead
from khtst_compile.targets.single import compile_alone, tensors
from tests.targets.close_calls import Case, Result, cases, near_ties, normal
from tests.targets.gemm_tools import RUNNABLE

CASES = cases()
LEAD1 = Lead(1)


def spec_of(case: Case, isa: Isa = AVX2, int8: bool = True, **more: Any) -> Codebook:
    levels, codes, features = case.codes.shape
    lead = Lead(case.z.ndim - 1)
    return Codebook(isa, levels, codes, features, case.values.shape[-1], lead, case.running, int8, **more)


@cache
def built(spec: Codebook) -> Any:
    return compile_alone({spec.name: codebook.prim_func(spec)}, spec.isa)


def run(case: Case, isa: Isa = AVX2, int8: bool = True, **more: Any) -> Result:
    """values and ids of the kernel."""
    spec = spec_of(case, isa, int8, **more)
    constants = [a.packed if isinstance(a, Packed) else a for a in codebook.pack(spec, case.codes, case.bias, case.values)]
    lead = case.z.shape[:-1]
    rooms = [np.full((*lead, spec.value_features), 77, np.float32), np.full((*lead, spec.levels), 77, np.int32)]
    wanted = [room for room, out in zip(rooms, (spec.values_out, spec.ids_out), strict=True) if out]
    given = tensors([case.z, *constants, *wanted])
    built(spec)[spec.name](*given)
    results = iter(given[-len(wanted) :])
    values, ids = (
        next(results).numpy() if out else room for room, out in zip(rooms, (spec.values_out, spec.ids_out), strict=True)
    )
    return values, ids


def check(case: Case, isa: Isa = AVX2, int8: bool = True) -> None:
    values, ids = run(case, isa, int8)
    want_values, want_ids = case.wanted()
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(values, want_values)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(want_values))


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", CASES)
def test_ids_and_values_are_torchs(name: str, isa: Isa, int8: bool) -> None:
    check(CASES[name], isa, int8)


def test_awkward_rows_are_lost_and_counted_by_their_values() -> None:
    case = CASES["three levels"]
    values, ids = run(case)
    lost = np.isnan(values).all(-1)
    assert np.flatnonzero(lost).tolist() == [1, 2, 3] and not ids[lost].any()
    assert np.isfinite(values[~lost]).all() and ids[4, 0] == 7


def test_the_first_of_equal_codes_wins() -> None:
    _, ids = run(CASES["duplicates"])
    assert ids.max() < 32 and ids[4, 0] == 8, "row 4 is code 40, which is code 8"


def test_near_ties_are_decided_by_the_written_order() -> None:
    """The tests above would pass if no row were a close call: most of these are, and float64 decides some of them otherwise."""
    case = CASES["near ties"]
    z, codes = torch.from_numpy(case.z), torch.from_numpy(case.codes[0])
    n, k = len(z), len(codes)
    scores = exact_scores(z.repeat_interleave(k, 0), codes.repeat(n, 1), None).reshape(n, k)
    best = scores.topk(2).values
    gap = (best[:, 0] - best[:, 1]) / best[:, 0].abs()
    assert (gap < 4e-7).float().mean() > 0.5 and (gap == 0).any()
    wide = (z.double() @ codes.double().T).argmax(-1)
    assert (wide != torch.from_numpy(case.wanted()[1][:, 0])).sum() > 50


@pytest.mark.parametrize("values, ids", [(True, False), (False, True)])
def test_one_output(values: bool, ids: bool) -> None:
    for name in ("three levels", "z less the total", "other values"):
        got = run(CASES[name], values_out=values, ids_out=ids)[0 if values else 1]
        np.testing.assert_array_equal(got, CASES[name].wanted()[0 if values else 1])


def test_several_leading_axes() -> None:
    rng = np.random.default_rng(3)
    codes = normal(rng, 2, 40, 16)
    for shape in ((2, 3, 16), (2, 5, 7, 16), (3, 0, 16)):
        check(Case(normal(rng, *shape), codes))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 31, 32, 33, 63, 100])
def test_any_number_of_rows(rows: int) -> None:
    rng = np.random.default_rng(rows)
    check(Case(normal(rng, rows, 36), normal(np.random.default_rng(0), 2, 37, 36)))


def test_a_large_codebook_on_close_calls() -> None:
    """1,024 codes of 256 features, a tight frame and its bias: rows between codes, and rows of noise."""
    rng = np.random.default_rng(5)
    codes = np.linalg.qr(rng.standard_normal((1024, 256)))[0].astype(np.float32)[None]
    bias = (-0.5 * np.square(codes.astype(np.float64)).sum(-1)).astype(np.float32)
    z = np.concatenate([near_ties(rng, codes[0], 500), normal(rng, 500, 256)])
    for int8 in (True, False):
        check(Case(z, codes, bias), int8=int8)


def ids_with_facts(case: Case, change: Callable[[np.ndarray], None]) -> np.ndarray:
    """Ids of a kernel that is given other numbers of the codebook. change: writes into (levels, FACTS)."""
    spec = spec_of(case)
    constants = [a.packed if isinstance(a, Packed) else a.copy() for a in codebook.pack(spec, case.codes, case.bias, case.values)]
    facts = next(i for i, a in enumerate(constants) if a.shape == (spec.levels * codebook.FACTS,))
    change(constants[facts].reshape(spec.levels, codebook.FACTS))
    rows = len(case.z)
    given = tensors(
        [case.z, *constants, np.zeros((rows, spec.value_features), np.float32), np.zeros((rows, spec.levels), np.int32)]
    )
    built(spec)[spec.name](*given)
    found: np.ndarray = given[-1].numpy()
    return found


def test_bounds_are_needed() -> None:
    """With a tenth of each bound the right code is lost for some of these rows."""
    rng = np.random.default_rng(6)
    case = Case(normal(rng, 2000, 64), normal(rng, 1, 256, 64))
    want = case.wanted()[1]

    def tenth(facts: np.ndarray) -> None:
        facts[:, 1:5] *= 0.1

    assert (ids_with_facts(case, lambda facts: None) == want).all()
    assert (ids_with_facts(case, tenth) != want).any()


def test_int16_sums_need_the_scale_that_is_chosen() -> None:
    """With scales by the largest feature alone, sums in int16 run over."""
    case = CASES["signs"]

    def by_the_largest(facts: np.ndarray) -> None:
        facts[:, 0] = 0.0

    assert (ids_with_facts(case, by_the_largest) != case.wanted()[1]).any()


def test_refusals() -> None:
    case = CASES["three levels"]
    for codes, bias, what in (
        (np.where(case.codes == case.codes[0, 0, 0], np.float32(np.nan), case.codes), None, "NaN"),
        (case.codes * np.float32(1e19), None, "1e\\+15"),
        (case.codes[:2], None, "needed"),
        (case.codes, np.full((3, 50), -np.inf, np.float32), "no code to choose"),
        (case.codes, np.full((3, 50), np.nan, np.float32), "NaN"),
    ):
        with pytest.raises(LoweringError, match=what):
            codebook.pack(spec_of(case), codes, bias, case.values)
    for wrong in ({"codes": 0}, {"value_features": 3}, {"values_out": False, "ids_out": False}):
        with pytest.raises(LoweringError, match="needed"):
            dataclasses.replace(spec_of(case), **wrong)
