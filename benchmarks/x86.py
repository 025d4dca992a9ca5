"""MiniLM-L6 and SmolLM2-135M beside the engines a user could pick instead, each in an environment of its own, in turns.

    python benchmarks/x86.py --peers ~/.cache/khtst-peers [--decoder ART] [--only latency,growth] [--quick]

Writes x86.json, x86.md and x86.png to benchmarks/results (x86_report.py, x86_plot.py). Every engine is a process bound to the same cores
(x86_worker.py); they take turns (A B C A B C), and the figure that counts is the median over rounds of the ratio within a round. An
engine that cannot be installed or does not run is in the table with the reason. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: see khtst_compile/cli
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import x86_measure, x86_report
from benchmarks.x86_measure import BATCHES, LENGTHS, NEW, PROMPT, Shape, shape_name
from benchmarks.x86_peers import (
    DECODER,
    ENGINES,
    LLAMA,
    ONE_SHAPE,
    OURS,
    OURS_AVX2,
    OURS_FP32,
    RIVAL,
    TALKERS,
    environments,
    installed,
    running,
    say,
)
from khtst_compile import api, artifact, cpu, runtime
from khtst_compile.benchmark import golden_inputs, make_inputs
from khtst_compile.demo import minilm, retrieval_data
from khtst_compile.signature import TensorSpec
from khtst_compile.tokens import Detokenizer, TextEncoder

SHAPES = ((1, 16), (1, 128), (8, 128), (32, 128))
PARTS = ("build", "latency", "fp32", "scaling", "peak", "growth", "decode", "perplexity")
ENCODING = {"latency", "fp32", "scaling", "growth"}
"""Parts that start engines of MiniLM."""
FLOAT32 = (OURS_FP32, "onnxruntime fp32", "openvino fp32")
CALIBRATION = 128
"""Texts NNCF calibrates on; ours uses the same file."""


def main() -> None:
    options = _options()
    parts = options.only.split(",") if options.only else list(PARTS)
    shapes = [(int(b), int(s)) for b, s in (text.split("x") for text in options.shapes.split(","))]
    counts = [int(n) for n in options.threads.split(",")]
    bench = Bench(options, parts)
    not_run = {part: "not asked for" for part in PARTS if part not in parts}
    result: dict[str, Any] = {"machine": bench.machine(), "target": bench.variant(), "rounds": options.rounds, "not_run": not_run}
    if {"decode", "perplexity"} & set(parts) and options.decoder is None:
        not_run["decode"] = not_run["perplexity"] = "it needs --decoder"
    elif "perplexity" in parts and options.decoder_model is None:
        not_run["perplexity"] = "it needs --decoder-model"
    result["packages"] = {name: installed(python) for name, python in bench.pythons.items()}
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output / "x86.json"
    for part in PARTS:
        if part not in not_run:
            say(f"{part}: begun")
            result[part] = bench.measure(part, shapes, counts, result)
            data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # after each, for a run is long
    (options.output / "x86.md").write_text(x86_report.render(result), encoding="utf-8")
    if "plot" in bench.pythons:
        script = Path(__file__).with_name("x86_plot.py")
        command = [str(bench.pythons["plot"]), str(script), str(data), str(data.with_suffix(".png"))]
        subprocess.run(command, check=True)
    else:
        say(f"x86.png is not drawn: {bench.reasons['plot']}")
    print(x86_report.render(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder for the peers' environments and the prepared models")
    parser.add_argument("--only", default="", help=f"parts to run, by commas, of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="few rounds, short turns, fewer shapes: to see that everything runs")
    parser.add_argument("--engines", default="", help="by commas, beginnings of names; default: all")
    parser.add_argument("--threads", default="1,2", help="thread counts, by commas")
    parser.add_argument("--shapes", default=",".join(shape_name(s) for s in SHAPES), help="of the part latency")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for the rounds of one shape, beyond three rounds")
    parser.add_argument("--quantized", type=Path, help="a quantized MiniLM artifact to lower instead of quantizing here")
    parser.add_argument("--keep", action="store_true", help="take the artifacts of the last run instead of lowering again")
    parser.add_argument("--decoder", type=Path, help="a lowered artifact of SmolLM2-135M (docs/decode.md)")
    parser.add_argument("--decoder-model", type=Path, help="the Hugging Face folder it was made from, to compare perplexity with")
    parser.add_argument("--own-torch", action="store_true", help="install torch for peers even where it could be shared")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if unknown := [p for p in options.only.split(",") if p and p not in PARTS]:
        parser.error(f"--only: {unknown[0]!r} is no part; parts: {', '.join(PARTS)}")
    for name in ("quantized", "decoder", "decoder_model"):
        if (path := getattr(options, name)) is not None and not path.is_dir():
            parser.error(f"--{name.replace('_', '-')}: {path} is no folder")
    if options.quick:
        options.rounds, options.seconds, options.budget = min(options.rounds, 3), 0.02, 5.0
    return options


class Bench:
    """The environments, models and inputs that the parts share."""

    def __init__(self, options: argparse.Namespace, parts: Sequence[str]):
        self.options = options
        begins = tuple(options.engines.split(","))
        known = {**(ENGINES if set(parts) & ENCODING else {}), **(TALKERS if "decode" in parts and options.decoder else {})}
        self.wanted = [e for e in known if not options.engines or e.startswith(begins)]
        peers = options.peers.absolute()
        kinds = {known[e] for e in self.wanted} - {""} | {"plot"}
        self.pythons, self.reasons = environments(peers, kinds, options.own_torch)
        self.work = peers / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.lower_s: float | None = None
        if set(parts) - {"decode", "perplexity"}:
            self._prepare_minilm("build" in parts or not options.keep)
        if options.decoder is not None:
            _link(self.work / "decoder", options.decoder)
            self._prepare_llama()
        # On a CPU that has no more than AVX2 it is the same as OURS.
        self.wanted = [e for e in self.wanted if e != OURS_AVX2 or self.variant() != "x86-avx2"]

    def machine(self) -> dict[str, Any]:
        return {"cores": cpu.usable_cores(), "cpu_flags": sorted(f for f in cpu.flags() if "avx" in f or "amx" in f)}

    def variant(self) -> str:
        """Name of the target that runs here."""
        from khtst_compile.targets import table

        return table.target("x86").name

    def _prepare_minilm(self, again: bool) -> None:
        """Our artifacts, the float32 ONNX file every peer can read, calibration data and the inputs of each shape."""
        work, model, data = self.work, minilm(), retrieval_data(None)
        _link(work / "model", model)
        quantized = self.options.quantized or work / "quantized"
        if not quantized.exists():
            api.quantize(model, quantized, calib=data, report=say)
        if again or not (work / "library").exists():
            self.lower_s = api.lower(quantized, work / "library", report=say).seconds
        if not (work / "fp32").exists():
            api.quantize(model, work / "fp32", calib=data, recipe="fp32", report=say)
        if again or not (work / "library_fp32").exists():
            api.lower(work / "fp32", work / "library_fp32", target=self.variant(), report=say)
        if not (work / "fp32.onnx").exists():
            api.export(work / "fp32", work / "fp32.onnx", report=say)
        texts = json.loads(data.read_text(encoding="utf-8"))
        some = [t for value in texts.values() for t in value][:CALIBRATION]
        encoded = TextEncoder(model, artifact.read(work / "library").manifest, 128)(some)
        np.savez(work / "calibration.npz", **encoded)  # type: ignore[arg-type]

    def _prepare_llama(self) -> None:
        file = self.work / "smollm2-q8_0.gguf"
        if "llama" in self.pythons and not file.exists():
            command = [str(self.pythons["llama"]), str(Path(__file__).with_name("x86_gguf.py")), str(file)]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                self.reasons["llama"] = f"no GGUF file: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
                del self.pythons["llama"]

    def make_inputs(self, shapes: Sequence[Shape]) -> None:
        """Golden texts without padding, repeated: real tokens everywhere, as in a batch of equally long texts."""
        folder = artifact.read(self.work / "library")
        golden = golden_inputs(folder)
        mask, longest = golden["attention_mask"].astype(bool), max(s for _, s in shapes)
        kept = [np.resize(ids[row], longest) for ids, row in zip(golden["input_ids"], mask, strict=True)]
        long = {"input_ids": np.stack(kept), "attention_mask": np.ones((len(kept), longest), golden["attention_mask"].dtype)}
        specs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
        for shape in shapes:
            feed = make_inputs(specs, dict(zip(folder.manifest["axes"], shape, strict=True)), long)
            np.savez(self.work / f"{shape_name(shape)}.npz", **feed)  # type: ignore[arg-type]

    def measure(self, part: str, shapes: Sequence[Shape], counts: Sequence[int], result: dict[str, Any]) -> Any:
        options, work, quick = self.options, self.work, bool(self.options.quick)
        if part == "build":
            return self._build()
        if part == "latency":
            return self._latency([e for e in self.wanted if e in ENGINES], shapes, counts)
        if part == "fp32":
            return self._latency([e for e in self.wanted if e in FLOAT32], ((1, 128), (8, 128)), [1])
        if part == "peak":
            return x86_measure.peak(work / "library", (8, 128), 1 if quick else 3, 1 if quick else 5)
        if part == "perplexity":
            return self._perplexity(1 if quick else 16)
        if part == "scaling":
            self.make_inputs([(8, 128)])
            with self._running([(OURS, 1), (OURS, 2)]) as engines:
                return x86_measure.scaling(engines, work, (8, 128), options.rounds)
        if part == "growth":
            return self._growth(result, quick)
        rows = []
        for threads in counts:
            with self._running([(e, threads) for e in (DECODER, LLAMA) if e in self.wanted]) as engines:
                rows += x86_measure.decode(engines, self._prompt(), NEW, 1 if quick else 5)
        return rows

    def _running(self, names: Sequence[tuple[str, int]]) -> Any:
        return running(names, self.pythons, self.reasons, self.work)

    def _build(self) -> dict[str, float | None]:
        folder = self.work / "library"
        total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        return {"lower_s": self.lower_s, "over_weights": total / (folder / runtime.WEIGHTS).stat().st_size}

    def _latency(self, names: Sequence[str], shapes: Sequence[Shape], counts: Sequence[int]) -> list[dict[str, Any]]:
        self.make_inputs(shapes)
        rows = []
        for threads in counts:
            with self._running([(n, threads) for n in names]) as engines:
                options = self.options
                rows += x86_measure.latency(engines, self.work, shapes, options.rounds, options.seconds, options.budget)
        return rows

    def _growth(self, result: dict[str, Any], quick: bool) -> dict[str, Any]:
        """Ours and the peer that is fastest at the largest shape measured, of those that take any shape."""
        shapes = [(b, s) for b in BATCHES for s in LENGTHS if not quick or (b, s) in ((1, 16), (1, 32), (1, 64), (2, 16))]
        self.make_inputs(shapes)
        rows = result.get("latency", [])
        dynamic = [e for e in self.wanted if e in ENGINES and x86_report.is_peer(e) and e not in ONE_SHAPE]
        found = x86_report.fastest(rows, OURS, rows[-1]["shape"], 1, dynamic.__contains__) if rows else None
        rival = found[0] if found else RIVAL
        with self._running([(OURS, 1), (rival, 1)]) as engines:
            grown = x86_measure.growth(engines, self.work, shapes, 1 if quick else FEW, self.options.seconds / 2)
        return {**grown, "cliffs": x86_report.cliffs(grown["points"])}

    def _prompt(self) -> list[int]:
        words = Detokenizer.find(self.work / "decoder")
        if words is None:
            raise SystemExit(f"--decoder {self.options.decoder}: carries no tokenizer; make it from a folder with tokenizer.json")
        texts = json.loads(retrieval_data(None).read_text(encoding="utf-8"))["calib"]
        return words.encode(" ".join(texts))[:PROMPT]

    def _perplexity(self, limit: int) -> dict[str, float]:
        from khtst_compile.evaluate import perplexity

        mine, exact = perplexity(self.options.decoder, retrieval_data(None), reference=self.options.decoder_model, limit=limit)
        assert exact is not None
        return {"value": mine.value, "float32": exact.value, "off": abs(mine.value / exact.value - 1), "tokens": mine.tokens}


FEW = 3
"""Rounds of the part growth, whose shapes are many."""


def _link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target.absolute())


if __name__ == "__main__":
    main()
