"""One program on every x86 instruction set: the same bits, and honest about which machine it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact, cpu
from khtst_compile.api import load_program
from khtst_compile.errors import ArtifactError, EnvironmentProblem, ResourceError, UsageError
from khtst_compile.layout import Packed
from khtst_compile.lower.build import build, export_library
from khtst_compile.lower.relax import Graph, Lowered, kernel_graph, to_relax
from khtst_compile.lower.variants import Helpers
from khtst_compile.runtime import WEIGHTS, Engine, choose, logical
from khtst_compile.targets import table
from khtst_compile.targets.cpu_target import CpuTarget
from khtst_compile.targets.isa import AVX2, X86_ISAS, Isa
from khtst_compile.targets.x86 import VARIANTS

Draw = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def graph(quantized: Path) -> Graph:
    return kernel_graph(load_program(artifact.read(quantized)))


def arguments(lowered: Lowered) -> list[np.ndarray]:
    """What its library takes, from its own packing."""
    return [w.packed if isinstance(w, Packed) else w for w in lowered.weights]


def values(graph: Graph, isa: Isa, folder: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs and taps of the program built for one instruction set."""
    target = CpuTarget(isa.name, isa)
    lowered = to_relax(graph, target)
    export_library(build(lowered.module, target), folder / "model.so", target)
    results = Engine(folder / "model.so", arguments(lowered), 2).call("taps", [inputs[s.name] for s in graph.program.inputs])
    count = len(graph.program.outputs)
    taps = zip(graph.taps, results[count:], strict=True)
    return [*results[:count], *(logical(t.kind, t.features, r, isa.codes_offset) for t, r in taps)]


@pytest.fixture(scope="module")
def avx2(graph: Graph, tmp_path_factory: pytest.TempPathFactory, draw: Draw) -> list[np.ndarray]:
    return values(graph, AVX2, tmp_path_factory.mktemp("avx2"), draw(3, 13, seed=7))


@pytest.mark.emulated
@pytest.mark.parametrize("isa", [i for i in X86_ISAS if i is not AVX2], ids=lambda i: i.name)
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
    here = artifact.read(library).manifest["taps"]  # of the artifact for all
    assert [t["sha256"] for t in made.manifest["taps"]] == [t["sha256"] for t in here]


def test_one_artifact_holds_all_and_stores_weights_once(quantized: Path, library: Path, tmp_path: Path) -> None:
    whole = artifact.read(library)
    assert [v["name"] for v in whole.manifest["target"]["variants"]] == [t.name for t in VARIANTS]
    single = artifact.read(kc.lower(quantized, tmp_path / "one", target="x86-avx2").folder)
    assert [v["layouts"].count(None) for v in single.manifest["target"]["variants"]] == [len(single.manifest["weights"])]
    # Beside the matrices only what the sums of a column start at differs: 4 bytes a column, of these small layers.
    sizes = [f.file(WEIGHTS).stat().st_size for f in (whole, single)]
    assert sizes[0] < 1.2 * sizes[1]
    assert [t["sha256"] for t in whole.manifest["taps"]] == [t["sha256"] for t in single.manifest["taps"]]


@pytest.mark.parametrize("target", VARIANTS, ids=lambda t: t.name)
def test_every_variant_gets_its_own_packing(graph: Graph, library: Path, target: CpuTarget) -> None:
    folder = artifact.read(library)
    variant = next(v for v in folder.manifest["target"]["variants"] if v["name"] == target.name)
    got = artifact.arrange(artifact.map_weights(folder.file(WEIGHTS), folder.manifest["weights"]), variant)
    for a, b in zip(got, arguments(to_relax(graph, target)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", X86_ISAS, ids=lambda i: i.name)
def test_the_variant_is_chosen_by_features(library: Path, isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "flags", lambda: frozenset(isa.cpu_flags))
    assert choose(artifact.read(library))["isa"] == isa.name
    monkeypatch.setattr(cpu, "flags", lambda: frozenset(isa.cpu_flags) - {"avx2"})
    with pytest.raises(EnvironmentProblem, match=r"x86-avx2 needs the CPU features .* this machine lacks avx2"):
        kc.load(library)


def test_a_variant_is_asked_for_by_name(library: Path, draw: Draw) -> None:
    for target in VARIANTS:
        if target.unavailable() is None:
            assert kc.load(library, variant=target.name).variant == target.name
            assert kc.verify(library, variant=target.name).ok
        else:
            with pytest.raises(EnvironmentProblem, match="lacks"):
                kc.verify(library, variant=target.name)
    with pytest.raises(UsageError, match="no variant 'x86-avx1'; it holds x86-avx512vnni"):
        kc.load(library, variant="x86-avx1")


def test_a_helper_that_fails_or_dies_says_why(graph: Graph, quantized: Path, tmp_path: Path) -> None:
    targets = table.variants("x86")
    with (
        Helpers(tmp_path / "missing", targets, tmp_path / "a", 2) as helpers,
        pytest.raises(ArtifactError, match="not an artifact"),
    ):
        helpers.results(graph, tmp_path, {})
    with Helpers(quantized, targets, tmp_path / "b", 2) as helpers:
        assert [t.name for t in helpers.own] == ["x86-avx512vnni", "x86-avxvnni"]
        helpers._processes[0].kill()
        with pytest.raises(ResourceError, match="built x86-avx512, x86-avx2 was ended by SIGKILL"):
            helpers.results(graph, tmp_path, {})


def test_helpers_end_with_their_parent(quantized: Path, tmp_path: Path) -> None:
    with Helpers(quantized, table.variants("x86"), tmp_path, 2) as helpers:
        process = helpers._processes[0]
        assert process.stdin is not None
        process.stdin.close()  # what the system does when a process ends
        assert process.wait(timeout=60) == 1


def test_one_process_and_several_build_the_same(quantized: Path, library: Path, tmp_path: Path) -> None:
    alone = kc.lower(quantized, tmp_path / "alone", threads=1).manifest
    both = artifact.read(library).manifest
    for field in ("weights", "taps", "kernels"):
        assert alone[field] == both[field]
    assert sorted(alone["files"]) == sorted(both["files"])
