"""Every class of failure: one message, one exit code, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from khtst_compile import artifact
from khtst_compile.cli.failures import describe
from tests.cli.conftest import ROOT, SCRIPT, Cli, Made


def edited(source: Path, destination: Path, edit: Any) -> Path:
    """A copy of an artifact whose manifest `edit` changed; hashes and sizes of files are brought up to date."""
    shutil.copytree(source, destination)
    manifest = json.loads((destination / "manifest.json").read_text())
    edit(manifest, destination)
    for name, entry in manifest["files"].items():
        file = destination / name
        entry.update(sha256=artifact.sha256(file), bytes=file.stat().st_size)
    (destination / "manifest.json").write_text(json.dumps(manifest))
    return destination


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("quantize", "no/such/model", "--random", "-o", "{tmp}/q"), "no such file or folder"),
        (("quantize", "tests.tiny:mlp", "-o", "{tmp}/q"), "--calib"),
        (("quantize", "tests.tiny:mlp", "--calib", "{tmp}/none.npy", "-o", "{tmp}/q"), "none.npy"),
        (("quantize", "tests.tiny:mlp", "--random", "-o", "{tmp}/q", "--recipe", "smoth"), "did you mean 'smooth'"),
        (("quantize", "tests.tiny:mlp", "--random", "-o", "{tmp}/q", "--shapes", "batch"), "NAME=MIN..MAX"),
        (("lower", "{tmp}", "-o", "{tmp}/l"), "not an artifact"),
        (("lower", "{tmp}", "-o", "{tmp}/l", "--nonsense"), "--nonsense"),
        (("bench", "{tmp}", "--shape", "8by128"), "8x128"),
        (("run", "{tmp}", "--inputs", "{tmp}/none.npz", "--outputs", "{tmp}/y.npz"), "none.npz"),
        (("fly",), "fly"),
    ],
)
def test_usage_is_2(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = cli(*(a.replace("{tmp}", str(tmp_path)) for a in arguments), code=2)
    assert done.stderr.splitlines()[-1].startswith("error: ") and says in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_json_errors_are_objects_on_standard_output(cli: Cli, tmp_path: Path) -> None:
    for arguments in (("inspect", tmp_path, "--json"), ("inspect", "--json")):
        error = json.loads(cli(*arguments, code=2).stdout)["error"]
        assert error["exit_code"] == 2 and error["message"]


def test_unsupported_is_3(cli: Cli, tmp_path: Path) -> None:
    done = cli("quantize", "tests.tiny:broken", "--random", "-o", tmp_path / "q", code=3)
    assert "no weights today" in done.stderr and "tiny.py" in done.stderr
    cli("quantize", "tests.tiny:unsupported", "--random", "-o", tmp_path / "q", "--recipe", "w8a8", "--limit", 8)
    for verb in ("lower", "export"):
        done = cli(verb, tmp_path / "q", "-o", tmp_path / verb, code=3)
        assert "_linalg_svd" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_an_artifact_for_another_cpu_is_4(cli: Cli, made: Made, tmp_path: Path) -> None:
    def edit(manifest: dict[str, Any], folder: Path) -> None:
        manifest["target"]["variants"][0]["cpu_flags"].append("avx9000")

    foreign = edited(made.library, tmp_path / "foreign", edit)
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 32), np.float32))
    done = cli("run", foreign, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz", code=4)
    assert "avx9000" in done.stderr and not (tmp_path / "out.npz").exists()


def test_over_budget_is_1_and_names_the_layer(cli: Cli, made: Made, tmp_path: Path) -> None:
    def edit(manifest: dict[str, Any], folder: Path) -> None:
        data = bytearray((folder / "weights.bin").read_bytes())
        entry = next(w for w in manifest["weights"] if w["dtype"] == "int8")
        data[entry["offset"]] ^= 0x40
        (folder / "weights.bin").write_bytes(data)

    faulty = edited(made.library, tmp_path / "faulty", edit)
    done = cli("verify", faulty, "--reference", made.quantized, "--json", code=1)
    first = json.loads(done.stdout)["first_over"]
    assert first["site"] == "block.up" and "block.up" in done.stderr


def test_damage_is_2(cli: Cli, made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.library, tmp_path / "cut")
    with (tmp_path / "cut" / "weights.bin").open("r+b") as stream:
        stream.truncate(64)
    assert "weights.bin" in cli("verify", tmp_path / "cut", code=2).stderr
    shutil.copytree(made.library, tmp_path / "altered")
    with (tmp_path / "altered" / "model-avx2.so").open("r+b") as stream:
        stream.write(b"\0")
    assert "model-avx2.so" in cli("verify", tmp_path / "altered", code=2).stderr


def test_wrong_arrays_are_2(cli: Cli, made: Made, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 31), np.float32))
    done = cli("run", made.library, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz", code=2)
    assert "'x'" in done.stderr and "31" in done.stderr and not (tmp_path / "out.npz").exists()


def test_codes_of_failures_that_cannot_be_provoked() -> None:
    assert describe(MemoryError())[0] == 5
    assert describe(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))[0] == 5
    assert describe(OSError(28, "No space left on device", "/x"))[0] == 5
    assert describe(click.Abort())[0] == 130
    code, _, message = describe(ZeroDivisionError("division by zero"))
    assert code == 70 and "ZeroDivisionError" in message and "-v" in message


def test_output_that_is_not_an_artifact_is_left_alone(cli: Cli, made: Made, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "not an artifact" in cli("lower", made.quantized, "-o", tmp_path / "mine", code=2).stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def started(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPT), *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    pytest.fail(f"the process ended without saying {word!r}")


def wait_for_temporary(folder: Path, name: str, process: subprocess.Popen[str]) -> None:
    while not any(p.name.startswith(f".{name}.tmp-") for p in folder.iterdir()):
        assert process.poll() is None, "the process ended before it wrote anything"
        time.sleep(0.01)


def test_kill_in_the_middle_leaves_no_half_artifact(cli: Cli, made: Made, tmp_path: Path) -> None:
    quantize = ("quantize", "tests.tiny:mlp", "--calib", made.samples, "-o", tmp_path / "q", "--recipe", "w8a8")
    lower = ("lower", made.quantized, "-o", tmp_path / "l")
    process = started(*quantize)
    wait_for_line(process, "captured")
    process.kill()
    process.wait()
    process = started(*lower)
    wait_for_temporary(tmp_path, "l", process)
    process.kill()
    process.wait()
    assert not (tmp_path / "q").exists() and not (tmp_path / "l").exists()
    assert len(list(tmp_path.iterdir())) == 2  # what was being written
    cli(*quantize)
    cli(*lower)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l", "q"]
    assert artifact.read(tmp_path / "l").kind == "library"


def test_interrupt_is_130_and_says_what_was_done(made: Made, tmp_path: Path) -> None:
    process = started("quantize", "tests.tiny:mlp", "--random", "--limit", 100_000, "-o", tmp_path / "q", "--recipe", "w8a8")
    wait_for_line(process, "captured")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130
    assert "interrupted; done so far: captured" in stderr and "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_closed_output_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen([str(SCRIPT), "passes", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    _, stderr = process.communicate()
    assert process.returncode == 141 and stderr == ""
