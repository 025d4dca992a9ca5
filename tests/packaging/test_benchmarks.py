"""The parts of benchmarks/x86.py that need no peer: what it knows of each engine, and what a failing one does to the table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import x86, x86_worker


def test_every_engine_has_a_worker_and_an_environment() -> None:
    assert set(x86.ENGINES) == set(x86_worker.ENGINES)
    assert set(x86.ENGINES.values()) | {"plot"} == {"", *x86.ENVIRONMENTS}
    assert x86.OURS in x86.ENGINES and x86.REFERENCE in x86.ENGINES and not set(x86.NOT_RUN) & set(x86.ENGINES)
    pins = [p for e in x86.ENVIRONMENTS.values() for p in e.packages]
    assert all("==" in p for p in pins), "a benchmark names the versions it compares with"


def engine(program: str) -> x86.Engine:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return x86.Engine("some", process)


@pytest.mark.parametrize(
    ("program", "said"),
    [('print(\'{"error": "no such op"}\')', "no such op"), ("import os; os._exit(9)", "the process ended with 9")],
)
def test_a_failing_engine_is_out_with_its_reason(program: str, said: str) -> None:
    made = engine(program)
    assert made.ask({}) == {"error": said} and made.failed == said and made.process is None
    assert made.ask({"seconds": 1.0}) == {}
    row = x86.row(made, "1x16", 1, {}, {})
    assert row == {"engine": "some", "shape": "1x16", "threads": 1, "failed": said}


def test_a_worker_says_what_is_wrong_and_prints_nothing_else(tmp_path: os.PathLike[str]) -> None:
    command = [sys.executable, x86_worker.__file__, "onnxruntime fp32", "1", str(tmp_path)]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert len(done.stdout.splitlines()) == 1 and "fp32.onnx" in done.stdout and done.stdout.startswith('{"error": ')


def test_the_table_has_ratios_errors_and_reasons() -> None:
    def row(name: str, ms: float, ratio: float) -> dict[str, object]:
        return {
            "engine": name,
            "shape": "1x16",
            "threads": 1,
            "median_ms": ms,
            "ratio": ratio,
            "error_db": -30.04,
            "ready_s": 1.0,
        }

    rows = [
        row(x86.OURS, 2.0, 1.0),
        row("a", 4.0, 0.5),
        {"engine": "b", "shape": "1x16", "threads": 1, "failed": "not installed"},
    ]
    text = x86.render(
        {
            "rows": rows,
            "not_run": {"c": "too new"},
            "machine": {"cores": 2, "cpu_flags": ["avx2"]},
            "packages": {"": {"numpy": "2"}},
        }
    )
    assert f"| {x86.OURS} | 2.00 | -30.0 |" in text and "| a | 4.00 (0.50) | -30.0 |" in text
    assert "| b | - | not installed |" in text and "Not run: c: too new." in text and "numpy 2" in text
