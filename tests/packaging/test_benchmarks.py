"""The parts of benchmarks/x86.py that need no peer: what it knows of each engine, what a failing one does to the table, and what it
concludes from times."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import x86, x86_measure, x86_peers, x86_report, x86_worker
from benchmarks.x86_peers import DECODER, LLAMA, OURS, OURS_FP32, RIVAL, Engine
from benchmarks.x86_report import cliffs, over_trend


def test_every_engine_has_a_worker_and_an_environment() -> None:
    assert set(x86_peers.ENGINES) == set(x86_worker.ENGINES) and set(x86_peers.TALKERS) == set(x86_worker.TALKERS)
    used = {**x86_peers.ENGINES, **x86_peers.TALKERS}
    assert set(used.values()) | {"plot"} == {"", *x86_peers.ENVIRONMENTS}
    assert {OURS, OURS_FP32, RIVAL, x86_peers.REFERENCE, *x86_peers.ONE_SHAPE, *x86.FLOAT32} <= set(x86_peers.ENGINES)
    assert {DECODER, LLAMA} == set(x86_peers.TALKERS)
    pins = [p for e in x86_peers.ENVIRONMENTS.values() for p in (*e.packages, *e.bare)]
    assert all("==" in p for p in pins), "a benchmark names the versions it compares with"


def engine(program: str) -> Engine:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return Engine("some", 1, process)


@pytest.mark.parametrize(
    ("program", "said"),
    [('print(\'{"error": "no such op"}\')', "no such op"), ("import os; os._exit(9)", "the process ended with 9")],
)
def test_a_failing_engine_is_out_with_its_reason(program: str, said: str, tmp_path: Path) -> None:
    made = engine(program)
    assert made.ask({}) == {"error": said} and made.failed == said and made.process is None
    assert made.ask({"seconds": 1.0}) == {}
    failed = {"engine": "some", "threads": 1, "failed": said}
    assert x86_measure.latency([made], tmp_path, [(1, 16)], 3, 0.0, 1.0) == [{**failed, "shape": "1x16"}]
    assert x86_measure.decode([made], [1, 2], 4, 2) == [failed]
    assert x86_measure.scaling([made, made], tmp_path, (1, 16), 2)["speedup"] is None
    assert x86_measure.growth([made], tmp_path, [(1, 16)], 1, 0.0) == {"rounds": 1, "points": [], "failed": {"some": said}}


def test_a_worker_says_what_is_wrong_and_prints_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, x86_worker.__file__, "onnxruntime fp32", "1", str(tmp_path)]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert len(done.stdout.splitlines()) == 1 and "fp32.onnx" in done.stdout and done.stdout.startswith('{"error": ')


def test_a_burst_counts_what_it_measures() -> None:
    calls: list[int] = []
    run = lambda inputs: calls.append(1)  # noqa: E731
    assert len(x86_worker.burst(run, {}, 0.0, warm=True)) == 1 and len(calls) == 2
    assert len(x86_worker.burst(run, {}, 0.0, warm=False)) == 1 and len(calls) == 3


def test_an_engine_is_left_out_of_shapes_it_is_too_slow_for(tmp_path: Path) -> None:
    class Slow(Engine):
        def ask(self, command: dict[str, Any]) -> dict[str, Any]:
            return {"times": [0.1]} if "seconds" in command else {}

    first, second = x86_measure.latency([Slow("slow")], tmp_path, [(1, 16), (32, 128)], 2, 0.0, 0.0)
    assert first["turns_s"] == [0.1, 0.1] and "a run would take about 26 s" in second["failed"]


def test_decoding_is_counted_without_the_first_token() -> None:
    answers = 'import sys\nfor _ in sys.stdin: print(\'{"prefill_s": 0.5, "decode_s": 0.25}\', flush=True)'
    made = engine(answers)
    try:
        (row,) = x86_measure.decode([made], [7] * 100, 11, 3)
    finally:
        made.close()
    assert row["prefill_tokens_per_s"] == 200 and row["decode_tokens_per_s"] == 40 and row["decode_turns"] == [40.0] * 3


@pytest.mark.parametrize(
    ("times", "where"),
    [
        ([4.0, 2.4, 1.6, 1.2, 1.1, 1.05], []),  # a fixed cost that spreads over more tokens
        ([1.0, 1.02, 1.06, 1.125, 1.25, 1.5], []),  # attention, whose share grows with the length
        ([1.0, 1.0, 1.3, 1.0, 1.0], [2]),  # a peak
        ([1.0, 1.0, 1.2, 1.2, 1.2], [2]),  # a step
        ([1.0, 1.2, 1.6, 1.2], [1, 2]),  # a peak with a slope before it
        ([1.0, 1.0, 1.0, 1.16], [3]),  # at the end
        ([1.0, 1.0, 1.0, 1.14], []),
        ([2.0], []),
        ([], []),
    ],
)
def test_cliffs_are_told_from_slopes(times: list[float], where: list[int]) -> None:
    assert [i for i, over in enumerate(over_trend(times)) if over > x86_report.CLIFF] == where


def points(name: str, slow: tuple[int, int]) -> list[dict[str, Any]]:
    shapes = [(b, s) for b in (1, 2, 4, 8) for s in (16, 32, 64, 128)]
    return [{"engine": name, "batch": b, "seq": s, "us_per_token": 150.0 if (b, s) == slow else 100.0} for b, s in shapes]


def test_cliffs_are_sought_along_both_axes_of_each_engine() -> None:
    found = cliffs([*points(OURS, (4, 64)), *points("other", (1, 128))])
    at = [(c["engine"], c["axis"], c["batch"], c["seq"], c["over"]) for c in found]
    # At the smallest batch nothing stands before it to compare with.
    assert at == [(OURS, "batch", 4, 64, 1.5), (OURS, "seq", 4, 64, 1.5), ("other", "seq", 1, 128, 1.5)]


def row(name: str, turns: list[float], shape: str = "1x16", threads: int = 1) -> dict[str, Any]:
    known = {"engine": name, "shape": shape, "threads": threads, "error_db": -30.04, "ready_s": 1.0}
    return {**known, "turns_s": turns, "median_ms": sorted(turns)[len(turns) // 2] * 1e3}


def result(**parts: Any) -> dict[str, Any]:
    known = {"machine": {"cores": 2, "cpu_flags": ["avx2"]}, "target": "x86-avx2", "packages": {"": {"numpy": "2"}}}
    return {**known, "not_run": {"c": "too new"}, **parts}


def asked(text: str) -> dict[str, list[str]]:
    """what -> asked, measured, met, note, of the first table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: [c.strip(" |") for c in cells[1:]] for cells in lines[2 : 2 + len(x86_report.ASKED)]}


def test_ratios_are_those_within_a_round() -> None:
    rows = [row(OURS, [1.0, 2.0, 4.0]), row("a", [2.0, 4.0, 4.0]), {"engine": "b", "shape": "1x16", "threads": 1, "failed": "x"}]
    assert x86_report.ratio(rows, OURS, "a", "1x16", 1) == 0.5
    assert x86_report.ratio(rows, OURS, "b", "1x16", 1) is None and x86_report.ratio(rows, OURS, "a", "1x16", 2) is None


def test_the_table_has_ratios_errors_and_reasons() -> None:
    failed = {"engine": "b", "shape": "1x16", "threads": 1, "failed": "not installed"}
    text = x86_report.render(result(latency=[row(OURS, [0.002] * 3), row("a", [0.004] * 3), failed]))
    assert f"| {OURS} | 2.00 | -30.0 |" in text and "| a | 4.00 (0.50) | -30.0 |" in text
    assert "| b | - | not installed |" in text and "Not run: c (too new)." in text and "numpy 2" in text


def test_what_was_asked_is_judged_beside_the_fastest_peer() -> None:
    some = [row(OURS, [1.0] * 3), row(RIVAL, [2.0] * 3), row("a", [1.6] * 3), row(OURS_FP32, [1.0] * 3)]
    table = asked(x86_report.render(result(latency=some)))
    assert len(table) == len(x86_report.ASKED), "every line names something else"
    first, *rest = table.values()
    assert first == ["≤ 0.55", "0.625", "**no**", f"against a, {RIVAL}: 0.50"]
    assert all(cells[1] == "not measured" for cells in rest)


def test_what_was_asked_of_the_other_parts_is_found() -> None:
    rates = {"prefill_tokens_per_s": 1000.0, "prefill_turns": [1000.0], "decode_tokens_per_s": 120.0}
    decode = [{"engine": DECODER, "threads": n, **rates, "decode_turns": [140.0, 140.0, 90.0]} for n in (1, 2)]
    decode += [{"engine": LLAMA, "threads": n, **rates, "decode_turns": [100.0, 120.0, 30.0]} for n in (1, 2)]
    some = [row(OURS, [0.6], s, n) for s in x86_report.SHAPES for n in (1, 2)]
    some += [row("onnxruntime fp32", [1.0], s, n) for s in x86_report.SHAPES for n in (1, 2)]
    fp32 = [row(OURS_FP32, [0.95], s) for s in ("1x128", "8x128")] + [row("openvino fp32", [1.0], s) for s in ("1x128", "8x128")]
    grown = points(OURS, (4, 64))
    text = x86_report.render(
        result(
            latency=some,
            fp32=fp32,
            decode=decode,
            scaling={"speedup": 1.9},
            peak={"share": 0.69},
            perplexity={"off": 0.004},
            build={"lower_s": 31.0, "over_weights": 1.07},
            growth={"points": grown, "cliffs": cliffs(grown), "failed": {"a": "gone"}},
        )
    )
    table = asked(text)
    assert not [what for what, cells in table.items() if cells[1] == "not measured"]
    met = {what: cells[2] for what, cells in table.items() if "thread(s), " not in what}
    missed = [what for what, verdict in met.items() if verdict == "**no**"]
    assert missed == [
        "share of int8 peak at 8x128, linear layers alone",
        "lower of MiniLM for all x86, s",
        "cliffs in time per token, batch 1 to 32, sequence 16 to 512",
    ]
    assert table["SmolLM2-135M, decode, 2 thread(s): tokens/s over llama.cpp's"][1] == "1.4"
    assert "worst: 1.50 at (4, 64) along batch" in text and "| 4 | 100 | 100 | 150‡ | 100 |" in text and "a: gone." in text


def test_the_sizes_of_growth_double() -> None:
    for sizes in (x86_measure.BATCHES, x86_measure.LENGTHS):
        assert all(b == 2 * a for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--only", "latency,grow"], "'grow' is no part"), (["--decoder", "nowhere"], "nowhere is no folder")],
)
def test_a_wrong_argument_is_a_usage_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, x86.__file__, "--peers", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 2 and said in done.stderr and not list(tmp_path.iterdir())
