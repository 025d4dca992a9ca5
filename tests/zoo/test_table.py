"""The table of the zoo: a model goes the whole way, a fault or a refusal shows, and the docs hold every model there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from khtst_compile.capture.factory import capture_module
from khtst_compile.errors import UsageError
from khtst_compile.zoo.catalog import Entry, catalog
from scripts import zoo
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


def entry(kind: type[nn.Module] = tiny.Mlp) -> Entry:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind().eval()

    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randn(8, 32, generator=generator),) for _ in range(16)]
    return Entry("tiny", build, lambda: samples[0], lambda: samples)


def test_a_model_goes_the_whole_way(tmp_path: Path) -> None:
    row = zoo.measure(entry(), tmp_path, "x86-avx2", None)
    assert row.ok and row.notes == [] and (row.int8, row.linears) == (3, 3) and row.cells["export"] == "equal"
    # Random layers in int8: measured -40 dB. The same program in two runtimes differs in single codes at most.
    assert -60 < float(row.cells["x86"]) < -35 and abs(float(row.cells["x86"]) - float(row.cells["ONNX"])) < 0.3
    assert row.text().startswith("| tiny | 4,") and row.text().endswith(f"| - | {row.int8} of {row.linears} |")


def test_another_model_than_the_one_captured_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
        other = entry().build()
        assert isinstance(other, tiny.Mlp)
        other.head.weight.data *= 1.01
        other.head.bias.data *= 1.01
        return capture_module(other, inputs)

    def stop(*args: object, **options: object) -> None:
        raise UsageError("enough")

    monkeypatch.setattr(zoo, "capture_module", capture)
    monkeypatch.setattr(zoo.kc, "export", stop)
    monkeypatch.setattr(zoo.kc, "lower", stop)
    assert zoo.measure(entry(), tmp_path, "x86-avx2", None).cells["export"] == "-40.0"


def test_a_step_that_fails_is_a_note(tmp_path: Path) -> None:
    row = zoo.measure(entry(tiny.Unsupported), tmp_path, "x86-avx2", None)
    assert not row.ok and any(n.startswith("x86: ") and "svdvals" in n for n in row.notes) and "x86" not in row.cells
    assert f"- tiny: {row.notes[0]}" in zoo.render([row])


def test_errors_and_ids_are_compared_apart() -> None:
    exact = {"y": np.full(4, 2.0, np.float32), "ids": np.array([1, 2, 3, 4])}
    assert zoo._compare(exact, exact) == "equal (100.0 % of ids)"
    assert zoo._compare({"y": exact["y"] * np.float32(1.25), "ids": np.array([1, 2, 3, 0])}, exact) == "-12.0 (75.0 % of ids)"
    assert zoo._compare({"y": exact["y"] * np.nan, "ids": exact["ids"]}, exact) == "nan (100.0 % of ids)"


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "zoo.md"
    page.write_text(f"before\n{zoo.MARKS[0]}\nold\n{zoo.MARKS[1]}\nafter\n")
    zoo.write(page, "| new |")
    zoo.write(page, "| new |")
    assert page.read_text() == f"before\n{zoo.MARKS[0]}\n\n| new |\n\n{zoo.MARKS[1]}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="needed: a line"):
        zoo.write(page, "| new |")
    assert page.read_text() == "nothing"


def test_a_wrong_name_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "zoo.py"), "nothing", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "no model is called nothing; known: gsq, " in done.stderr and not list(tmp_path.iterdir())


def test_the_docs_hold_every_model() -> None:
    table = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8").partition(zoo.MARKS[0])[2].partition(zoo.MARKS[1])[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == list(catalog()), "make zoo writes it"
