"""Codebook lookups beside the model's own code and onnxruntime, in one run on one thread; and how many ids of real vectors differ.

    TVM_NUM_THREADS=1 taskset -c 0 python benchmarks/codebook.py [--rounds 15] [--vectors 1000000] [--output benchmarks/results]

Eight residual levels of Stiefel codebooks of 256 features, 4,096 vectors. Every figure is the median over rounds in which all contenders
run one after the other (A B C A B C), in thread CPU time; ratios are medians of the rounds' ratios. "eager" is the zoo's
ResidualQuantizer in eval mode, as a model in training has it; "frozen" the same with constant codebooks; "onnxruntime" runs the frozen
module as torch exports it. Ids are compared on image patches and token embeddings, for codebooks that k-means made of them, over all
vectors. Writes codebook.json and codebook.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: see khtst_compile/cli

import numpy as np
import onnxruntime
import torch

from khtst_compile.layout import Packed
from khtst_compile.ops.codebook import codebook_lookup_reference
from khtst_compile.quiet import quiet
from khtst_compile.targets import table
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels import codebook
from khtst_compile.targets.kernels.codebook import Codebook
from khtst_compile.targets.kernels.rows import Lead
from khtst_compile.targets.kernels.vec import Floats
from khtst_compile.targets.single import compile_alone, tensors
from khtst_compile.zoo.gsq import ResidualQuantizer

FEATURES, LEVELS, VECTORS, SIZES = 256, 8, 4096, (256, 1024)
BOUNDS = {"eager": 3.0, "onnxruntime": 2.0}
"""Contender -> how many times as long as ours it takes at least."""
FLOAT_BOUND = 1.3
"""float32 over int8, ours, at 1,024 codes."""
CHUNK = 65536
Run = Callable[[], object]


@dataclass(frozen=True)
class Lookup:
    """A kernel with its constants. spec, arrays: see codebook.pack."""

    spec: Codebook
    arrays: list[Any]
    function: Any

    @staticmethod
    def make(isa: Isa, codes: Floats, bias: Floats | None, scaled: Floats, running: bool, int8: bool) -> Lookup:
        levels, count, features = codes.shape
        spec = Codebook(isa, levels, count, features, features, Lead(1), running, int8)
        packed = [a.packed if isinstance(a, Packed) else a for a in codebook.pack(spec, codes, bias, scaled)]
        function = compile_alone({spec.name: codebook.prim_func(spec)}, isa)[spec.name]
        arrays = tensors(packed)
        if np.array_equal(packed[-1], packed[-2]):
            arrays[-2] = arrays[-1]  # as a program has it, which stores equal weights once
        return Lookup(spec, arrays, function)

    def bind(self, z: Floats) -> tuple[Run, Any]:
        """A call on these rows, and the tensor its ids come in."""
        given = tensors(
            [z, np.zeros((len(z), self.spec.value_features), np.float32), np.zeros((len(z), self.spec.levels), np.int32)]
        )
        return lambda: self.function(given[0], *self.arrays, *given[1:]), given[2]


class Values(torch.nn.Module):
    """A quantizer that returns a plain tuple."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.inner(z)
        return found.values, found.ids


def contenders(isa: Isa, codes: int, z: torch.Tensor, folder: Path) -> tuple[dict[str, Run], dict[str, Callable[[], np.ndarray]]]:
    """Name -> a run, and name -> the ids it gives."""
    eager = ResidualQuantizer(FEATURES, codes, LEVELS, seed=0).eval()
    frozen = eager.freeze()
    both = {"eager": Values(eager).eval(), "frozen": Values(frozen).eval()}
    path = folder / f"frozen{codes}.onnx"
    with quiet():
        torch.onnx.export(both["frozen"], (z,), path, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: z.numpy()}
    runs: dict[str, Run] = {}
    ids: dict[str, Callable[[], np.ndarray]] = {}
    for name, int8 in (("int8", True), ("float32", False)):
        lookup = Lookup.make(isa, *stacked(frozen), running=False, int8=int8)
        runs[name], room = lookup.bind(z.numpy())
        ids[name] = room.numpy
    for name, module in both.items():
        runs[name] = lambda module=module: module(z)  # type: ignore[misc]
        ids[name] = lambda module=module: module(z)[1].numpy()  # type: ignore[misc]
    runs["onnxruntime"] = lambda: session.run(None, given)
    ids["onnxruntime"] = lambda: session.run(None, given)[1]
    return runs, ids


def stacked(frozen: Any) -> tuple[Floats, Floats | None, Floats]:
    """codes, bias, table of a FrozenResidual."""
    levels = list(frozen.levels)
    bias = None if levels[0].bias is None else torch.stack([level.bias for level in levels]).numpy()
    codes, values = (torch.stack([getattr(level, name) for level in levels]).numpy() for name in ("codes", "table"))
    return codes, bias, values


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for run in runs.values():
            run()
        for _ in range(rounds):
            for name, run in runs.items():
                started = time.thread_time()
                run()
                times[name].append(time.thread_time() - started)
    return times


def speed(isa: Isa, rounds: int) -> list[dict[str, Any]]:
    """One entry a codebook size."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for codes in SIZES:
            z = torch.randn(VECTORS, FEATURES, generator=torch.Generator().manual_seed(codes))
            runs, ids = contenders(isa, codes, z, Path(folder))
            times = measure(runs, rounds)
            with torch.no_grad():
                ours = ids["int8"]()
                differ = {name: int((made() != ours).any(-1).sum()) for name, made in ids.items()}
            ratios = {n: statistics.median(t / o for t, o in zip(times[n], times["int8"], strict=True)) for n in times}
            found.append(
                {
                    "codes": codes,
                    "ms": {name: 1e3 * statistics.median(t) for name, t in times.items()},
                    "least ms": {name: 1e3 * min(t) for name, t in times.items()},
                    "times int8": ratios,
                    "vectors with another id than int8": differ,
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def patches() -> Floats:
    """8 x 8 patches of scikit-learn's two photographs at every place, in three colors: (n, 192), 0 to 1."""
    from sklearn.datasets import load_sample_images

    rows = []
    for image in load_sample_images().images:
        windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float32) / 255, (8, 8), (0, 1))
        rows.append(windows.reshape(-1, 192))
    return np.concatenate(rows)


def embeddings(count: int) -> Floats:
    """MiniLM's first-layer input for every pair of a word and a position, as many as asked: (n, 384)."""
    from safetensors.torch import load_file

    from khtst_compile.demo import minilm

    weights = load_file(str(Path(minilm()) / "model.safetensors"))
    words, places = (weights[f"embeddings.{name}_embeddings.weight"].numpy() for name in ("word", "position"))
    drawn = np.random.default_rng(0).permutation(len(words) * 64)[:count]
    summed: Floats = words[drawn // 64] + places[drawn % 64]
    return summed


def k_means(rows: Floats, codes: int, steps: int = 6) -> Floats:
    """(codes, d): Lloyd's algorithm on a sample."""
    rng = np.random.default_rng(0)
    sample = torch.from_numpy(rows[rng.choice(len(rows), min(len(rows), 16384), replace=False)])
    centers = sample[:codes].clone()
    for _ in range(steps):
        nearest = torch.cdist(sample, centers).argmin(1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, sample)
        count = torch.bincount(nearest, minlength=codes)[:, None]
        centers = torch.where(count > 0, sums / count.clamp(min=1), centers)
    return centers.numpy()


def batches(rows: Floats) -> Iterator[Floats]:
    for first in range(0, len(rows), CHUNK):
        yield np.ascontiguousarray(rows[first : first + CHUNK])


def agreement(isa: Isa, total: int) -> list[dict[str, Any]]:
    """int8, float32 and torch's written meaning on real vectors; and float32 products in torch's own order, for comparison."""
    found = []
    for name, rows in (("image patches", patches()[: total // 2]), ("token embeddings", embeddings(total - total // 2))):
        first = k_means(rows, 1024)
        left = (
            rows[: len(rows) // 8]
            - first[torch.cdist(torch.from_numpy(rows[: len(rows) // 8]), torch.from_numpy(first)).argmin(1)]
        )
        codes = np.stack([first, k_means(left, 1024)])
        bias = (-0.5 * np.square(codes.astype(np.float64)).sum(-1)).astype(np.float32)
        lookups = [Lookup.make(isa, codes, bias, codes, running=True, int8=int8) for int8 in (True, False)]
        counts = {"float32 kernel": 0, "torch, written order": 0, "torch, x @ c.T": 0}
        for batch in batches(rows):
            ids = []
            for lookup in lookups:
                run, room = lookup.bind(batch)
                run()
                ids.append(room.numpy())
            z = torch.from_numpy(batch)
            tensors_ = [torch.from_numpy(a) for a in (codes, bias, codes)]
            written = codebook_lookup_reference(z, *tensors_, running=True)[1]
            plain = (z @ torch.from_numpy(codes[0]).T + torch.from_numpy(bias[0])).argmax(-1)
            counts["float32 kernel"] += int((ids[0] != ids[1]).sum())
            counts["torch, written order"] += int((ids[0] != written.numpy()).sum())
            counts["torch, x @ c.T"] += int((ids[0][:, 0] != plain.numpy()).sum())
        found.append({"vectors": len(rows), "of": name, "features": rows.shape[1], "levels": 2, "ids that differ": counts})
        print(json.dumps(found[-1]), flush=True)
    return found


def report(results: dict[str, Any]) -> str:
    """The results as markdown."""
    lines = ["# Codebook lookups", "", results["machine"], ""]
    lines += [f"{VECTORS} vectors of {FEATURES} features, {LEVELS} levels, one thread, {results['rounds']} rounds.", ""]
    names = list(results["speed"][0]["ms"]) if results["speed"] else []
    lines += ["| codes | " + " | ".join(f"{n}, ms" for n in names) + " | " + " | ".join(f"{n} / int8" for n in names[1:]) + " |"]
    lines += ["|" + "---|" * (2 * len(names))]
    for row in results["speed"]:
        cells = [f"{row['ms'][n]:.1f}" for n in names] + [f"{row['times int8'][n]:.2f}" for n in names[1:]]
        lines.append(f"| {row['codes']} | " + " | ".join(cells) + " |")
    lines += ["", "Asked: eager 3.0, onnxruntime 2.0 at both sizes; float32 1.3 at 1,024 codes.", ""]
    lines += [
        "| vectors | of | ids that differ from the int8 kernel's: " + "; ".join(results["agreement"][0]["ids that differ"]) + " |"
    ]
    lines += ["|---|---|---|"]
    for row in results["agreement"]:
        differ = "; ".join(str(n) for n in row["ids that differ"].values())
        lines.append(f"| {row['vectors']} | {row['of']}, {row['features']} features, {row['levels']} levels | {differ} |")
    return "\n".join([*lines, ""])


def missed(results: dict[str, Any]) -> list[str]:
    """What is not reached, in words."""
    found = []
    for row in results["speed"]:
        for name, least in BOUNDS.items():
            if row["times int8"][name] < least:
                found.append(
                    f"{row['codes']} codes: {name} takes {row['times int8'][name]:.2f} times as long as ours; needed: {least}"
                )
        if row["codes"] == max(SIZES) and row["times int8"]["float32"] < FLOAT_BOUND:
            found.append(f"float32 takes {row['times int8']['float32']:.2f} times as long as int8; needed: {FLOAT_BOUND}")
    for row in results["agreement"]:
        for name in ("float32 kernel", "torch, written order"):
            if row["ids that differ"][name]:
                found.append(f"{row['of']}: {row['ids that differ'][name]} ids differ from {name}; needed: none")
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    isa = next(t for t in table.variants("x86") if t.unavailable() is None).isa
    results = {
        "machine": f"{platform.machine()}, {isa.name}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}",
        "rounds": options.rounds,
        "speed": speed(isa, options.rounds),
        "agreement": agreement(isa, options.vectors),
    }
    results["missed"] = missed(results)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "codebook.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.output / "codebook.md").write_text(report(results), encoding="utf-8")
    print(report(results))
    print("\n".join(results["missed"]) or "all reached")


if __name__ == "__main__":
    main()
