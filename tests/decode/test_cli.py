"""`khtst-compile generate` and `perplexity` through the installed command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import khtst_compile as kc
from tests.cli.conftest import ROOT, SCRIPT, run_cli


def test_generate_streams_text(made: Any) -> None:
    done = run_cli("generate", made.w8a8, "--prompt", "some text", "--max-new-tokens", 12, "--ignore-end", "--threads", 1)
    steps = list(kc.load(made.w8a8, threads=1).generate("some text", max_new_tokens=12, ignore_end=True))
    assert done.stdout.rstrip("\n") == "".join(s.text for s in steps).rstrip("\n")
    assert "9 prompt tokens" in done.stderr
    printed = json.loads(run_cli("generate", made.w8a8, "--prompt", "some text", "--max-new-tokens", 3, "--json", "-q").stdout)
    assert printed["ids"] == [int(s.ids[0]) for s in steps[: len(printed["ids"])]]
    assert printed["prompt_tokens"] == 9 and printed["decode_tokens_per_s"] > 0
    drawn = ["--temperature", 2, "--top-k", 50, "--top-p", 0.9, "--seed", 5, "--max-new-tokens", 8, "--json", "-q"]
    assert len({run_cli("generate", made.w8a8, "--prompt", "x", *drawn).stdout.split('"prefill_s"')[0] for _ in range(2)}) == 1


def test_generate_refuses(made: Any, tmp_path: Path) -> None:
    assert "at most 63" in run_cli("generate", made.w8a8, "--prompt", "x" * 64, code=2).stderr
    assert "needed: 'library'" in run_cli("generate", made.quantized, "--prompt", "x", code=2).stderr
    assert "no token" in run_cli("generate", made.w8a8, "--prompt", "", code=2).stderr
    assert "top_p is 2.0" in run_cli("generate", made.w8a8, "--prompt", "x", "--top-p", 2, code=2).stderr


def test_an_int8_cache_is_asked_for(made: Any, tmp_path: Path) -> None:
    asked = ("quantize", made.folder, "--recipe", "w8a8", "--kv-cache", "int8", "-o", tmp_path / "q", "--json", "-q")
    assert "--calib" in run_cli(*asked, code=2).stdout
    done = run_cli(*asked, "--calib", made.folder.parent / "calib.json", "--max-length", 16, "--limit", 4)
    printed = json.loads(done.stdout)
    assert printed["recipe"] == "w8a8 | kv_cache" and [p["changed"] for p in printed["passes"]] == [15, 2]
    mlp = ("quantize", "tests.tiny:mlp", "--random", "--kv-cache", "int8", "-o", tmp_path / "mlp")
    assert "keeps no keys and values" in run_cli(*mlp, code=3).stderr
    run_cli("generate", made.int8, "--prompt", "some text", "--max-new-tokens", 3, "--ignore-end", "-q")


def test_perplexity_prints_both(made: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some words to judge\nand some more of them\n")
    asked = ("perplexity", made.w8a8, "--data", tmp_path / "t.txt", "--reference", made.quantized, "--max-length", 10)
    printed = json.loads(run_cli(*asked, "--json", "-q").stdout)
    assert printed["tokens"] == printed["reference"]["tokens"] == 36
    assert abs(printed["rise"]) < 1e-2
    assert "perplexity" in run_cli(*asked).stdout


def test_commands_of_the_page(made: Any, tmp_path: Path) -> None:
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "decode.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    assert commands[0] == "python scripts/smollm2.py out/smollm2" and len(commands) == 5
    shutil.copytree(made.folder, tmp_path / "out" / "smollm2")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = {"PATH": f"{SCRIPT.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(commands[1:])
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "against the reference" in done.stdout
