"""Image-JEPA on digits with different insides, over several seeds: does a mixture of experts pay, and what does a codebook cost?

python benchmarks/jepa_arms.py [--epochs 20] [--seeds 3] [--rate 2e-3]

Arms of one seed have the same masks and batches. A linear probe reads the embeddings of all patches; every fourth digit is held out.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from khtst_compile.zoo.gsq import StiefelQuantizer
from khtst_compile.zoo.jepa import VARIANTS, Jepa, Settings, digits_probe, train

NAMES = ("image", "image-small", "image-dense", "image-moe", "image-codes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's at the start")
    args = parser.parse_args()
    rows: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in NAMES}
    sizes, notes = {}, {}
    for seed in range(args.seeds):
        for name in NAMES:
            variant = VARIANTS[name]()
            model, (patches,) = variant.build(seed), variant.patches()
            assert isinstance(model, Jepa)
            sizes[name] = sum(p.numel() for p in (*model.encoder.parameters(), *model.predictor.parameters()))
            with torch.no_grad():
                random = digits_probe(model.encoder(patches))
            last = train(model, (patches,), variant.draw, Settings(args.epochs, rate=args.rate, seed=seed))[-5:]
            with torch.no_grad():
                accuracy = digits_probe(model.encoder(patches))
            means = [statistics.fmean(getattr(e, k) for e in last) for k in ("predictive", "variance")]
            rows[name].append((accuracy, random, *means))
            if isinstance(model.bottleneck, StiefelQuantizer):
                report = model.bottleneck.report()
                notes[name] = f"perplexity {report.perplexity:.1f} of {len(report.counts)} codes, {len(report.dead)} dead"
    print("| insides | parameters | probe, mean (least to most) | before training | predictive | V |")
    print("|---|---|---|---|---|---|")
    for name, found in rows.items():
        accuracy, random, predictive, variance = ([f[i] for f in found] for i in range(4))
        spread = f"{statistics.fmean(accuracy):.3f} ({min(accuracy):.3f} to {max(accuracy):.3f})"
        means = f"{statistics.fmean(random):.3f} | {statistics.fmean(predictive):.4f} | {statistics.fmean(variance):.3f}"
        print(f"| {name} | {sizes[name]:,} | {spread} | {means} | {notes.get(name, '')}")


if __name__ == "__main__":
    main()
