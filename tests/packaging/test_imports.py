"""Imports run one way, and starting up loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "tvm", "tvm_ffi", "onnx", "onnxruntime", "onnxscript", "transformers", "tokenizers", "numpy")


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package, passes/ and targets/ included."""
    files = [p for top in ("khtst_compile", "passes", "targets") for p in (ROOT / top).rglob("*.py")]
    named = {}
    for file in files:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[0] != "khtst_compile":
            parts.insert(0, "khtst_compile")
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def package_of(file: Path) -> list[str]:
    """targets/kernels/act.py -> ["khtst_compile", "targets", "kernels"]."""
    parts = list(file.relative_to(ROOT).parts[:-1])
    return parts if parts[0] == "khtst_compile" else ["khtst_compile", *parts]


def imported(file: Path) -> set[str]:
    """Dotted names a file imports anywhere in it, those for type checking alone left out."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package_of(file)[: len(package_of(file)) - node.level + 1]] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{origin}.{a.name}" for a in node.names}
        pending += list(ast.iter_child_nodes(node))
    return found


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


# importer -> what it must never import
FORBIDDEN = [
    ("khtst_compile.passes", ("khtst_compile.targets", "khtst_compile.lower", "khtst_compile.cli", "khtst_compile.api", "tvm")),
    ("khtst_compile.targets", ("khtst_compile.passes", "khtst_compile.lower", "khtst_compile.cli", "khtst_compile.api")),
    (
        "khtst_compile.quant",
        ("khtst_compile.program", "khtst_compile.contract", "khtst_compile.passes", "torch.fx", "torch.export"),
    ),
    (
        "khtst_compile.ops",
        ("khtst_compile.program", "khtst_compile.passes", "khtst_compile.targets", "khtst_compile.lower", "tvm"),
    ),
    ("khtst_compile.capture", ("khtst_compile.passes", "khtst_compile.targets", "khtst_compile.lower", "khtst_compile.api")),
    ("khtst_compile.runner", ("torch", "khtst_compile.lower", "khtst_compile.targets", "khtst_compile.api")),
    (
        "khtst_compile.zoo",
        (
            "khtst_compile.passes",
            "khtst_compile.targets",
            "khtst_compile.lower",
            "khtst_compile.capture",
            "khtst_compile.api",
            "khtst_compile.cli",
            "khtst_compile.runtime",
            "tvm",
        ),
    ),
    ("khtst_compile.runtime", ("torch", "khtst_compile.program", "khtst_compile.api")),
]


@pytest.mark.parametrize("importer, forbidden", FORBIDDEN, ids=[f[0] for f in FORBIDDEN])
def test_imports_run_one_way(importer: str, forbidden: tuple[str, ...]) -> None:
    wrong = {
        f"{name} imports {target}"
        for name, file in modules().items()
        if within(name, importer)
        for target in imported(file)
        if within(target, *forbidden)
    }
    assert not wrong


def test_only_lowering_targets_and_runtime_import_tvm() -> None:
    allowed = ("khtst_compile.lower", "khtst_compile.targets", "khtst_compile.runtime", "khtst_compile.workers")
    users = {name for name, file in modules().items() if any(within(t, "tvm", "tvm_ffi") for t in imported(file))}
    assert users and {n for n in users if not within(n, *allowed)} == set()


def test_only_the_entry_point_imports_the_command_line() -> None:
    users = {name for name, file in modules().items() if any(within(t, "khtst_compile.cli") for t in imported(file))}
    assert {n for n in users if not within(n, "khtst_compile.cli")} == {"khtst_compile.__main__"}


@pytest.mark.parametrize(
    "statement",
    [
        "import khtst_compile",
        "from khtst_compile.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from khtst_compile.cli import main\ntry: main(['quantize', '--help'])\nexcept SystemExit: pass",
        "from khtst_compile.cli import main\ntry: main(['passes', '--json'])\nexcept SystemExit: pass",
    ],
)
def test_starting_up_loads_nothing_heavy(statement: str) -> None:
    program = f"{statement}\nimport sys\nprint('loaded:', *(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_public_names_stay_functions() -> None:
    program = (
        "import khtst_compile as kc, khtst_compile.lower, khtst_compile.benchmark\n"
        "assert all(callable(getattr(kc, n)) for n in kc.__all__ if n not in ('__version__', 'integrations')), kc.__all__\n"
        "try: kc.lower('nowhere', 'x')\n"
        "except kc.errors.ArtifactError: print('called')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "called"
