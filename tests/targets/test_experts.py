"""The experts kernel: the bits of torch's operator for every shape, routing, count of rows and instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import tvm

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import AVX2, Isa
from khtst_compile.targets.kernels import experts
from khtst_compile.targets.kernels.rotation import Rotation
from khtst_compile.targets.kernels.rows import Lead
from tests.targets.mixtures import MIXTURES, TOKENS, Mixture, tokens, wanted
from tests.targets.test_rows import RUNNABLE, call


@cache
def build(spec: experts.Experts) -> tvm.runtime.Module:
    lib = tvm.tirx.build(tvm.IRModule({spec.name: experts.prim_func(spec)}), target=tvm.target.Target(spec.isa.tvm_target()))
    return lib[spec.name]


def run(mixture: Mixture, spec: experts.Experts, n: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel makes of n rows, and what torch does."""
    rows = tokens(mixture, n, kind)
    inputs = rows.inputs(spec, mixture.constants(spec))
    (got,) = call(build(spec), inputs, [((n, mixture.outputs), "float32")])
    return got, wanted(mixture, rows, spec.int8)


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_bits_are_torchs(name: str, isa: Isa) -> None:
    mixture = MIXTURES[name]
    for n in TOKENS:
        for kind in ("any", "one", "holes"):
            got, want = run(mixture, mixture.spec(isa), n, kind)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{n} {kind}")
            assert kind != "holes" or n < 3 or np.isnan(want).any()
            np.testing.assert_array_equal(np.nan_to_num(got).view(np.int32), np.nan_to_num(want).view(np.int32), f"{n} {kind}")


@pytest.mark.parametrize("name", MIXTURES)
def test_floats_are_torchs_but_for_the_order_of_sums(name: str) -> None:
    mixture = MIXTURES[name]
    for n in TOKENS:
        for kind in ("any", "one", "holes"):
            got, want = run(mixture, mixture.spec(AVX2, int8=False), n, kind)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5 * (1 + np.nanmax(np.abs(want), initial=0)))


def test_floats_have_the_same_bits_on_every_instruction_set() -> None:
    for mixture in MIXTURES.values():
        results = [run(mixture, mixture.spec(isa, int8=False), 33, "any")[0] for isa in RUNNABLE]
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].view(np.int32), other.view(np.int32))


def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "PLACES", 40)
    mixture = MIXTURES["everything"]
    spec = mixture.spec(AVX2, name="in_blocks")
    assert spec.block == 13
    for n in (1, 13, 14, 100):
        got, want = run(mixture, spec, n, "any")
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 0)])
def test_leading_axes(shape: tuple[int, ...]) -> None:
    mixture, n = MIXTURES["gated"], int(np.prod(shape))
    rows = tokens(mixture, n)
    for known in ((), shape):
        spec = mixture.spec(AVX2, lead=Lead(len(shape), known))
        inputs = rows.inputs(spec, mixture.constants(spec))
        shaped = [a.reshape(*shape, *a.shape[1:]) if i < 4 else a for i, a in enumerate(inputs)]
        (got,) = call(build(spec), shaped, [((*shape, mixture.outputs), "float32")])
        np.testing.assert_array_equal(got.reshape(n, mixture.outputs), wanted(mixture, rows))


THREADS = """
import sys, numpy as np
from khtst_compile.targets.isa import AVX2
from tests.targets.mixtures import MIXTURES
from tests.targets.test_experts import run
results = [run(MIXTURES[name], MIXTURES[name].spec(AVX2), n, "any")[0] for name in ("many", "everything") for n in (1, 2, 200)]
np.savez(sys.argv[1], *results)
"""


def test_thread_counts_agree(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("threads")
    for count in ("1", "3"):
        env = {**os.environ, "TVM_NUM_THREADS": count, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", THREADS, str(folder / f"{count}.npz")], env=env, check=True)
    one, three = (np.load(folder / f"{count}.npz") for count in ("1", "3"))
    for name in one.files:
        np.testing.assert_array_equal(one[name].view(np.int32), three[name].view(np.int32))


def test_weights_that_do_not_fit() -> None:
    mixture = MIXTURES["gated"]
    weights = dict(mixture.weights)
    with pytest.raises(LoweringError, match="needed"):
        experts.pack(mixture.spec(AVX2), **{**weights, "up": weights["up"][:, :-2]})  # type: ignore[index, arg-type]
    low = np.full_like(weights["down"], -128)
    with pytest.raises(LoweringError, match="-128; needed int8 >= -127"):
        experts.pack(mixture.spec(AVX2), **{**weights, "down": low})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"act": "swish"}, "has no kernel"), ({"top_k": 0}, "at least 1"), ({"rotation": Rotation(64, 64)}, "must divide")],
)
def test_kernels_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        experts.Experts(AVX2, 4, 16, 24, 16, **{"top_k": 1, **change})  # type: ignore[arg-type]
