"""`inspect --codebooks`: the table, the histograms and the plot, of a model whose uses are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import khtst_compile as kc
from khtst_compile import usage
from khtst_compile.capture.factory import capture_module
from khtst_compile.cli.codebooks import lines
from khtst_compile.cli.quantize import _text, summarize
from khtst_compile.errors import UsageError
from khtst_compile.zoo.gsq import ResidualQuantizer
from tests import quantizers
from tests.cli.conftest import ROOT, Cli, Made


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three levels of 16 codes of 16 features, quantized ("q"), lowered ("x86") and exported ("onnx")."""
    folder = tmp_path_factory.mktemp("coded")
    np.save(folder / "x.npy", quantizers.samples().numpy())
    torch.manual_seed(0)
    model = quantizers.model(ResidualQuantizer(16, 16, 3))
    example = (quantizers.samples(0, 3),)
    program = capture_module(model, example, source="coded")
    kc.quantize(program, folder / "q", calib=folder / "x.npy")
    kc.lower(folder / "q", folder / "x86", target="x86-avx2")
    kc.export(folder / "q", folder / "onnx")
    return folder


@pytest.mark.parametrize("kind", ["q", "x86", "onnx"])
def test_json_has_all_of_it(kind: str, cli: Cli, coded: Path) -> None:
    found = json.loads(cli("inspect", coded / kind, "--codebooks", "--json").stdout)
    (book,), (entry,) = found["codebooks"], kc.inspect(coded / kind)["meta"]["codebooks"]
    assert {k: v for k, v in book.items() if k != "used"} == entry and found["path"] == str(coded / kind)
    assert [sum(c) for c in book["counts"]] == [640 - book["lost"]] * 3, "each of 64 x 10 vectors is counted at each level"
    assert book["used"] == [sum(n > 0 for n in c) for c in book["counts"]]
    assert book["dead"] == [[i for i, n in enumerate(c) if n == 0] for c in book["counts"]]


def test_one_screen(cli: Cli, coded: Path) -> None:
    (entry,) = kc.inspect(coded / "q")["meta"]["codebooks"]
    shown = cli("inspect", coded / "q", "--codebooks").stdout.splitlines()
    assert entry["site"] == "quantizer" and shown[4].endswith(entry["sha256"][:12]) and "3 x 16" in shown[4]
    assert f"{max(entry['delta_ort']['after']):.1e}" in shown[4]
    for level, counts in enumerate(entry["counts"]):
        at = shown.index(f"quantizer, level {level}: ids 0 to 15, a code a bar")
        bars = shown[at + 1].strip()
        assert len(bars) == 16 and bars[counts.index(max(counts))] == "█"
        assert [c == "." for c in bars] == [n == 0 for n in counts]


def test_dead_codes_are_named_and_wide_codebooks_fit() -> None:
    counts = [0] * 1000
    counts[7], counts[998], counts[999] = 80, 1, 40
    bars, width = usage.histogram(counts)
    assert width == 16 and len(bars) == 63 and bars[0] == "█" and bars[-1] == "▅" and set(bars[1:-1]) == {"."}
    assert usage.histogram([0, 0, 0]) == ("...", 1) and usage.histogram([3]) == ("█", 1)
    assert usage.named(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert usage.named(range(997)).endswith("11 and 985 more")


def _entry(**changes: object) -> dict[str, object]:
    entry: dict[str, object] = {
        "site": "codes", "kind": "steps", "source": "FSQ", "levels": 1, "codes": [64000], "features": 6, "scores": "steps",
        "delta_ort": None, "vectors": 10, "lost": 2, "counts": [], "perplexity": [0.0], "dead": [], "differ": 0, "near_ties": 0,
        "value_ulp": 0.0, "certified": False, "rescored": None, "candidates": None, "pruned": None, "sha256": "0" * 64,
    }  # fmt: skip
    return {**entry, **changes}


def test_a_grid_too_large_to_count(tmp_path: Path) -> None:
    shown = lines({"path": "p", "kind": "quantized", "codebooks": [_entry()]})
    assert shown[-1] == "codes, level 0: 64000 codes, too many to count one by one" and "steps (FSQ)" in shown[4]
    with pytest.raises(UsageError, match="nothing to draw"):
        usage.plot([_entry()], tmp_path / "a.png")


def test_what_was_pruned_and_rescored_is_shown() -> None:
    entry = _entry(codes=[2, 3], counts=[[1, 4], [5, 0, 0]], perplexity=[1.6, 1.0], pruned=[[0, 9], [1, 2, 3]], rescored=0.025,
                   candidates=1.04, certified=True, delta_ort={"before": [1e-3, 2e-3], "after": [0.0, 1e-8]})  # fmt: skip
    shown = lines({"path": "p", "kind": "quantized", "codebooks": [entry]})
    assert "2.0e-03 -> 1.0e-08" in shown[4] and shown[8].split()[5:] == ["yes", "2.5%", "1.04", "to", "2,", "3"]
    assert shown[9:] == ["", "codes, level 0: ids 0 to 1, a code a bar", "  ▂█", "  no code is dead",
                         "", "codes, level 1: ids 0 to 2, a code a bar", "  █..", "  dead: 1, 2"]  # fmt: skip


@pytest.mark.parametrize("ending, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot(ending: str, magic: bytes, cli: Cli, coded: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / f"use.{ending}"
    cli("inspect", coded / "x86", "--codebooks", "--plot", file)
    assert file.read_bytes().startswith(magic) and file.stat().st_size > 5000 and list(file.parent.iterdir()) == [file]


def test_bad_input(cli: Cli, coded: Path, made: Made, tmp_path: Path) -> None:
    assert "no codebooks" in cli("inspect", made.library, "--codebooks").stdout
    assert json.loads(cli("inspect", made.onnx, "--codebooks", "--json").stdout)["codebooks"] == []
    assert "add --codebooks" in cli("inspect", coded / "q", "--plot", tmp_path / "a.png", code=2).stderr
    assert "at most one" in cli("inspect", coded / "q", "--codebooks", "--kernels", code=2).stderr
    assert ".png or .svg" in cli("inspect", coded / "q", "--codebooks", "--plot", tmp_path / "a.gif", code=2).stderr
    assert "nothing to draw" in cli("inspect", made.quantized, "--codebooks", "--plot", tmp_path / "a.png", code=2).stderr
    assert "inside the artifact" in cli("inspect", coded / "q", "--codebooks", "--plot", coded / "q" / "a.png", code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(coded: Path, tmp_path: Path) -> None:
    arguments = ["khtst-compile", "inspect", str(coded / "q"), "--codebooks", "--plot", str(tmp_path / "a.png")]
    code = f"import sys; sys.modules['matplotlib'] = None; sys.argv = {arguments!r}; import khtst_compile.__main__"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "pip install 'khtst-compile[zoo]'" in done.stderr and not list(tmp_path.iterdir())


def test_nothing_heavy_is_loaded(coded: Path) -> None:
    code = (
        "import sys; from khtst_compile import usage; "
        f"usage.codebooks({str(coded / 'x86')!r}); print({{'torch', 'tvm'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_quantize_says_what_it_froze(coded: Path) -> None:
    made = kc.inspect(coded / "q")
    (book,) = summarize(coded / "q", made, 1.0)["codebooks"]
    assert book["site"] == "quantizer" and book["codes"] == [16, 16, 16] and book["differ"] == 0 and book["vectors"] == 640
    assert "codebook quantizer (ResidualQuantizer): 16, 16, 16 codes of 16 features; of 640 calibration vectors 0 have" in _text(
        summarize(coded / "q", made, 1.0)
    )
