"""Recipes beyond the named ones: text with options, layers kept in float32, and what each choice costs.

python examples/custom_recipe.py [output folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import khtst_compile as kc

RECIPES = {
    "plain": "w8a8",
    "static": "w8a8{activations=static}",
    "smoothed": "smooth{alpha=0.5} | w8a8",
    "rotated": "rotate{block=64,check=false} | w8a8",
    "last layer kept": "smooth{alpha=0.5} | w8a8{keep_fp32=layers.3}",
}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = out / "calibration.npz"
    x = np.random.default_rng(0).standard_normal((128, 64), dtype=np.float32)
    x[:, 5] *= 30  # one channel of outliers, which a scale per token has to span
    np.savez(data, x=x)
    for name, recipe in RECIPES.items():
        made = kc.quantize("examples.tiny_mlp:build", out / name.replace(" ", "_"), calib=data, recipe=recipe)
        done = {p["pass"]: p["changed"] for p in made.manifest["passes"]}
        skipped = [s for p in made.manifest["passes"] for s in p["skipped"]]
        error = made.manifest["golden"]["accuracy"]["output: relative error dB"]
        print(f"{name:16} {error:6.1f} dB  changed {done}")
        for entry in skipped:
            print(f"{'':16} left alone {entry['site']}: {entry['reason']}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/custom_recipe"))
