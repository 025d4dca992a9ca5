"""The runner on a model: the bytes of Python's runtime, and one clear message with the right exit code for whatever is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.runner import emit
from tests.runner.conftest import HERE, SANITIZERS, Made, call, compile_c

ENGINE = sorted(p for p in emit.SOURCES.glob("*.c") if p.stem not in ("main", "verbs", "verify", "bench"))


def altered(made: Made, to: Path, **fields: Any) -> Path:
    """A copy of the artifact whose manifest has other fields; "target.cpu_flags" is that of its variant."""
    shutil.copytree(made.library, to)
    manifest = json.loads((to / artifact.MANIFEST).read_text())
    for name, value in fields.items():
        holder = (
            manifest["target"]["variants"][0] if name in ("cpu_flags", "triple", "layouts", "arrays", "library") else manifest
        )
        holder[name] = value
    (to / artifact.MANIFEST).write_text(json.dumps(manifest))
    return to


def refuse(made: Made, folder: Path, code: int, *says: str, words: tuple[object, ...] = ()) -> None:
    """The program refuses the artifact with that exit code, one message, and nothing on standard output."""
    done = made.run("verify", *words, folder=folder, code=code)
    assert done.stdout == "" and done.stderr.startswith("khtst-run: ") and done.stderr.count("\n") == 1
    assert all(s in done.stderr for s in says), done.stderr


def test_verify(made: Made) -> None:
    done = made.run("verify")
    assert "output: the same bits (32 values)" in done.stdout and "x86-avx2: all the same bits" in done.stdout
    assert call(made.runner / "run.sh", "verify").stdout.splitlines()[0] == done.stdout.splitlines()[0]


def test_verify_says_which_output_and_kernel_differ(made: Made, tmp_path: Path) -> None:
    folder = altered(made, tmp_path / "a")
    golden = dict(np.load(folder / artifact.GOLDEN))
    golden["lowered/output"].view(np.uint32)[1, 2] ^= 1
    np.savez(folder / artifact.GOLDEN, **golden)
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    kept = {k: v for k, v in manifest.items() if k not in ("format", "version", "files")}
    artifact.write_manifest(folder, kept)
    done = made.run("verify", folder=folder, code=1)
    assert "output: DIFFERS: 1 of 32 values; the first at place 10" in done.stdout
    assert "kernels: all have the values they had" in done.stdout  # their hashes are those of numpy's arrays
    assert "1 of 1 outputs differ" in done.stderr
    for number in (len(kept["taps"]) - 1, 1):
        kept["taps"][number]["sha256"] = "0" * 64
        artifact.write_manifest(folder, kept)
        said = made.run("verify", folder=folder, code=1).stdout
        assert f"kernels: the first that differs is at {kept['taps'][number]['site']}\n" in said
    np.savez(folder / artifact.GOLDEN, **{**golden, "lowered/output": golden["lowered/output"][:3]})
    artifact.write_manifest(folder, kept)
    assert "float32 (4, 8); golden: float32 (3, 8)" in made.run("verify", folder=folder, code=1).stdout
    np.savez(folder / artifact.GOLDEN, **{k: v for k, v in golden.items() if k != "lowered/output"})
    artifact.write_manifest(folder, kept)
    assert "golden.npz has no 'lowered/output'" in made.run("verify", folder=folder, code=2).stderr


@pytest.mark.parametrize("rows", [1, 3, 128, 1000])
@pytest.mark.parametrize("threads", [1, 2])
def test_run_gives_the_bytes_of_python(made: Made, tmp_path: Path, rows: int, threads: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 32), dtype=np.float32)
    np.savez_compressed(tmp_path / "in.npz", x=x)
    done = made.run("run", tmp_path / "in.npz", tmp_path / "out.npz", "--threads", threads)
    assert done.stdout.splitlines()[0] == f"output: float32 ({rows}, 8)"
    with np.load(tmp_path / "out.npz") as found:
        assert found["output"].tobytes() == kc.load(made.library).run({"x": x})["output"].tobytes()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["in.npz", "out.npz"]


@pytest.mark.parametrize("rows", [127, 255, 256, 1000])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_batches_go_in_parts(made: Made, tmp_path: Path, rows: int, threads: int) -> None:
    """A model said to be heavy runs 128 rows a thread at a time; the results are those of the whole batch."""
    program = [{**call, "macs": 10**9} for call in json.loads((made.library / artifact.MANIFEST).read_text())["program"]]
    folder = altered(made, tmp_path / "a", program=program)
    x = np.random.default_rng(rows).standard_normal((rows, 32), dtype=np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    made.run("run", tmp_path / "in.npz", tmp_path / "out.npz", "--threads", threads, folder=folder)
    with np.load(tmp_path / "out.npz") as found:
        assert found["output"].tobytes() == kc.load(made.library).run({"x": x})["output"].tobytes()


@pytest.mark.parametrize(
    "arrays, says",
    [
        ({"x": np.zeros((2, 31), np.float32)}, "input 'x': shape is (2, 31); needed: (batch, 32)"),
        ({"x": np.zeros(32, np.float32)}, "input 'x': shape is (32,); needed: (batch, 32)"),
        ({"x": np.zeros((2, 32))}, "input 'x': dtype is float64; needed: float32"),
        ({"x": np.zeros((0, 32), np.float32)}, "axis 'batch' is 0; needed: 1..4096"),
        ({"x": np.zeros((4097, 32), np.float32)}, "axis 'batch' is 4097; needed: 1..4096"),
        ({"y": np.zeros((2, 32), np.float32)}, "array 'y' is no input"),
        ({}, "has no array 'x'"),
    ],
)
def test_inputs_that_do_not_fit(made: Made, tmp_path: Path, arrays: dict[str, np.ndarray], says: str) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    done = made.run("run", tmp_path / "in.npz", tmp_path / "out.npz", code=2)
    assert says in done.stderr and not (tmp_path / "out.npz").exists()


def test_results_that_cannot_be_written(made: Made, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 32), np.float32))
    assert "cannot be written" in made.run("run", tmp_path / "in.npz", tmp_path / "no" / "out.npz", code=2).stderr
    (tmp_path / "folder").mkdir()
    assert "no ordinary file" in made.run("run", tmp_path / "in.npz", tmp_path / "folder", code=2).stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "in.npz"]
    (tmp_path / "there.npz").write_text("old")
    (tmp_path / "link.npz").symlink_to(tmp_path / "there.npz")
    made.run("run", tmp_path / "in.npz", tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink() and list(np.load(tmp_path / "there.npz")) == ["output"]


def test_bench_and_info(made: Made) -> None:
    lines = made.run("bench", "--seconds", 0.05, "--shape", 1, "--shape", 40).stdout.splitlines()
    assert lines[0] == "x86-avx2" and [line.split()[0] for line in lines[1:]] == ["shape", "1", "40"]
    _, median, least, late, runs = lines[2].split()
    assert 0 < float(least) <= float(median) <= float(late) and int(runs) >= 5
    said = made.run("info").stdout
    assert (
        "input x: float32 (batch, 32)" in said and "output output: float32 (batch, 8)" in said and "axis batch: 1..4096" in said
    )


@pytest.mark.parametrize(
    "words, says",
    [
        ((), "'' is no verb"),
        (("fly", "."), "'fly' is no verb"),
        (("verify",), "needs 1 words, found 0"),
        (("verify", ".", "x"), "'x' is one word too many"),
        (("verify", ".", "--seconds", "1"), "--seconds is no option of verify"),
        (("verify", ".", "--threads"), "a value after it"),
        (("verify", ".", "--threads", "0"), "--threads is '0'"),
        (("verify", ".", "--threads", "2x"), "--threads is '2x'"),
        (("bench", ".", "--seconds", "nan"), "--seconds is 'nan'"),
        (("bench", ".", "--seconds", "-1"), "--seconds is '-1'"),
        (("run", ".", "a.npz"), "needs 3 words, found 2"),
        (("verify", "/nowhere"), "/nowhere/manifest.json: no such file"),
        (("verify", ""), "no folder is named"),
    ],
)
def test_wrong_words(made: Made, words: tuple[str, ...], says: str) -> None:
    done = call(made.runner / emit.PROGRAM, *words, code=2)
    assert says in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "shape, says",
    [
        ("1x2", "2 sizes; needed: 1"),
        ("0", "'batch' is 0; needed: 1..4096"),
        ("x", "joined by x"),
        ("3x", "joined by x"),
        ("", "joined"),
    ],
)
def test_wrong_shapes(made: Made, shape: str, says: str) -> None:
    assert says in made.run("bench", "--shape", shape, code=2).stderr


def test_damaged_files(made: Made, tmp_path: Path) -> None:
    folder = altered(made, tmp_path / "a")
    for name in json.loads((folder / artifact.MANIFEST).read_text())["files"]:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refuse(made, folder, 2, f"'{name}' was altered")
        (folder / name).write_bytes(whole[:-1])
        refuse(made, folder, 2, f"'{name}' has {len(whole) - 1} bytes, the manifest says {len(whole)}")
        refuse(made, folder, 2, f"'{name}' has {len(whole) - 1} bytes", words=("--trust-files",))
        (folder / name).unlink()
        refuse(made, folder, 2, f"'{name}' is missing")
        (folder / name).write_bytes(whole)
    made.run("verify", folder=folder)
    golden = folder / artifact.GOLDEN
    golden.write_bytes(golden.read_bytes()[:-1] + b"\1")
    refuse(made, folder, 2, "golden.npz", words=("--trust-files",))  # its own reader notices


def test_damaged_manifests(made: Made, tmp_path: Path) -> None:
    text = (made.library / artifact.MANIFEST).read_bytes()
    folder = altered(made, tmp_path / "a")
    for size in (0, 1, 100, len(text) // 2, len(text) - 3):
        (folder / artifact.MANIFEST).write_bytes(text[:size])
        refuse(made, folder, 2, "cannot be read as JSON")
    manifest = json.loads(text)
    needed = ("format", "version", "kind", "inputs", "outputs", "axes", "files", "target", "weights")
    for name in needed:
        for value in (None, 7, "x", [1], {"a": 1}):
            (folder / artifact.MANIFEST).write_text(json.dumps({**manifest, name: value}))
            refuse(made, folder, 2, str(folder))
    (folder / artifact.MANIFEST).write_text(
        json.dumps({**manifest, "files": {"../x": {"sha256": "", "bytes": 1}, **manifest["files"]}})
    )
    refuse(made, folder, 2, "impossible file '../x'")


def test_other_versions(made: Made, tmp_path: Path) -> None:
    refuse(made, altered(made, tmp_path / "a", version=3), 2, "artifact version 3, this runner reads version 2")
    refuse(made, altered(made, tmp_path / "b", kind="quantized"), 2, "of kind 'quantized'; needed: 'library'")
    refuse(made, altered(made, tmp_path / "c", format="zip"), 2, "not one of a khtst-artifact")
    other = {"tvm": "0.26.0", "tvm_ffi": "0.1.14.post1"}
    refuse(made, altered(made, tmp_path / "d", made_by=other), 4, "built with tvm 0.26.0", "--emit-runner")
    refuse(made, made.quantized, 2, "of kind 'quantized'")


def test_a_cpu_that_lacks_features(made: Made, tmp_path: Path) -> None:
    folder = altered(made, tmp_path / "a", cpu_flags=["avx2", "warp_drive", "fm"])
    refuse(made, folder, 4, "x86-avx2 needs the CPU features avx2, warp_drive, fm; this CPU lacks warp_drive, fm;")
    (folder / "model-avx2.so").write_bytes(b"")  # nothing of it may be loaded, or even looked at, before that is said
    refuse(made, folder, 2, "has 0 bytes")
    foreign = altered(made, tmp_path / "b", triple="aarch64-linux-gnu")
    refuse(made, foreign, 4, "built for x86-avx2 (aarch64-linux-gnu); this is x86_64")
    refuse(made, made.library, 2, "has no variant 'x86-vnni'; it holds x86-avx2", words=("--variant", "x86-vnni"))


def test_arrays_that_do_not_fit(made: Made, tmp_path: Path) -> None:
    manifest = json.loads((made.library / artifact.MANIFEST).read_text())
    count = len(manifest["target"]["variants"][0]["arrays"])
    refuse(made, altered(made, tmp_path / "a", arrays=[99] * count), 2, "names an array that is not stored")
    refuse(made, altered(made, tmp_path / "b", layouts=[None]), 2, "not as many layouts")
    refuse(made, altered(made, tmp_path / "c", layouts=["7x7 in 49 as 0"] * count), 2, "'7x7 in 49 as 0' does not fit")
    weights = [{**w, "offset": 1 << 40} for w in manifest["weights"]]
    refuse(made, altered(made, tmp_path / "d", weights=weights), 2, "lies outside the file")
    refuse(made, altered(made, tmp_path / "e", library="golden.npy"), 2, "library is not among the files")


def test_a_library_that_is_none(made: Made, tmp_path: Path) -> None:
    folder = altered(made, tmp_path / "a")
    size = (folder / "model-avx2.so").stat().st_size
    (folder / "model-avx2.so").write_bytes(b"\0" * size)
    refuse(made, folder, 4, "model-avx2.so", words=("--trust-files",))


def test_runtime_libraries_that_are_missing(made: Made, tmp_path: Path) -> None:
    refuse(made, made.library, 4, "libtvm_ffi.so cannot be loaded", words=("--libraries", tmp_path))
    shutil.copy(made.runner / "lib" / "libtvm_ffi.so", tmp_path)
    refuse(made, made.library, 4, "libtvm_runtime.so cannot be loaded", words=("--libraries", tmp_path))


def test_weights_that_two_variants_read_differently(made: Made, tmp_path: Path) -> None:
    """Stored once, laid out when loaded."""
    kc.lower(made.quantized, tmp_path / "x86", target="x86", emit_runner=True)
    variants = json.loads((tmp_path / "x86" / artifact.MANIFEST).read_text())["target"]["variants"]
    assert any(text is not None for text in variants[-1]["layouts"])
    done = call(tmp_path / "x86" / "runner" / "run.sh", "verify", "--variant", "x86-avx2")
    assert "as x86-avx2: all the same bits" in done.stdout


@pytest.mark.parametrize("kernel_threads", [1, 2])
@pytest.mark.parametrize("models", [1, 2])
def test_threads(made: Made, tmp_path: Path, models: int, kernel_threads: int) -> None:
    program = compile_c(
        ["cc"], (f"-I{made.runner / 'src'}", f"-I{made.runner / 'include'}"), [HERE / "threads.c", *ENGINE], tmp_path / "t"
    )
    done = call(program, made.runner / "lib", kernel_threads, *[made.library] * models)
    assert done.stdout == "0 wrong\n"


def test_a_sanitized_build_does_all_of_it(made: Made, tmp_path: Path) -> None:
    """Address, leak and undefined-behavior checks of every path of the program, with TVM's libraries in the same process."""
    include = (f"-I{made.runner / 'src'}", f"-I{made.runner / 'include'}")
    program = compile_c(["cc"], (*SANITIZERS, *include), sorted(emit.SOURCES.glob("*.c")), tmp_path / "khtst-run")
    (tmp_path / "lib").symlink_to(made.runner / "lib")
    np.savez(tmp_path / "in.npz", x=np.ones((5, 32), np.float32))
    np.savez(tmp_path / "bad.npz", x=np.ones((5, 3), np.float32))
    out = tmp_path / "out.npz"
    for threads in (1, 2):
        call(program, "verify", made.library, "--threads", threads)
        call(program, "run", made.library, tmp_path / "in.npz", out, "--threads", threads)
        call(program, "bench", made.library, "--seconds", 0.01, "--shape", 1, "--shape", 64, "--threads", threads)
    heavy = [{**c, "macs": 10**9} for c in json.loads((made.library / artifact.MANIFEST).read_text())["program"]]
    call(program, "bench", altered(made, tmp_path / "c", program=heavy), "--seconds", 0.01, "--shape", 600)
    call(program, "info", made.library)
    call(program, "run", made.library, tmp_path / "bad.npz", out, code=2)
    call(program, "verify", made.library, "--libraries", tmp_path, code=4)
    call(program, "verify", altered(made, tmp_path / "a", cpu_flags=["warp_drive"]), code=4)
    call(program, "verify", altered(made, tmp_path / "b", version=9), code=2)
