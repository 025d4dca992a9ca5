"""`inspect --kernels`: the program as executed, counted by hand for a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from khtst_compile import artifact
from khtst_compile.cli.inspect import parse_sizes
from khtst_compile.errors import UsageError
from khtst_compile.listing import list_kernels
from tests.cli.conftest import Cli, Made
from tests.requirements import need


@pytest.fixture(autouse=True)
def runnable(made: Made) -> None:
    from khtst_compile import cpu

    lacking = [cpu.missing(v["cpu_flags"]) for v in artifact.read(made.library).manifest["target"]["variants"]]
    need("x86", None if [] in lacking else f"this CPU lacks {', '.join(lacking[-1])}")


def test_rows_are_the_program_in_order_with_its_work(cli: Cli, made: Made) -> None:
    found = json.loads(cli("inspect", made.library, "--kernels", "--shapes", "batch=5", "--json").stdout)
    rows = [r for r in found["rows"] if r["operator"]]
    assert [r["operator"] for r in rows] == ["norm_quantize", "w8a8_gemm", "act_quantize", "w8a8_gemm", "linear"]
    assert [r["site"] for r in rows if r["macs"]] == ["block.up", "block.down", "head"]
    assert [r["macs"] for r in rows] == [0, 5 * 32 * 64, 0, 5 * 64 * 32, 5 * 32 * 8]
    assert [r["products"] for r in rows] == ["float32", "int8", "float32", "int8", "float32"]
    # head: input, weights, bias, output, all float32; a bias of 32 bytes stays in the library.
    assert rows[-1]["bytes"] == 4 * (5 * 32 + 32 * 8 + 8 + 5 * 8) and rows[-1]["weight_bytes"] == 4 * 32 * 8
    assert found["sizes"] == {"batch": 5} and found["run_s"] is None and found["totals"]["linear_share"] is None
    assert all(r["measured_s"] is None and r["expected_s"] > 0 for r in rows)
    assert found["totals"]["macs"] == found["totals"]["linear_macs"] == sum(r["macs"] for r in rows)


def test_default_sizes_are_those_of_the_golden_inputs(made: Made) -> None:
    assert list_kernels(made.library).sizes == {"batch": 4}


def test_time_measures_every_kernel(cli: Cli, made: Made) -> None:
    found = list_kernels(made.library, sizes={"batch": 512}, timed=True)
    assert found.run_s is not None
    spent = [r.measured_s for r in found.rows]
    assert all(s is not None and s > 0 for s in spent)
    total = found.totals
    assert total["kernels_s"] == pytest.approx(sum(s for s in spent if s))
    assert total["linear_share"] == pytest.approx(sum(r.linear / found.peak.macs(r.products) for r in found.rows) / found.run_s)
    assert all(r.share == pytest.approx(r.expected_s / r.measured_s) for r in found.rows if r.measured_s)
    shown = cli("inspect", made.library, "--kernels", "--time").stdout
    assert "block.down" in shown and "a whole run" in shown and "share" in shown.splitlines()[0]


def test_wrong_options_are_refused(cli: Cli, made: Made) -> None:
    assert "add --kernels" in cli("inspect", made.library, "--time", code=2).stderr
    assert "no dynamic axis 'rows'" in cli("inspect", made.library, "--kernels", "--shapes", "rows=3", code=2).stderr
    assert "needed: 1.." in cli("inspect", made.library, "--kernels", "--shapes", "batch=0", code=2).stderr
    assert "'library'" in cli("inspect", made.quantized, "--kernels", code=2).stderr
    assert parse_sizes("batch=1,seq=128") == {"batch": 1, "seq": 128} and parse_sizes(None) == {}
    with pytest.raises(UsageError, match="AXIS=N"):
        parse_sizes("1x128")


@pytest.mark.parametrize("change", ["none", "text", "field"])
def test_an_artifact_that_lists_no_calls_is_refused(cli: Cli, made: Made, tmp_path: Path, change: str) -> None:
    broken = tmp_path / "x86"
    shutil.copytree(made.library, broken)
    manifest = json.loads((broken / artifact.MANIFEST).read_text())
    program = manifest.pop("program")
    if change != "none":
        manifest["program"] = "all of it" if change == "text" else [{**program[0], "macs": "many"}]
    (broken / artifact.MANIFEST).write_text(json.dumps(manifest))
    assert "program" in cli("inspect", broken, "--kernels", code=2).stderr
