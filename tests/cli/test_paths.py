"""Outputs that cannot be written, inputs that are none, processes that end early: the right exit code, and nothing left behind."""

from __future__ import annotations

import errno
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from khtst_compile import artifact, checks
from khtst_compile.errors import ResourceError, UsageError
from khtst_compile.lower.onnx import export_onnx
from tests.cli.conftest import Cli, Made
from tests.cli.test_failures import started, wait_for_line, wait_for_temporary


def outputs(folder: Path) -> dict[str, Path]:
    """Paths that cannot become an output, whoever asks."""
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "below a file": folder / "file" / "x",
        "where nobody may write": Path("/proc/khtst"),
        "too long a name": folder / ("a" * 300),
        "a loop of links": folder / "loop",
        "an impossible name": folder / "a\0b",
    }


@pytest.mark.parametrize(
    "name", ["below a file", "where nobody may write", "too long a name", "a loop of links", "an impossible name"]
)
def test_an_output_that_cannot_be_written_is_a_usage_error(name: str, tmp_path: Path) -> None:
    path = outputs(tmp_path)[name]
    for stage in (artifact.staging, artifact.staged_file):
        with pytest.raises(UsageError, match="choose another output"), stage(path):
            pytest.fail("work must not start")


def test_a_full_disk_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no space left"), artifact.writable(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ResourceError, match=r"MB free.*needs about"):
        checks.require_space(tmp_path, 2**62, "an artifact")


def test_nothing_is_written_into_another_artifact(made: Made, tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(made.library, tmp_path / "lib")
    before = sorted((tmp_path / "lib").rglob("*"))
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 32), np.float32))
    for output in ("golden.npz", "new/out.npz"):
        done = cli("run", tmp_path / "lib", "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "lib" / output, code=2)
        assert "lies inside the artifact" in done.stderr
    with pytest.raises(UsageError, match="lies inside the artifact"), artifact.staging(tmp_path / "lib" / "x"):
        pass
    assert sorted((tmp_path / "lib").rglob("*")) == before and artifact.read(tmp_path / "lib")


def test_a_link_to_the_output_stays_a_link(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.quantized, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with artifact.staging(tmp_path / "link") as folder:
        shutil.copytree(made.quantized, folder, dirs_exist_ok=True)
        (folder / "new").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "new").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_inputs_of_run(cli: Cli, made: Made, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 32), np.float32))
    np.savez(tmp_path / "y.npz", y=np.zeros((2, 32), np.float32))
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    for name, says in (("a.npy", "not a plain .npz"), ("y.npz", "missing ['x']"), ("cut.npz", "not a plain .npz")):
        done = cli("run", made.library, "--inputs", tmp_path / name, "--outputs", tmp_path / "out.npz", code=2)
        assert says in done.stderr and not (tmp_path / "out.npz").exists()


def test_other_outputs_are_checked_too(cli: Cli, made: Made, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "x"
    cli("demo", "-o", below.parent, code=2)
    cli("export", made.quantized, "-o", below.with_suffix(".onnx"), code=2)
    cli("quantize", "tests.tiny:mlp", "--random", "-o", tmp_path / "q", "--dump", below, code=2)
    cli("bench", made.library, "--seconds", "nan", code=2)
    cli("bench", made.library, "--seconds", "inf", code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_the_disk_is_checked_before_llvm_or_torch_write(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import khtst_compile as kc

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match="temporary folder"):
        kc.lower(made.quantized, tmp_path / "l")
    with pytest.raises(ResourceError, match="quantized program"):
        kc.quantize("tests.tiny:mlp", tmp_path / "q", random=True, recipe="w8a8", limit=4)
    assert list(tmp_path.iterdir()) == []


def test_onnx_tells_a_full_disk_from_a_wrong_path(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from khtst_compile import api

    program = api.load_program(artifact.read(made.quantized))
    for number, kind in ((errno.ENOSPC, ResourceError), (errno.EROFS, UsageError)):

        def fail(*args: object, number: int = number, **options: object) -> None:
            raise OSError(number, "reason")

        monkeypatch.setattr("khtst_compile.lower.onnx.ir.save", fail)
        with pytest.raises(kind):
            export_onnx(program, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_termination_is_143_and_leaves_nothing(made: Made, tmp_path: Path) -> None:
    process = started("lower", made.quantized, "-o", tmp_path / "l")
    wait_for_temporary(tmp_path, "l", process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 143 and "terminated;" in stderr and "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_factory_prints_or_exits_with(cli: Cli, tmp_path: Path) -> None:
    done = cli("quantize", "tests.tiny:chatty", "--random", "--limit", 4, "-o", tmp_path / "q", "--recipe", "w8a8", "--json")
    assert done.stdout.startswith("{") and "building" not in done.stdout and "running" not in done.stdout
    assert "building" in done.stderr and "running" in done.stderr
    for name, where in (("exits", "tiny.py"), ("exits_later", "sys.exit(0)")):
        done = cli("quantize", f"tests.tiny:{name}", "--random", "-o", tmp_path / name, code=3)
        assert where in done.stderr and not (tmp_path / name).exists()


def test_termination_says_what_was_done(tmp_path: Path) -> None:
    process = started("quantize", "tests.tiny:mlp", "--random", "--limit", 100_000, "-o", tmp_path / "q", "--recipe", "w8a8")
    wait_for_line(process, "captured")
    process.terminate()
    _, stderr = process.communicate()
    assert process.returncode == 143 and "terminated; done so far: captured" in stderr
    assert list(tmp_path.iterdir()) == []
