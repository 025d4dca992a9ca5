"""One program on every x86 instruction set: the same bits, and honest about which machine it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact, cpu
from khtst_compile.api import load_program
from khtst_compile.errors import EnvironmentProblem
from khtst_compile.lower.build import build, export_library
from khtst_compile.lower.relax import Graph, kernel_graph, to_relax
from khtst_compile.runtime import Engine, logical
from khtst_compile.targets.isa import ALL_ISAS, AVX2, Isa
from khtst_compile.targets.x86 import VARIANTS, X86

Draw = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def graph(quantized: Path) -> Graph:
    return kernel_graph(load_program(artifact.read(quantized)))


def values(graph: Graph, isa: Isa, folder: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs and taps of the program built for one instruction set."""
    target = X86(isa.name, isa)
    lowered = to_relax(graph, target)
    export_library(build(lowered.module, target), folder / "model.so")
    results = Engine(folder / "model.so", lowered.weights, 2).call("taps", [inputs[s.name] for s in graph.program.inputs])
    count = len(graph.program.outputs)
    taps = zip(graph.taps, results[count:], strict=True)
    return [*results[:count], *(logical(t.kind, t.features, r, isa.codes_offset) for t, r in taps)]


@pytest.fixture(scope="module")
def avx2(graph: Graph, tmp_path_factory: pytest.TempPathFactory, draw: Draw) -> list[np.ndarray]:
    return values(graph, AVX2, tmp_path_factory.mktemp("avx2"), draw(3, 13, seed=7))


@pytest.mark.emulated
@pytest.mark.parametrize("isa", [i for i in ALL_ISAS if i is not AVX2], ids=lambda i: i.name)
def test_every_instruction_set_gives_the_same_bits(
    graph: Graph, isa: Isa, avx2: list[np.ndarray], tmp_path: Path, draw: Draw
) -> None:
    """Through the executable meaning of its instructions, so on any machine; natively too where this CPU has them."""
    forms = [isa.emulate(), *([isa] if not cpu.missing(isa.cpu_flags) else [])]
    for form in forms:
        got = values(graph, form, tmp_path, draw(3, 13, seed=7))
        for tap, a, b in zip([None] * len(graph.program.outputs) + list(graph.taps), got, avx2, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(tap))


def test_a_variant_this_machine_lacks_is_built_but_not_loaded(quantized: Path, library: Path, tmp_path: Path) -> None:
    lacking = [t for t in VARIANTS if t.unavailable() is not None]
    if not lacking:
        pytest.skip("this machine runs every variant")
    made = kc.lower(quantized, tmp_path / "other", target=lacking[0].name)
    assert made.manifest["golden"]["run_on"] != lacking[0].name
    with pytest.raises(EnvironmentProblem, match="lacks"):
        kc.load(tmp_path / "other")
    here = artifact.read(library).manifest["taps"]
    assert [t["sha256"] for t in made.manifest["taps"]] == [t["sha256"] for t in here]
