"""Train an autoencoder through a Stiefel codebook on patches of a photograph, and save it for `khtst-compile quantize`.

python examples/train_gsq.py [output folder] [--mode ste_ema] [--levels 3] [--codes 64] [--steps 300] [--plot]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from khtst_compile.zoo import data
from khtst_compile.zoo.autoencoder import CodeAutoencoder, fit
from khtst_compile.zoo.checkpoint import CALIBRATION, PROGRAM, save
from khtst_compile.zoo.gsq import CodeReport, ResidualQuantizer, Schedule
from khtst_compile.zoo.polar import delta_ort


def unexplained(model: CodeAutoencoder, x: torch.Tensor) -> float:
    """x: (n, features) -> the share of its energy that the reconstruction misses."""
    with torch.no_grad():
        return float((model(x).output - x).square().mean() / x.square().mean())


def plot(losses: list[float], reports: tuple[CodeReport, ...], file: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.semilogy(losses)
    left.set(title="reconstruction error, relaxed codes", xlabel="step")
    for level, report in enumerate(reports):
        right.plot(sorted(report.counts, reverse=True), label=f"level {level}, perplexity {report.perplexity:.1f}")
    right.set(title="use of codes, most used first", xlabel="code", ylabel="times chosen")
    right.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("out/gsq"))
    parser.add_argument("--mode", default="gsq", choices=("gsq", "ste_ema"))
    parser.add_argument("--levels", type=int, default=2)
    parser.add_argument("--codes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true", help="write training.png as well")
    args = parser.parse_args()

    patches = data.photograph_patches("china.jpg")
    seen, held_out = (patches[torch.arange(len(patches)) % 4 != 3], patches[3::4])  # every fourth patch is kept for judging
    tau = Schedule(1.0, 0.1, args.steps)
    quantizer = ResidualQuantizer(64, args.codes, args.levels, mode=args.mode, tau=tau, seed=args.seed)
    model = CodeAutoencoder(seen.shape[1], 64, quantizer, seed=args.seed)
    started = time.perf_counter()
    losses = fit(model, seen, args.steps, seed=args.seed)
    print(f"{args.steps} steps in {time.perf_counter() - started:.0f} s: error {losses[0]:.3f} -> {losses[-1]:.3f}")

    reports, frozen = quantizer.report(), model.freeze()
    for level, (report, codes) in enumerate(zip(reports, frozen.quantizer.levels, strict=True)):  # type: ignore[arg-type]
        print(
            f"level {level}: perplexity {report.perplexity:.1f} of {args.codes}, dead codes {list(report.dead)}, R {report.scale:.3f}, "
            f"delta_ort {delta_ort(codes.codes):.1e}" + (" (tight frame)" if report.tight_frame else "")
        )
    print(f"energy missed with hard codes: {unexplained(frozen, held_out):.3f} of patches held out", end="; ")
    print(f"{unexplained(frozen, data.photograph_patches('flower.jpg')):.3f} of another photograph")

    save(frozen, (seen[:2],), [(seen[::8],)], args.output)
    if args.plot:
        plot(losses, reports, args.output / "training.png")
    print(f"khtst-compile quantize {args.output / PROGRAM} --calib {args.output / CALIBRATION} -o OUT")


if __name__ == "__main__":
    main()
