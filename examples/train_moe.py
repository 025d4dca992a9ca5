"""Train a mixture of experts on the bytes of a text, beside dense models and without balance, and save it for `khtst-compile quantize`.

python examples/train_moe.py [output folder] [--experts 8] [--top-k 2] [--steps 300] [--seed 0] [--plot]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from khtst_compile.zoo.data import text_bytes
from khtst_compile.zoo.layers import Mlp
from khtst_compile.zoo.moe import Routed, SonicMoe, fair_capacity
from khtst_compile.zoo.moe.bytes import ByteModel, train, windows
from khtst_compile.zoo.streams import fresh, stream

D, BATCH = 64, 256


@torch.no_grad()
def judge(model: ByteModel, text: torch.Tensor) -> tuple[float, list[Routed]]:
    """Bits per byte on 16 batches of `text`, and what the first mixture did with each."""
    bits, seen = 0.0, list[Routed]()
    for starts in torch.randint(len(text) - model.context, (16, BATCH), generator=stream(0, "judge")):
        ids, wanted = windows(text, starts, model.context)
        logits, mixtures = model.routed(ids)
        bits += float(torch.nn.functional.cross_entropy(logits, wanted)) / np.log(2) / 16
        seen += mixtures[:1]
    return bits, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("out/moe"))
    for name, value in (("experts", 8), ("top-k", 2), ("steps", 300), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--plot", action="store_true", help="write training.png as well")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    seen, held_out = text_bytes().tensor_split([-45_000])  # the last topics, a tenth, are kept for judging
    capacity = fair_capacity(BATCH, args.experts, args.top_k)
    arms = {
        "mixture": (0.01, lambda: SonicMoe(D, args.experts, args.top_k, capacity)),
        "without balance": (0.0, lambda: SonicMoe(D, args.experts, args.top_k, capacity)),
        "dense, equal active": (0.0, lambda: Mlp(D, D, 2 * D * args.top_k, bias=False)),
        "dense, equal total": (0.0, lambda: Mlp(D, D, 2 * D * args.experts, bias=False)),
    }
    models, curves, loads = {}, {}, {}
    for name, (balance, layer) in arms.items():
        with fresh(args.seed, "weights"):
            models[name] = ByteModel(D, [layer(), layer()])
        curves[name] = train(models[name], seen, args.steps, batch=BATCH, seed=args.seed, balance=balance)
        bits, routed = judge(models[name], held_out)
        line = f"{name:20} {sum(p.numel() for p in models[name].parameters()):8,} parameters  {bits:.3f} bits per byte"
        if routed:
            loads[name] = torch.stack([r.load for r in routed]).double().mean(0)
            dropped, auxiliary = (sum(float(getattr(r, f)) for r in routed) / len(routed) for f in ("dropped", "auxiliary"))
            line += f"  load {loads[name].min():.0f} to {loads[name].max():.0f}, {dropped / BATCH:.1%} dropped, auxiliary {auxiliary:.3f}"
        print(line)
    ids = windows(seen, torch.randint(len(seen) - 16, (4 * BATCH,), generator=stream(args.seed, "samples")), 16)[0]
    program = torch.export.export(models["mixture"], (ids,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
    torch.export.save(program, args.output / "model.pt2")
    np.savez(args.output / "calibration.npz", ids=ids.numpy())
    if args.plot:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        for name, curve in curves.items():
            axes[0].plot(np.convolve(curve, np.full(20, 0.05), "valid"), label=name)
        axes[1].plot(torch.stack(list(loads.values())).T, "o-", label=list(loads))
        axes[0].legend(title="bits per byte")
        axes[1].legend(title=f"tokens of an expert, by expert; capacity {capacity}")
        pyplot.savefig(args.output / "training.png", dpi=120)


if __name__ == "__main__":
    main()
