"""A language model's prompt and steps on ARM, with the cache that x86 has: whether all results have its bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import khtst_compile as kc
from khtst_compile import artifact
from tests.arm.emulator import CPUS, Job, program

STEPS = 8


def check_steps(x86: Path, arm: Path, variant: str, prompt: tuple[int, int], place: Path, runner: Path) -> None:
    """Run a prompt (texts, tokens) of any ids and STEPS more tokens: all logits and all new keys and values are those of x86."""
    loaded, job = kc.load(x86, threads=1), Job(place / "job", runner)
    names, rng = [s.name for s in loaded.inputs], np.random.default_rng(0)
    caches = [s for s in loaded.inputs if s.name.startswith("past_")]
    cache = {s.name: np.zeros((0, prompt[0], int(s.shape[2])), s.dtype) for s in caches}
    last = loaded.manifest["ranges"]["input_ids"][1]
    weights: list[int] = []
    wants = []
    for step in range(STEPS + 1):
        fresh = rng.integers(0, last + 1, (prompt[0], prompt[1] if step == 0 else 1))
        inputs = {"input_ids": fresh, "logits_at": np.array([fresh.shape[1] - 1]), **cache}
        wants.append(loaded.run(inputs))
        arrays = [inputs[n] for n in names]
        if step == 0:
            ids = program(artifact.read(arm, kind="library"), variant, arrays, job)["ids"]
            weights = ids[len(arrays) :]
        else:
            ids = [*(job.tensor(a) for a in arrays), *weights]
        job.lines.append(f"main {place}/step{step}_ {len(arrays)} {' '.join(map(str, ids))}")
        cache = {n: np.concatenate([old, wants[-1][n.replace("past_", "new_")]]) for n, old in cache.items()}
    job.run(CPUS[variant.removeprefix("arm-")])
    for step, outputs in enumerate(wants):
        for number, spec in enumerate(loaded.outputs):
            got = (place / f"step{step}_{number}").read_bytes()
            assert got == outputs[spec.name].tobytes(), f"{variant}, step {step}: {spec.name}"
