"""Train a predictor of embeddings on real data, and save its encoder for `khtst-compile quantize`.

python examples/train_jepa.py [output folder] [--variant image] [--part encoder] [--steps 1200] [--fractions 0.3 0.5 0.7] [--plot]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from khtst_compile.zoo.checkpoint import CALIBRATION, PROGRAM, save
from khtst_compile.zoo.jepa import VARIANTS, Epoch, Settings, digits_probe, train

PARTS = ("total", "predictive", "variance")  # of the loss


def plot(history: list[Epoch], embeddings: torch.Tensor, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure((9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in PARTS:
        left.semilogy([getattr(e, name) for e in history], label=name)
    left.set(title="losses", xlabel="epoch")
    left.legend()
    right.bar(range(embeddings.shape[-1]), embeddings.flatten(0, -2).std(0).sort(descending=True).values)
    right.set(title="standard deviation", xlabel="feature, largest first")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("out/jepa"))
    parser.add_argument("--variant", default="image", choices=VARIANTS)
    parser.add_argument("--part", help="what to save: encoder, or what else of the variant is compiled")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[0.5], help="of patches to hide; of several a bandit chooses"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true", help="write training.png as well")
    args = parser.parse_args()

    variant = VARIANTS[args.variant]()
    inputs, patches = variant.load(), variant.patches()
    batch = min(64, len(patches[0]))
    epochs = max(1, round(args.steps / (len(patches[0]) // batch)))
    settings = Settings(epochs, batch, 5e-3, fractions=tuple(args.fractions), seed=args.seed)
    model, started = variant.build(args.seed), time.perf_counter()
    history = train(model, patches, variant.draw, settings)
    print(f"{args.variant}: {len(patches[0])} samples, {epochs} epochs in {time.perf_counter() - started:.0f} s")
    for at in sorted({0, epochs // 3, 2 * epochs // 3, epochs - 1}):
        print(f"epoch {at:4}:", ", ".join(f"{k} {getattr(history[at], k):.4f}" for k in PARTS))
    if len(args.fractions) > 1:
        print("fractions:", *(f"{f}: {sum(e.arm == i for e in history)} epochs" for i, f in enumerate(args.fractions)))

    part = args.part or next(iter(variant.compiled(model)))
    (module, read), (before, _) = (variant.compiled(m.eval())[part] for m in (model, variant.build(args.seed)))
    chosen = tuple(inputs[i] for i in read)
    with torch.no_grad():
        made, random = (m(*chosen) for m in (module, before))
    if isinstance(made, torch.Tensor):
        spread = [float(x.flatten(0, -2).std(0).mean()) for x in (made, random)]
        print("standard deviation of a feature: {:.3f}, before training {:.3f}".format(*spread))
    if args.variant.startswith("image") and part == "encoder":
        print(
            f"linear probe: {digits_probe(made):.3f}, random encoder {digits_probe(random):.3f}, pixels {digits_probe(inputs[0]):.3f}"
        )
    save(module, tuple(x[:4] for x in chosen), [tuple(x[:: max(1, len(x) // 256)] for x in chosen)], args.output)
    if args.plot:
        plot(history, made if isinstance(made, torch.Tensor) else made[0], args.output / "training.png")
    print(f"khtst-compile quantize {args.output / PROGRAM} --calib {args.output / CALIBRATION} -o OUT")


if __name__ == "__main__":
    main()
