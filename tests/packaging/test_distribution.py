"""What is built and installed is what stands in the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("khtst_compile", "passes", "targets")


def in_tree() -> set[str]:
    """Every module of the tree by its installed path."""
    found = set()
    for top in TOPS:
        for file in (ROOT / top).rglob("*.py"):
            name = str(file.relative_to(ROOT))
            found.add(name if top == "khtst_compile" else f"khtst_compile/{name}")
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as git would hand it out: links kept, nothing built."""
    target = tmp_path_factory.mktemp("clone") / "khtst-compile"
    target.mkdir()
    for name in (*TOPS, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(clone)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_the_wheel_holds_every_module(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {n for n in names if n.endswith(".py")} == in_tree()
    assert "khtst_compile/py.typed" in names
    runner = {str(p.relative_to(ROOT)) for p in (ROOT / "khtst_compile" / "runner").rglob("*") if p.parent.name in ("c", "board")}
    assert runner and runner <= names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_the_sdist_holds_passes_and_targets_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [n.partition("/")[2] for n in archive.getnames() if n.endswith(".py")]
    assert len(names) == len(set(names))
    inside = {n if n.startswith("khtst_compile/") else f"khtst_compile/{n}" for n in names}
    assert in_tree() <= inside


def test_an_uninstalled_clone_imports_its_own_code(clone: Path) -> None:
    program = (
        "import khtst_compile, khtst_compile.passes.w8a8 as p, khtst_compile.targets.table as t\n"
        "print(khtst_compile.__file__, p.__file__, t.__file__, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=clone, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(clone)}
    )
    assert all(line.startswith(str(clone)) for line in done.stdout.split()), done.stdout


def test_pins_agree() -> None:
    """The exact pins of pyproject.toml are those of constraints.txt, and constraints name public versions."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    exact = re.findall(r'^  "([\w.-]+)==([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(exact).keys() >= {"apache-tvm", "apache-tvm-ffi"}
    assert {name: pinned.get(name) for name, _ in exact} == dict(exact)
    assert not [v for v in pinned.values() if "+" in v] and pinned["torch"].startswith("2.13")


def test_doctor_knows_the_pins() -> None:
    from khtst_compile.doctor import EXACT, check_exact, check_floor

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{name}=={version}"' in text for name, (version, _) in EXACT.items())
    bad = check_exact("apache-tvm-ffi", "0.1.15")
    assert bad.status == "bad" and "tensorize" in bad.advice and "0.1.14.post1" in bad.advice
    assert check_floor("torch", "2.12.1").status == "bad" and check_floor("torch", "2.13.0+cpu").status == "ok"
    assert check_floor("torch", None).found == "not installed"
