"""Whole programs for ARM under emulation: the bits that x86 gives."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile import artifact, doctor_target
from khtst_compile.capture.factory import capture_module
from khtst_compile.errors import EnvironmentProblem
from khtst_compile.lower.digest import digest
from khtst_compile.runtime import logical
from tests.arm.decode import check_steps
from tests.arm.emulator import CPUS, Job, program

VARIANTS = ("arm-i8mm", "arm-dotprod", "arm-neon")


def cpu_of(variant: str) -> str:
    return CPUS[variant.removeprefix("arm-")]


def run(folder: Path, variant: str, inputs: Sequence[np.ndarray], place: Path, runner: Path) -> tuple[Path, Path]:
    """Run `taps` and `main`; returns what the files of their results begin with."""
    job = Job(place, runner)
    ids = " ".join(map(str, program(artifact.read(folder, kind="library"), variant, inputs, job)["ids"]))
    job.lines += [f"vm taps {place / 'tap'} {ids}", f"main {place / 'result'} {len(inputs)} {ids}"]
    job.run(cpu_of(variant))
    return place / "tap", place / "result"


def check_golden(path: Path, variant: str, place: Path, runner: Path) -> None:
    """On the golden inputs, every kernel's value has the hash and every output the bits that the artifact says."""
    folder = artifact.read(path, kind="library")
    golden = folder.arrays(artifact.GOLDEN)
    inputs = [golden[f"in/{entry['name']}"] for entry in folder.manifest["inputs"]]
    taps, results = run(path, variant, inputs, place, runner)
    names = [entry["name"] for entry in folder.manifest["outputs"]]
    for number, name in enumerate(names):
        want = golden[f"lowered/{name}"].tobytes()
        assert Path(f"{results}{number}").read_bytes() == want, f"{variant}: output {name}"
        assert Path(f"{taps}{number}").read_bytes() == want, f"{variant}: output {name} of taps"
    for number, tap in enumerate(folder.manifest["taps"], len(names)):
        assert tap_digest(f"{taps}{number}", tap, inputs[0].shape) == tap["sha256"], f"{variant}: {tap['site']}"


def tap_digest(path: str, tap: dict[str, object], lead: tuple[int, ...]) -> str:
    kind, features = str(tap["kind"]), tap["features"]
    raw = np.fromfile(path, {"codes": np.int8, "ids": np.int32}.get(kind, np.float32))
    count = raw.size // int(np.prod(lead)) if features is not None else 1
    shaped = raw.reshape(*lead, count) if features is not None else raw.reshape(lead)
    return digest(logical(kind, features, shaped, 0))  # type: ignore[arg-type]


class Plain(nn.Module):
    """Operators that have no kernel, where one processor could fuse a product with a sum and another not."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        squares = x * x
        return (
            torch.linalg.vector_norm(x, dim=-1),
            squares.sum(-1),
            (x * x[:, :1]).sum(0) - squares.mean(0),
            x * y - (x + 1.0) * (y - 2.0),  # either product could be the fused one
            x.pow(2).mean(-1, keepdim=True) * x + squares,
            x.tanh() * x - torch.nn.functional.softmax(x, -1),
            x.std(-1),  # one function to TVM, with a sum of squares inside
        )


def test_operators_without_a_kernel(runner: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kc.quantize(capture_module(Plain(), (torch.randn(65, 100), torch.randn(65, 100))), tmp_path / "q", recipe="fp32", random=True)
    kc.lower(tmp_path / "q", tmp_path / "arm", target="arm-neon")
    check_golden(tmp_path / "arm", "arm-neon", tmp_path / "run", runner)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_program_has_the_bits_of_x86(text: Path, variant: str, runner: Path, tmp_path: Path) -> None:
    check_golden(text, variant, tmp_path, runner)


def test_libraries_need_nothing_of_libm(text: Path) -> None:
    for variant in artifact.read(text, kind="library").manifest["target"]["variants"]:
        command = ["aarch64-linux-gnu-nm", "-D", "--undefined-only", str(text / variant["library"])]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        needed = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
        own = {name for name in needed if name.startswith("TVM")}
        assert needed - own <= {"memset", "memcpy", "memmove"}, needed


def test_what_an_artifact_says_and_refuses(text: Path) -> None:
    target = kc.inspect(text)["target"]
    assert [v["name"] for v in target["variants"]] == list(VARIANTS)
    assert [v["cpu_flags"] for v in target["variants"]] == [["asimd", "asimddp", "i8mm"], ["asimd", "asimddp"], ["asimd"]]
    assert {(v["codes_dtype"], v["codes_offset"], v["triple"]) for v in target["variants"]} == {("int8", 0, "aarch64-linux-gnu")}
    with pytest.raises(EnvironmentProblem, match="asimd") as refused:
        kc.load(text)
    assert refused.value.exit_code == 4


def test_a_missing_cross_compiler_is_named_at_once(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match=r"aarch64-linux-gnu-g\+\+.*apt-get install") as refused:
        kc.lower(text.parent / "q", tmp_path / "arm", target="arm-neon")
    assert refused.value.exit_code == 4 and not (tmp_path / "arm").exists()


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_a_language_model_step_by_step(kept: str, runner: Path, tmp_path: Path) -> None:
    """A prompt and eight steps with what x86 has cached: all logits and all new keys and values."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    config = transformers.LlamaConfig(**sizes, vocab_size=258, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(tmp_path / "model", safe_serialization=True)
    how = {"recipe": "smooth{alpha=0.5} | w8a8", "kv_cache": kept, "limit": 4, "max_length": 16}
    kc.quantize(tmp_path / "model", tmp_path / "q", random=True, **how)  # type: ignore[arg-type]
    kc.lower(tmp_path / "q", tmp_path / "x86", target="x86-avx2")
    kc.lower(tmp_path / "q", tmp_path / "arm", target="arm-dotprod")
    check_steps(tmp_path / "x86", tmp_path / "arm", "arm-dotprod", (2, 7), tmp_path, runner)


def test_doctor_tries_every_step_for_a_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runner: Path) -> None:
    found = {c.name: c for c in doctor_target.examine("arm")}
    assert list(found) == ["compiler for aarch64-linux-gnu", *(f"build {v}" for v in VARIANTS), "run aarch64", "runner"]
    assert {c.status for c in found.values()} == {"ok"}, found
    (tmp_path / "aarch64-linux-gnu-g++").write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    (tmp_path / "aarch64-linux-gnu-g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (broken,) = doctor_target.examine("arm-neon")
    assert broken.status == "bad" and "no room" in broken.advice
    (tmp_path / "aarch64-linux-gnu-g++").unlink()
    (missing,) = doctor_target.examine("arm-neon")
    assert missing.status == "bad" and "apt-get install g++-aarch64-linux-gnu" in missing.advice and "ziglang" in missing.advice
