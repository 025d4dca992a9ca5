"""Teach a state space model one series and then another, with and without replay, and save the one that remembers.

Tasks: to foretell the next piece of an electrocardiogram, then of sea temperatures. Both arms have the same first weights and batches.

python examples/train_ssm.py [output folder] [--alpha 0.5] [--steps 200] [--plot]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional

from khtst_compile.zoo import data
from khtst_compile.zoo.checkpoint import CALIBRATION, PROGRAM, save
from khtst_compile.zoo.ssm import ReplayBuffer, ReplaySsm, train_step
from khtst_compile.zoo.streams import stream

PIECES, SIZE = 7, 8  # of a sequence, and samples of a piece


def train(
    tasks: dict[str, tuple[torch.Tensor, torch.Tensor]], alpha: float, steps: int, seed: int
) -> tuple[ReplaySsm, dict[str, list[float]]]:
    """The model after all tasks, and its error on each task, every tenth step."""
    model = ReplaySsm(SIZE, 48, SIZE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    buffer = ReplayBuffer(16384, (PIECES, SIZE), (PIECES, SIZE))
    batches, replays = stream(seed, "batches"), stream(seed, "replay")
    errors: dict[str, list[float]] = {name: [] for name in tasks}
    for x, target in tasks.values():
        for step in range(steps):
            rows = torch.randint(len(x), (32,), generator=batches)
            train_step(model, optimizer, buffer, x[rows], target[rows], alpha=alpha, generator=replays)
            if step % 10 == 9 or step == steps - 1:
                with torch.no_grad():
                    for name, (old, wanted) in tasks.items():
                        errors[name].append(float(functional.mse_loss(model(old), wanted)))
    return model.eval(), errors


def plot(curves: dict[str, dict[str, list[float]]], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
    for axis, (arm, errors) in zip(axes, curves.items(), strict=True):
        for name, values in errors.items():
            axis.semilogy(values, label=name)
        axis.set(title=arm, xlabel="tens of steps, first one task, then the other", ylabel="mean squared error")
        axis.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("out/ssm"))
    parser.add_argument("--alpha", type=float, default=0.5, help="the weight of old pairs")
    parser.add_argument("--steps", type=int, default=200, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true", help="write training.png as well")
    args = parser.parse_args()

    series = (("electrocardiogram", data.ecg()), ("sea temperature", data.sea_temperature()))
    tasks = {name: data.windows(values, PIECES, SIZE) for name, values in series}
    curves = {}
    for arm, alpha in (("without replay", 0.0), ("with replay", args.alpha)):
        model, curves[arm] = train(tasks, alpha, args.steps, args.seed)
        for name, values in curves[arm].items():
            print(f"{arm}: {name}: error {values[len(values) // 2 - 1]:.3f} after the first task, {values[-1]:.3f} after both")

    save(model, (tasks["electrocardiogram"][0][:2],), [(x[::4],) for x, _ in tasks.values()], args.output)
    if args.plot:
        plot(curves, args.output / "training.png")
    print(f"khtst-compile quantize {args.output / PROGRAM} --calib {args.output / CALIBRATION} -o OUT")


if __name__ == "__main__":
    main()
