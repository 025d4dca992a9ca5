"""Examples, the README's commands and the demo run, with a small model where the real one would take minutes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bert(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a one-layer sentence-embedding model."""
    return tiny.save_bert(tmp_path_factory.mktemp("models") / "bert", minilm)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A working folder with the examples in it, so that nothing is written into the source tree."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(command: list[str], cwd: Path) -> str:
    """Run with this environment's commands first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_examples_are_short() -> None:
    assert all(len(f.read_text(encoding="utf-8").splitlines()) <= 80 for f in (ROOT / "examples").glob("*.py"))


def test_tiny_mlp(tree: Path) -> None:
    assert "within budget: True" in run([sys.executable, "examples/tiny_mlp.py", "out"], tree)


def test_train_moe(tree: Path) -> None:
    shown = run([sys.executable, "examples/train_moe.py", "out", "--steps", "2", "--experts", "4", "--plot"], tree)
    assert len(re.findall(r"^.+ parameters  \d\.\d+ bits per byte", shown, re.MULTILINE)) == 4 and shown.count("dropped") == 2
    assert (tree / "out" / "training.png").stat().st_size > 10_000
    calibration = ["--calib", "out/calibration.npz", "--recipe", "w8a8", "--json", "-q"]
    done = json.loads(run(["khtst-compile", "quantize", "out/model.pt2", *calibration, "-o", "out/q"], tree))
    assert done


def test_custom_recipe(tree: Path) -> None:
    shown = run([sys.executable, "examples/custom_recipe.py", "out"], tree)
    errors = {m[1].strip(): float(m[2]) for m in re.finditer(r"^(\w[\w ]*?) +(-\d+\.\d) dB", shown, re.MULTILINE)}
    # Smoothing exists for the planted channel of outliers.
    assert len(errors) == 5 and errors["smoothed"] < errors["plain"]
    assert "layers.3: kept float32 as asked" in shown


def test_sentence_embeddings(tree: Path, bert: Path) -> None:
    shown = run([sys.executable, "examples/sentence_embeddings.py", str(bert), "out"], tree)
    cosines = [float(c) for c in re.search(r"original's: \[([^\]]*)\]", shown)[1].split()]  # type: ignore[index]
    # int8 with random weights: measured .9996 and better.
    assert len(cosines) == 3 and min(cosines) > 0.995


def test_artifact_module_equals_the_artifact(tree: Path, bert: Path) -> None:
    import khtst_compile as kc

    sentence_transformers = pytest.importorskip("sentence_transformers")
    kc.quantize(bert, tree / "q", calib=tree / "examples" / "data" / "wordnet_gloss_retrieval.json", recipe="w8a8", limit=16)
    kc.lower(tree / "q", tree / "x86")
    module = kc.integrations.sentence_transformers.ArtifactModule(tree / "x86", threads=1)
    texts = ["one", "a text of several words", "and another, which is cut where the model ends " * 10]
    model = sentence_transformers.SentenceTransformer(modules=[module])
    encoded = model.encode(texts, batch_size=8)
    original = sentence_transformers.SentenceTransformer(str(bert), device="cpu")
    assert np.array_equal(encoded, module.artifact.run(module.encoder(texts))["sentence_embedding"])
    assert np.array_equal(module.encoder(texts)["input_ids"], original.preprocess(texts)["input_ids"].numpy())
    assert model.get_embedding_dimension() == 32 and model.max_seq_length == original.max_seq_length == 48
    model.max_seq_length = 8
    assert module.encoder(texts)["input_ids"].shape == (3, 8)
    model.save(str(tree / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tree / "saved"), trust_remote_code=True)
    assert np.array_equal(again.encode(texts[:2]), encoded[:2])
    assert model.tokenizer(texts[:1])["input_ids"] == module.encoder(texts[:1])["input_ids"].tolist()
    assert model.tokenizer.model_max_length == 8


@pytest.mark.parametrize("axes, shape", [({"batch": [2, 3]}, "batch"), ({}, 3)])
def test_any_number_of_texts_goes_through_in_batches_the_artifact_takes(axes: dict[str, list[int]], shape: str | int) -> None:
    pytest.importorskip("sentence_transformers")
    from khtst_compile.integrations.sentence_transformers import run_in_parts
    from khtst_compile.signature import TensorSpec, check_inputs

    specs = (TensorSpec("x", "int64", (shape, 2)),)
    sizes: list[int] = []

    class Artifact:
        inputs, manifest = specs, {"axes": axes}

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            check_inputs(inputs, specs, axes, {})
            sizes.append(len(inputs["x"]))
            return {"y": inputs["x"] * 2}

    for total in (1, 2, 3, 4, 7):
        x = np.arange(2 * total).reshape(total, 2)
        assert np.array_equal(run_in_parts(Artifact(), {"x": x})["y"], 2 * x)  # type: ignore[arg-type]
    assert set(sizes) <= {2, 3}


def console_commands() -> list[str]:
    """Lines of the README's console blocks that are commands of this project; make and its environment are CI's to test."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [c for c in commands if not c.startswith("make ")]


def test_readme_commands(tree: Path, bert: Path) -> None:
    commands = [f"MODEL={bert}" if c.startswith("MODEL=") else c for c in console_commands()]
    assert len(commands) == 7
    run(["bash", "-euc", "\n".join(commands)], tree)
    assert json.loads((tree / "out" / "minilm-x86.json").read_text())["kind"] == "library"
    assert (tree / "out" / "minilm.onnx").is_file()


def test_readme_python(tree: Path) -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import khtst_compile" in b)
    shown = run([sys.executable, "-c", block], tree)
    wanted = re.findall(r"^print\(.*\) +# (.*)$", block, re.MULTILINE)
    assert [line for line in shown.splitlines() if line in wanted] == wanted and len(wanted) == 3


def test_python_page(tree: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shown = run([sys.executable, "-c", "\n".join(blocks)], tree).splitlines()
    wanted = re.findall(r"^ *print\(.*\) +# (.*)$", "\n".join(blocks), re.MULTILINE)
    assert len(wanted) == 7 and [line for line in shown if line in wanted] == wanted
    assert all(f"`{name}(" in page for name in ("quantize", "lower", "export", "verify", "inspect", "bench", "load"))


def test_calibration_page_names_what_is_read(tree: Path) -> None:
    page = (ROOT / "docs" / "calibration.md").read_text()
    commands = [c for b in re.findall(r"```console\n(.*?)```", page, re.DOTALL) for c in b.splitlines() if c.startswith("$ ")]
    assert len(commands) == 3
    np.save(tree / "x.npy", np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32))
    run(["bash", "-euc", "\n".join(c[2:] for c in commands)], tree)
    assert json.loads((tree / "out" / "b" / "manifest.json").read_text())["axes"] == {"batch": [1, 64]}
    from khtst_compile.capture.tasks import TASKS

    assert all(f"`{task}`" in page for task in TASKS)


def test_readme_names_every_verb() -> None:
    from khtst_compile.cli import VERBS

    assert [v for v in VERBS if f"`{v}" not in README] == []


def test_demo(tree: Path, bert: Path) -> None:
    options = ["--model", str(bert), "--texts", "20", "--shape", "1x8", "--seconds", "0.01", "--recipe", "w8a8", "--json", "-q"]
    data = ["--data", "examples/data/wordnet_gloss_retrieval.json"]
    report = json.loads(run(["khtst-compile", "demo", "-o", "out", *options, *data], tree))
    assert report["ok"] and report["quality"][0]["engine"] == "torch float32"
    assert all(q["error_db"] < -20 for q in report["quality"][1:])
    assert {tuple(r["shape"].values()) for r in report["speed"]} == {(1, 8)}
    assert sorted(p.name for p in (tree / "out").iterdir()) == ["onnx", "quantized", "x86"]


def test_docs_list_every_recipe_and_every_manifest_field() -> None:
    from khtst_compile import artifact
    from khtst_compile.recipe import RECIPES

    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").replace("\\|", "|")
    assert [n for n, text in RECIPES.items() if f"| `{n}` | " + (f"`{text}`" if text else "(nothing)") not in recipes] == []
    fields = (ROOT / "docs" / "artifact.md").read_text(encoding="utf-8")
    known = {*artifact._FIELDS, *(f for more in artifact._BY_KIND.values() for f in more)}
    assert [f for f in sorted(known) if f"`{f}`" not in fields] == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
            if not link.startswith("http") and not (file.parent / link).exists():
                broken.append(f"{file.name}: {link}")
    assert broken == []
