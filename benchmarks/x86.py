"""MiniLM-L6 in int8 and float32 beside the engines a user could pick instead, each in an environment of its own, in turns.

    python benchmarks/x86.py --peers ~/.cache/khtst-peers [--engines khtst,onnxruntime,openvino] [--rounds 9] [--seconds 0.2]

Writes benchmarks/results/x86.json, x86.md and x86.png (x86_plot.py). Every engine is a process bound to
the same cores; they take turns (A B C A B C), and the figure that counts is the median over rounds of the ratio within a round. An
engine that cannot be installed or does not run is in the table with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from khtst_compile import api, artifact, cpu
from khtst_compile.benchmark import golden_inputs, make_inputs
from khtst_compile.demo import minilm, retrieval_data
from khtst_compile.parity import relative_error_db
from khtst_compile.signature import TensorSpec
from khtst_compile.tokens import TextEncoder

SHAPES = ((1, 16), (1, 128), (8, 128), (32, 128))
OURS, REFERENCE = "khtst int8", "torch eager fp32"
CALIBRATION = 128
"""Texts NNCF calibrates on; ours uses the same file."""


@dataclass(frozen=True)
class Environment:
    """packages: exact versions to install; torch: whether it needs torch, taken from this environment where that has `TORCH`."""

    packages: tuple[str, ...]
    torch: bool = False


TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.24.0"
ENVIRONMENTS = {
    "onnxruntime": Environment(("onnxruntime==1.32.0", "onnx==1.23.2", "numpy==2.4.6")),
    "openvino": Environment(("openvino==2026.4.1", "nncf==3.4.0", "numpy==2.4.6"), torch=True),
    "torch": Environment((TORCH, TRANSFORMERS, "numpy==2.4.6"), torch=True),
    "torchao": Environment(("torchao==0.18.0", TORCH, TRANSFORMERS, "numpy==2.4.6"), torch=True),
    "plot": Environment(("matplotlib==3.11.2",)),
    "executorch": Environment(("executorch==1.5.1", TORCH, TRANSFORMERS), torch=True),
}
ENGINES = {  # "" is the environment this script runs in
    OURS: "",
    "khtst fp32": "",
    "onnxruntime fp32": "onnxruntime",
    "onnxruntime dynamic int8": "onnxruntime",
    "openvino fp32": "openvino",
    "openvino bf16": "openvino",
    "openvino nncf int8": "openvino",
    REFERENCE: "torch",
    "torch compile fp32": "torch",
    "torchao int8": "torchao",
    "executorch xnnpack int8": "executorch",
}
NOT_RUN = {"llama.cpp (xllamacpp)": "compares generation of text, which this benchmark does not measure yet"}
"""Engines that are named but have no worker: when artifacts generate, llama.cpp gets one, on SmolLM2."""


@dataclass
class Engine:
    """A worker process. failed: why it is out, else None; ready_s: what loading (and quantizing, the first time) took."""

    name: str
    process: subprocess.Popen[str] | None = None
    failed: str | None = None
    ready_s: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder for the peers' environments and the prepared models")
    parser.add_argument("--engines", default="", help="by commas, beginnings of names; default: all")
    parser.add_argument("--threads", default="1,2", help="thread counts, by commas")
    parser.add_argument("--shapes", default=",".join(f"{b}x{s}" for b, s in SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a turn")
    parser.add_argument("--quantized", type=Path, help="a quantized MiniLM artifact to lower instead of quantizing here")
    parser.add_argument("--own-torch", action="store_true", help="install torch for peers even where it could be shared")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    wanted = [e for e in ENGINES if not options.engines or e.startswith(tuple(options.engines.split(",")))]
    shapes = [tuple(int(n) for n in s.split("x")) for s in options.shapes.split(",")]
    peers = options.peers.absolute()
    pythons, reasons = environments(peers, {ENGINES[e] for e in wanted} - {""} | {"plot"}, options.own_torch)
    work = prepare(peers / "work", options.quantized, shapes)
    rows: list[dict[str, Any]] = []
    for threads in (int(t) for t in options.threads.split(",")):
        rows += measure(wanted, pythons, reasons, work, shapes, threads, options.rounds, options.seconds)
    result = {
        "machine": {"cores": cpu.usable_cores(), "cpu_flags": sorted(f for f in cpu.flags() if "avx" in f or "amx" in f)},
        "target": artifact.read(work / "library").manifest["target"],
        "packages": {name: installed(python) for name, python in pythons.items()},
        "rounds": options.rounds,
        "rows": rows,
        "not_run": NOT_RUN,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "x86.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.output / "x86.md").write_text(render(result), encoding="utf-8")
    if "plot" in pythons:
        script, data = Path(__file__).with_name("x86_plot.py"), options.output / "x86.json"
        subprocess.run([str(pythons["plot"]), str(script), str(data), str(data.with_suffix(".png"))], check=True)
    else:
        say(f"x86.png is not drawn: {reasons['plot']}")
    print(render(result))


def environments(folder: Path, names: set[str], own_torch: bool) -> tuple[dict[str, Path], dict[str, str]]:
    """Set up what is missing: name -> interpreter, and name -> why there is none."""
    pythons, reasons = {"": Path(sys.executable)}, {}
    for name in sorted(names):
        where, wanted = folder / name, ENVIRONMENTS[name]
        stamp, python = where / "installed.json", where / "bin" / "python"
        key = json.dumps([*wanted.packages, own_torch])
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
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints), *wanted.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return None if done.returncode == 0 else (errors or [f"pip ended with {done.returncode}"])[-1]


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
    names = ("torch", "torchao", "onnxruntime", "openvino", "nncf", "executorch", "transformers", "numpy", "apache-tvm")
    return {n: found[n] for n in names if n in found}


def prepare(work: Path, quantized: Path | None, shapes: Sequence[tuple[int, ...]]) -> Path:
    """Our artifacts, the float32 ONNX file every peer can read, calibration data and the inputs of each shape."""
    work.mkdir(parents=True, exist_ok=True)
    model = minilm()
    if not (work / "model").exists():
        (work / "model").symlink_to(model)
    if quantized is None:
        quantized = work / "quantized"
        if not quantized.exists():
            api.quantize(model, quantized, calib=retrieval_data(None), report=say)
    api.lower(quantized, work / "library", report=say)
    if not (work / "fp32").exists():
        api.quantize(model, work / "fp32", calib=retrieval_data(None), recipe="fp32", report=say)
    api.lower(work / "fp32", work / "library_fp32", report=say)
    if not (work / "fp32.onnx").exists():
        api.export(work / "fp32", work / "fp32.onnx", report=say)
    folder = artifact.read(work / "library")
    specs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
    axes = list(folder.manifest["axes"])
    for shape in shapes:
        feed = make_inputs(specs, dict(zip(axes, shape, strict=True)), long_inputs(folder, max(s[1] for s in shapes)))
        np.savez(work / f"{shape_name(shape)}.npz", **feed)  # type: ignore[arg-type]
    texts = json.loads(retrieval_data(None).read_text(encoding="utf-8"))
    some = [t for value in texts.values() for t in value][:CALIBRATION]
    encoded = TextEncoder(model, folder.manifest, 128)(some)
    np.savez(work / "calibration.npz", **encoded)  # type: ignore[arg-type]
    return work


def long_inputs(folder: artifact.Folder, length: int) -> dict[str, Any]:
    """Golden texts without padding, repeated to a length: real tokens everywhere, as in a batch of equally long texts."""
    golden = golden_inputs(folder)
    mask = golden["attention_mask"].astype(bool)
    kept = [np.resize(ids[row], length) for ids, row in zip(golden["input_ids"], mask, strict=True)]
    return {"input_ids": np.stack(kept), "attention_mask": np.ones((len(kept), length), golden["attention_mask"].dtype)}


def measure(
    names: list[str],
    pythons: dict[str, Path],
    reasons: dict[str, str],
    work: Path,
    shapes: Sequence[tuple[int, ...]],
    threads: int,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """All engines with so many threads at all shapes, in turns; one row each."""
    engines = [start(n, pythons, reasons, work, threads) for n in names]
    rows = []
    try:
        for shape in shapes:
            text = shape_name(shape)
            outputs = {e.name: prepared(e, work, text) for e in engines}
            turns: dict[str, list[float]] = {e.name: [] for e in engines}
            for _ in range(rounds):
                for engine in engines:
                    times = engine.ask({"seconds": seconds}).get("times")
                    turns[engine.name].append(statistics.median(times) if times else float("nan"))
            say(f"{threads} thread(s), {text}: measured")
            rows += [row(e, text, threads, turns, outputs) for e in engines]
    finally:
        for engine in engines:
            engine.close()
    return rows


def start(name: str, pythons: dict[str, Path], reasons: dict[str, str], work: Path, threads: int) -> Engine:
    """Start a worker bound to the first `threads` cores and wait until its model is loaded."""
    engine, kind = Engine(name), ENGINES[name]
    if kind not in pythons:
        engine.failed = reasons[kind]
        return engine
    cores = set(sorted(os.sched_getaffinity(0))[:threads])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TVM_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1]) if not kind else ""
    engine.process = subprocess.Popen(
        [str(pythons[kind]), str(Path(__file__).with_name("x86_worker.py")), name, str(threads), str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(work / f"{name.replace(' ', '_')}.log").open("w"),
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    engine.ready_s = float(engine.ask({}).get("ready_s", 0.0))
    say(f"{name}, {threads} thread(s): {engine.failed or f'ready in {engine.ready_s:.1f} s'}")
    return engine


def prepared(engine: Engine, work: Path, text: str) -> Any:
    """The engine's output on the inputs of a shape, or None."""
    output = work / f"{engine.name.replace(' ', '_')}.npy"
    answer = engine.ask({"prepare": str(work / f"{text}.npz"), "output": str(output)})
    return np.load(output) if answer.get("ok") else None


def row(engine: Engine, text: str, threads: int, turns: dict[str, list[float]], outputs: dict[str, Any]) -> dict[str, Any]:
    """What is known of one engine at one shape; ratio: our time over its."""
    if engine.failed is not None:
        return {"engine": engine.name, "shape": text, "threads": threads, "failed": engine.failed}
    mine, ours = turns[engine.name], turns.get(OURS, [])
    exact, got = outputs.get(REFERENCE), outputs[engine.name]
    return {
        "engine": engine.name,
        "shape": text,
        "threads": threads,
        "median_ms": statistics.median(mine) * 1e3,
        "ratio": statistics.median(a / b for a, b in zip(ours, mine, strict=True)) if ours else None,
        "error_db": relative_error_db(got, exact) if exact is not None and engine.name != REFERENCE else None,
        "ready_s": engine.ready_s,
    }


def shape_name(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape)


def render(result: dict[str, Any]) -> str:
    """A table for each number of threads: milliseconds, and our time over the engine's."""
    lines = [
        "# MiniLM-L6 beside other engines on x86",
        "",
        "Median milliseconds, and in brackets the time of `khtst int8` over the engine's (below 1: khtst is faster); error of the "
        "embedding at the largest shape against torch in float32.",
    ]
    for threads in sorted({r["threads"] for r in result["rows"]}):
        rows = [r for r in result["rows"] if r["threads"] == threads]
        shapes = list(dict.fromkeys(r["shape"] for r in rows))
        lines += [
            "",
            f"## {threads} thread(s)",
            "",
            f"| engine | {' | '.join(shapes)} | error, dB |",
            "|---" * (len(shapes) + 2) + "|",
        ]
        for name in dict.fromkeys(r["engine"] for r in rows):
            mine = {r["shape"]: r for r in rows if r["engine"] == name}
            failed = next((r["failed"] for r in mine.values() if "failed" in r), None)
            cells = [_cell(mine[s]) for s in shapes]
            error = mine[shapes[-1]].get("error_db")
            lines.append(f"| {name} | {' | '.join(cells)} | {failed or ('' if error is None else f'{error:.1f}')} |")
    lines += ["", *(f"Not run: {name}: {why}." for name, why in result["not_run"].items())]
    cores, flags = result["machine"]["cores"], ", ".join(result["machine"]["cpu_flags"])
    versions = {k: v for found in result["packages"].values() for k, v in found.items()}
    lines += ["", f"{cores} cores ({flags}); {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}.", ""]
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    if "failed" in found:
        return "-"
    ratio = found["ratio"]
    return f"{found['median_ms']:.2f}" + ("" if ratio is None or found["engine"] == OURS else f" ({ratio:.2f})")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
