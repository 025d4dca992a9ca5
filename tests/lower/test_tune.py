"""`lower --tune`: what is kept, what is reused, and that no result depends on it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.api import load_program
from khtst_compile.errors import ArtifactError, EnvironmentProblem, UsageError
from khtst_compile.lower import tune as tuning
from khtst_compile.lower.relax import kernel_graph
from khtst_compile.lower.tune import Record, gemms, records_of, tiles, tune
from khtst_compile.targets import search
from khtst_compile.targets.isa import AVX2
from khtst_compile.targets.kernels.gemm_f32 import GemmF32
from khtst_compile.targets.kernels.gemm_i8 import GemmI8
from khtst_compile.targets.kernels.rows import Lead
from khtst_compile.targets.kernels.tiles import Tile
from khtst_compile.targets.rules import tile_key
from khtst_compile.targets.search import NOISE, Contender, Found, compare, moves, pays
from khtst_compile.targets.table import target

SPEC = GemmI8(AVX2, 96, 64, Lead(2))


@pytest.fixture(scope="module")
def program(quantized: Path) -> Any:
    return kernel_graph(load_program(artifact.read(quantized))).program


def test_gemms_and_their_rows(program: Any) -> None:
    work = {(s.name, s.n, s.k, s.act, s.residual): (rows, count) for s, rows, count in gemms(program, target("x86-avx2"))}
    # The usual sizes, (1, 16), (1, 128) and (8, 128), where a text has at most 64 tokens; the head sees one row a text.
    assert {key: rows for key, (rows, _) in work.items()} == {
        ("gemm_i8", 120, 40, "none", False): (16, 64, 512),
        ("gemm_i8", 40, 40, "none", True): (16, 64, 512),
        ("gemm_i8", 80, 40, "none", False): (16, 64, 512),
        ("gemm_i8", 40, 80, "none", True): (16, 64, 512),
        ("gemm_i8", 7, 40, "none", False): (1, 8),
    }
    assert {key[1:3]: count for key, (_, count) in work.items()}[120, 40] == 2


class Clock:
    """A clock that moves on with each look at it."""

    def __init__(self, step: float):
        self.time, self.step = 0.0, step

    def __call__(self) -> float:
        self.time += self.step
        return self.time


def test_noise_is_not_kept() -> None:
    assert pays([0.97, 0.95]) and pays([1.01, 0.9])
    assert not pays([1 - NOISE / 2] * 3), "less than noise"
    assert not pays([0.5, 1 + 2 * NOISE]), "worse at one number of rows"


class Timed:
    """Stands for a contender: times by number of rows, the last one for ever."""

    def __init__(self, name: str, log: list[str], *times: float):
        self.name, self.log, self.rows, self.times = name, log, (8,), list(times)

    def seconds(self, m: int, least: float) -> float:
        self.log.append(self.name)
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


def test_turns_alternate_and_a_disturbance_does_not_count() -> None:
    log: list[str] = []
    first, second = Timed("a", log, 1.0), Timed("b", log, 9.0, 0.9, 30.0, 0.9, 0.9, 0.9)
    assert compare(first, second, 5) == pytest.approx([0.9])  # type: ignore[arg-type]
    assert "".join(log) == "ab" + "ba" + "ab" + "ba" + "ab" + "ba"


def test_noise_of_the_machine_raises_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = type("Fake", (), {"twin": lambda self: self})
    monkeypatch.setattr(search, "Contender", lambda spec, *a: setattr(c := contender(), "spec", spec) or c)
    for noisy, kept in ((1.0, True), (0.93, False)):
        answers = iter([[noisy], *[[0.95]] * 50])
        monkeypatch.setattr(search, "compare", lambda a, b, *r: next(answers) if b.spec.tile or a is b else [1 / 0.95])  # noqa: B023
        assert (search.search(SPEC, (64,), 0, 8.0, Clock(1.0)).spec.tile is not None) == kept


def test_a_twin_has_memory_of_its_own() -> None:
    one = Contender(SPEC, (3,), 1 << 16)
    other = one.twin()
    assert other.seconds(3, 0.0) > 0 and other.spec == one.spec
    assert other._weights[0][0].__chandle__() != one._weights[0][0].__chandle__()
    assert len(one._weights) == (1 << 16) // (SPEC.n * SPEC.k)


def test_a_choice_that_does_not_repeat_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    lucky = iter([[1.0], [0.5]])
    monkeypatch.setattr(search, "compare", lambda *a: next(lucky, [1.0]))
    monkeypatch.setattr(search, "Contender", lambda spec, *a: type("Fake", (), {"spec": spec, "twin": lambda self: self})())
    found = search.search(SPEC, (64,), 0, math.inf)
    assert found.spec.tile is None and found.gain == 1.0 and found.tried > 1


def test_the_search_goes_on_from_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(first: Any, second: Any, *rest: int) -> list[float]:
        return [2.0 ** (cost(second.spec) - cost(first.spec))]

    def cost(spec: GemmI8) -> int:
        return (spec.how.ahead != 0) + (spec.how.unroll != 4) + (spec.how.block != 64 << 10)

    monkeypatch.setattr(search, "compare", fake)
    monkeypatch.setattr(search, "Contender", lambda spec, *a: type("Fake", (), {"spec": spec, "twin": lambda self: self})())
    found = search.search(SPEC, (1024,), 0, math.inf)
    assert cost(found.spec) == 0 and found.gain == pytest.approx(2.0 ** -cost(SPEC))


def test_every_field_is_moved_and_every_move_is_one_step() -> None:
    spec = replace(SPEC, k=4096)
    moved = list(moves(spec, (1, 1024)))
    changed = [{f for f in vars(t) if getattr(t, f) != getattr(spec.how, f)} for t in moved]
    assert set().union(*changed) == set(vars(spec.how))
    assert all(len(c) <= 1 or c <= {"rows", "vectors"} for c in changed)
    # With one row there is nothing to block and no full tile.
    assert not any(t.block != spec.how.block or t.ahead != spec.how.ahead for t in moves(spec, (1,)))
    assert {t.unroll for t in moves(GemmF32(AVX2, 96, 64), (8,))} == {1, 2, 4}


def fake_search(spec: Any, rows: Any, total: int, deadline: float, now: Callable[[], float]) -> Found:
    tile = replace(spec.default_tile, rows=2, vectors=1) if spec.n == 80 else None
    return Found(replace(spec, tile=tile), 0.9 if tile else 1.0, 3)


def test_records_are_kept_and_time_is_shared(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    def search(spec: Any, rows: Any, total: int, deadline: float, now: Clock) -> Found:
        deadlines.append(deadline - now.time)
        now.time = deadline
        return fake_search(spec, rows, total, deadline, now)

    monkeypatch.setattr(tuning, "search", search)
    found = tune(program, target("x86-avx2"), 10.0, [], lambda line: None, Clock(0.0))
    assert len(found) == 5 and deadlines == pytest.approx([2.0] * 5)
    assert [r.tile for r in found if r.n == 80] == [replace(GemmI8(AVX2, 80, 40).default_tile, rows=2, vectors=1)]
    manifest = json.loads(json.dumps({"tuning": [r.to_json() for r in found]}))
    assert records_of(manifest, "here") == found and len(tiles(found)) == 1
    again = tune(program, target("x86-avx2"), 10.0, found, lambda line: None, Clock(0.0))
    assert again == found and len(deadlines) == 5, "measured again what is known"
    said: list[str] = []
    assert tune(program, target("x86-avx2"), 10.0, [], said.append, Clock(6.0))[1:] == []
    assert "no time left for 4 of 5 shapes" in said[-1]


def packing(folder: Path) -> tuple[object, bytes]:
    """In what order each variant reads which weights."""
    found = artifact.read(folder)
    return [v["layouts"] for v in found.manifest["target"]["variants"]], found.file("weights.bin").read_bytes()


def test_tuned_library_gives_the_same_bits(
    quantized: Path, library: Path, tmp_path: Path, draw: Callable[..., dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = artifact.read(library).manifest["target"]["name"]
    monkeypatch.setattr(tuning, "search", fake_search)
    made = kc.lower(quantized, tmp_path / "a", target=name, tune=5.0)
    records = made.manifest["tuning"]
    assert [r["gain"] for r in records if r["tile"]] == [0.9]
    # Panels of another width are packed differently.
    assert packing(tmp_path / "a") != packing(library)
    inputs = draw(5, 33)
    assert np.array_equal(
        kc.load(tmp_path / "a", threads=1).run(inputs)["output"], kc.load(library, threads=1).run(inputs)["output"]
    )
    monkeypatch.setattr(tuning, "search", None)  # nothing is to be measured from here on
    taken = kc.lower(quantized, tmp_path / "b", target=name, tuned=tmp_path / "a")
    assert taken.manifest["tuning"] == records
    assert packing(tmp_path / "b") == packing(tmp_path / "a")
    assert kc.lower(quantized, tmp_path / "b", target=name, tune=5.0).manifest["tuning"] == records, "a later lower of one folder"


def test_refusals(program: Any, quantized: Path, library: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tune is -1"):
        kc.lower(quantized, tmp_path / "x", tune=-1)
    with pytest.raises(ArtifactError, match="not an artifact"):
        kc.lower(quantized, tmp_path / "x", tuned=tmp_path / "nowhere")
    foreign = next((t for n in ("x86-avx512vnni", "x86-avxvnni") if (t := target(n)).unavailable()), None)
    if foreign is not None:
        with pytest.raises(EnvironmentProblem, match="cannot be measured here"):
            tune(program, foreign, 1.0, [], lambda line: None)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "entry", ["text", {"kernel": "gemm_i8"}, {"tile": {"rows": 2, "vectors": 2, "color": 1}}, {"n": "many"}, {"rows": 3}]
)
def test_damaged_records_are_refused_by_name(library: Path, quantized: Path, tmp_path: Path, entry: Any) -> None:
    good = Record("gemm_i8", "avx2", 8, 8, "none", False, (1,), Tile(2, 2), 0.9, 1).to_json()
    broken = tmp_path / "broken"
    shutil.copytree(library, broken)
    manifest = json.loads((broken / artifact.MANIFEST).read_text())
    damaged = entry if isinstance(entry, str) or "kernel" in entry else {**good, **entry}
    manifest["tuning"] = [damaged]
    (broken / artifact.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="tune again"):
        kc.lower(quantized, tmp_path / "x", tuned=broken)
    assert tile_key(SPEC) == ("gemm_i8", "avx2", 96, 64, "none", False)
