"""Every verb, through the installed command."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.cli import VERBS
from tests.cli.conftest import ROOT, Cli, Made
from tests.requirements import need

RECIPE = "smooth{alpha=0.5,keep_fp32=he*d} | w8a8{keep_fp32=he*d}"


def test_quantize_says_what_it_did(made: Made) -> None:
    printed = made.printed["quantize"]
    assert printed["recipe"] == RECIPE
    w8a8 = printed["passes"][-1]
    assert (w8a8["pass"], w8a8["changed"]) == ("w8a8", 2)
    assert [s["site"] for s in w8a8["skipped"]] == ["head"]
    assert artifact.read(made.quantized).kind == "quantized"


def test_lower_and_export_say_what_they_wrote(made: Made) -> None:
    assert made.printed["lower"]["target"] == "x86-avx2"
    (variant,) = made.printed["lower"]["variants"]
    assert "avx2" in variant["cpu_flags"] and variant["library"] == "model-avx2.so" and variant["build_s"] > 0
    assert Path(made.printed["lower"]["artifact"]) == made.library
    assert Path(made.printed["export"]["output"]) == made.onnx
    assert artifact.read(made.onnx).kind == "onnx"


def test_export_to_a_bare_file(cli: Cli, made: Made, tmp_path: Path) -> None:
    file = tmp_path / "new" / "m.onnx"
    done = cli("export", made.quantized, "-o", file, "--opset", 18)
    assert str(file) in done.stdout
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    assert [p.name for p in file.parent.iterdir()] == ["m.onnx"]


def test_run_gives_what_python_gives(cli: Cli, made: Made, tmp_path: Path) -> None:
    need("x86", kc_unavailable(made))
    x = np.random.default_rng(1).standard_normal((7, 32), dtype=np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    cli("run", made.library, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz", "--threads", 1)
    with np.load(tmp_path / "out.npz") as archive:
        got = {k: archive[k] for k in archive.files}
    want = kc.load(made.library, threads=1).run({"x": x})
    assert got.keys() == want.keys() == {"output"}
    assert np.array_equal(got["output"], want["output"]) and got["output"].shape == (7, 8)


def test_load_and_run_need_no_torch(made: Made) -> None:
    need("x86", kc_unavailable(made))
    program = (
        "import sys\nfor name in ('torch', 'onnx', 'onnxruntime', 'transformers'): sys.modules[name] = None\n"
        "import numpy as np, khtst_compile as kc\n"
        f"print(kc.load({str(made.library)!r}).run({{'x': np.zeros((2, 32), np.float32)}})['output'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(2, 8)", done.stderr


def test_verify_within_budget(cli: Cli, made: Made, tmp_path: Path) -> None:
    need("x86", kc_unavailable(made))
    report = json.loads(
        cli("verify", made.library, "--reference", made.quantized, "--junit", tmp_path / "r.xml", "--json").stdout
    )
    assert report["ok"] and report["first_over"] is None
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert suite.attrib["failures"] == "0" and len(suite.findall("testcase")) == len(report["rows"]) > 5


def test_bench_times_every_engine(cli: Cli, made: Made) -> None:
    need("x86", kc_unavailable(made))
    rows = json.loads(cli("bench", made.library, made.onnx, "--shape", 3, "--seconds", 0.01, "--json", "-q").stdout)
    ours = artifact.read(made.library).manifest["target"]["name"]
    engines = [f"khtst {ours}", "khtst onnx (ort)", "torch float32", "onnxruntime float32", "onnxruntime dynamic int8"]
    assert [r["engine"] for r in rows] == engines
    assert all(r["shape"] == {"batch": 3} and r["median_ms"] > 0 for r in rows)
    assert rows[0]["ratio"] == 1.0 and rows[2]["error_db"] is None
    # The same float32 graph: only the order of sums differs (2**-23 is -138 dB, and a few of them add up).
    assert rows[3]["error_db"] < -110 < rows[0]["error_db"] < -25


def test_inspect(cli: Cli, made: Made) -> None:
    found = json.loads(cli("inspect", made.library, "--json").stdout)
    assert found["kind"] == "library" and found["recipe"] == RECIPE
    short, long = cli("inspect", made.library).stdout, cli("inspect", made.library, "--all").stdout
    assert (
        "library for x86-avx2" in short
        and "x float32 (batch, 32)" in short
        and "w8a8 left alone 1: kept float32 as asked" in short
    )
    assert len(short.splitlines()) <= 24 < len(long.splitlines())  # one screen
    assert found["files"]["model-avx2.so"]["sha256"] in long


def test_passes_and_targets(cli: Cli) -> None:
    found = json.loads(cli("passes", "--json").stdout)
    assert list(found["passes"]) == ["freeze_codebook", "smooth", "rotate", "w8a8", "kv_cache"]
    assert {"name": "block", "type": "int", "default": 128} in found["passes"]["rotate"]["options"]
    targets = {t["name"]: t for t in json.loads(cli("targets", "--json").stdout)}
    assert targets["x86-avx2"]["is"] == "x86-avx2" and targets["x86"]["is"].startswith("x86-")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_the_common_options(cli: Cli, verb: str) -> None:
    shown = cli(verb, "--help").stdout
    assert all(option in shown for option in ("--json", "-q", "-v", "--threads", "--seed"))


def test_notes_go_to_standard_error_and_quiet_hides_them(cli: Cli, made: Made, tmp_path: Path) -> None:
    loud = cli("quantize", "tests.tiny:mlp", "--random", "-o", tmp_path / "a", "--recipe", "w8a8", "--limit", 8)
    quiet = cli("quantize", "tests.tiny:mlp", "--random", "-o", tmp_path / "b", "--recipe", "w8a8", "--limit", 8, "-q")
    assert "calibrate" in loud.stderr and "calibrate: " not in loud.stdout
    assert quiet.stderr == ""
    told = cli("quantize", "tests.tiny:mlp", "--random", "-o", tmp_path / "c", "--limit", 8, "-v", "--keep-fp32", "he*d")
    assert "INFO: w8a8 left alone head: kept float32 as asked" in told.stderr and " s] calibrated on" in told.stderr


def test_dump_and_seed_and_shapes(cli: Cli, tmp_path: Path) -> None:
    common = ("quantize", "tests.tiny:mlp", "--random", "--recipe", "w8a8", "--limit", 8, "-q")
    cli(*common, "-o", tmp_path / "a", "--dump", tmp_path / "graphs", "--shapes", "batch=2..6")
    cli(*common, "-o", tmp_path / "b", "--seed", 1)
    assert "quantize_rows" in (tmp_path / "graphs" / "00_w8a8.txt").read_text()
    a, b = artifact.read(tmp_path / "a"), artifact.read(tmp_path / "b")
    assert a.manifest["axes"] == {"batch": [2, 6]} and b.manifest["axes"] != a.manifest["axes"]
    assert not np.array_equal(a.arrays("golden.npz")["in/x"], b.arrays("golden.npz")["in/x"])


def kc_unavailable(made: Made) -> str | None:
    """Why the lowered artifact cannot run here, or None."""
    from khtst_compile import cpu

    lacking = cpu.missing(artifact.read(made.library).manifest["target"]["variants"][0]["cpu_flags"])
    return f"this CPU lacks {', '.join(lacking)}" if lacking else None
