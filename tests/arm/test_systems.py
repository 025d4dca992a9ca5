"""Libraries for musl and Android: linked with nothing of these systems, and with the bits of every other build."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.errors import UsageError
from khtst_compile.targets import table
from tests.arm import emulator
from tests.arm.test_program import check_golden

NEEDED = {"aarch64-linux-musl": [], "aarch64-linux-android": ["libc.so"]}
"""Triple -> the libraries that a model's library names."""
LARGEST_PAGE = 0x4000
"""Bytes of a page on some Android devices."""


def readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", option, str(library)], capture_output=True, text=True, check=True).stdout


def check_form(library: Path, needed: list[str]) -> None:
    dynamic = readelf("-d", library)
    assert re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) == needed
    assert "(HASH)" in dynamic and "(GNU_HASH)" in dynamic and "TEXTREL" not in dynamic and "(VERNEED)" not in dynamic
    wants = {line.split()[-1] for line in readelf("--dyn-syms", library).splitlines() if " UND " in line and "NOTYPE" in line}
    wants = {name for name in wants if not name.startswith("TVM")}
    assert "UND" in wants  # the table's first entry, which has no name: there is a table
    assert wants <= {"UND", "memset", "memcpy", "memmove"}


@pytest.mark.parametrize("triple", NEEDED)
def test_a_library_for_another_system(
    triple: str, text: Path, runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kc.lower(text.parent / "q", tmp_path / "a", target="arm-neon", triple=triple)
    (variant,) = artifact.read(tmp_path / "a", kind="library").manifest["target"]["variants"]
    library = tmp_path / "a" / variant["library"]
    assert variant["triple"] == triple
    check_form(library, NEEDED[triple])
    loads = [int(line.split()[-1], 16) for line in readelf("-l", library).splitlines() if line.split()[:1] == ["LOAD"]]
    assert loads and all(alignment % LARGEST_PAGE == 0 for alignment in loads)
    for name in NEEDED[triple]:  # here the runner's own C library has all that is wanted
        command = ["aarch64-linux-gnu-gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-xc", "/dev/null", "-o"]
        subprocess.run([*command, str(tmp_path / name)], check=True, timeout=emulator.LIMIT_S)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    check_golden(tmp_path / "a", "arm-neon", tmp_path / "run", runner)


def test_x86_with_musl(text: Path, tmp_path: Path) -> None:
    made = kc.lower(text.parent / "q", tmp_path / "a", target="x86-avx2", triple="x86_64-linux-musl")
    check_form(tmp_path / "a" / made.manifest["target"]["variants"][0]["library"], [])
    assert kc.verify(tmp_path / "a").ok  # glibc loads it, too


@pytest.mark.parametrize("name", ["x86", "x86-avx2", "arm"])
@pytest.mark.parametrize("triple", ["riscv64-linux-gnu", "aarch64-apple-darwin", "x86_64-linux-android", "musl", ""])
def test_a_triple_nothing_is_linked_for(name: str, triple: str) -> None:
    with pytest.raises(
        UsageError, match=rf"triple '{triple}': .* is built for .*-linux-gnu, .*-linux-musl.*; choose one"
    ) as refused:
        table.variants(name, triple)
    assert refused.value.exit_code == 2


def test_a_triple_of_another_processor(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="triple 'aarch64-linux-musl': avx2 is built for"):
        kc.lower(text.parent / "q", tmp_path / "a", target="x86-avx2", triple="aarch64-linux-musl")
    assert not (tmp_path / "a").exists()


def test_no_runner_where_tvm_has_none(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--emit-runner: built for aarch64-linux-musl; needed: .*glibc.*docs/device.md"):
        kc.lower(text.parent / "q", tmp_path / "a", target="arm-neon", triple="aarch64-linux-musl", emit_runner=True)
    assert not (tmp_path / "a").exists()
