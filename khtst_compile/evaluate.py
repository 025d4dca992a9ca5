"""How well a language model predicts a text: exp of the mean negative log-likelihood a token has after those before it.

Texts are joined and cut into windows; within a window every token but the first is judged. Two models are comparable on the same
windows only, so both are given the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact
from khtst_compile.errors import UsageError

Array = npt.NDArray[Any]
Logits = Callable[[Array], Array]


@dataclass(frozen=True)
class Perplexity:
    """value: exp(nll); nll: mean negative log-likelihood a token, in nats; tokens: how many were judged."""

    value: float
    nll: float
    tokens: int


def perplexity(
    model: str | Path,
    data: str | Path,
    *,
    reference: str | Path | None = None,
    limit: int = 64,
    max_length: int = 256,
    seed: int = 0,
    threads: int | None = None,
) -> tuple[Perplexity, Perplexity | None]:
    """Of `model` and, on the same windows, of `reference`.

    model, reference: an artifact of `quantize` or `lower`, or a Hugging Face folder (run in float32). data: texts or token ids, as for
    calibration. limit: windows at most, drawn by `seed`; max_length: tokens of a window. Raises UsageError for what is no language
    model with a cache, CalibrationError for unusable data.
    """
    from khtst_compile.windows import read_windows

    judged = _load(model, threads)
    windows = read_windows(judged.words, data, min(max_length, judged.positions), limit, seed)
    other = _load(reference, threads) if reference is not None else None
    if other is not None and other.words.size != judged.words.size:
        raise UsageError(
            f"{reference}: has {other.words.size} tokens, {model} {judged.words.size}; needed: models of one vocabulary"
        )
    return _measure(judged.logits, windows), _measure(other.logits, windows) if other is not None else None


def _measure(logits: Logits, windows: list[list[int]]) -> Perplexity:
    total, tokens = 0.0, 0
    for window in windows:
        ids = np.array(window, np.int64)
        total += float(negative_log_likelihood(logits(ids[None])[0], ids[1:]).sum())
        tokens += len(ids) - 1
    return Perplexity(float(np.exp(total / tokens)), total / tokens, tokens)


def negative_log_likelihood(logits: Array, targets: Array) -> Array:
    """logits: (n, vocabulary), targets: (n,) ids -> (n,) float64, -log softmax(logits)[target], in nats."""
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    picked = np.take_along_axis(rows, targets[:, None], -1)[:, 0]
    return np.asarray(np.log(np.exp(rows).sum(-1)) - picked)


@dataclass(frozen=True)
class _Model:
    """logits: ids (1, n) int64 -> (1, n - 1, vocabulary), after each token but the last; words: its vocabulary and tokenizer."""

    logits: Logits
    words: Any
    positions: int


def _load(source: str | Path, threads: int | None) -> _Model:
    from khtst_compile.windows import Vocabulary

    if not (Path(source) / artifact.MANIFEST).is_file():
        from khtst_compile.capture import capture

        return _of_program(source, capture(source, task="text-generation"))
    folder = artifact.read(source, kind=("quantized", "library"))
    if "cache" not in folder.manifest["meta"]:
        raise UsageError(f"{source}: no language model with a cache; quantize with --task text-generation")
    if folder.kind == "quantized":
        from khtst_compile.api import load_program

        return _of_program(source, load_program(folder), folder.path)
    from khtst_compile.runtime import load
    from khtst_compile.tokens import FOLDER

    loaded = load(source, threads=threads)
    pasts = [(int(s.shape[2]), s.dtype) for s in loaded.inputs[2:]]
    meta = folder.manifest["meta"]

    def logits(ids: Array) -> Array:
        empty = [np.zeros((0, 1, width), dtype) for width, dtype in pasts]
        return loaded.call([ids, np.arange(ids.shape[1] - 1), *empty])[0]

    words = Vocabulary(int(loaded.outputs[0].shape[-1]), folder.path / FOLDER, (meta.get("end_tokens") or [None])[0])
    return _Model(logits, words, int(meta["cache"]["positions"]))


def _of_program(source: str | Path, program: Any, folder: Path | None = None) -> _Model:
    import torch

    from khtst_compile.tokens import FOLDER
    from khtst_compile.windows import Vocabulary, inputs

    words = Vocabulary.of(program)
    if folder is not None:
        words = Vocabulary(words.size, folder / FOLDER, words.end)

    def logits(ids: Array) -> Array:
        with torch.no_grad():
            given = inputs(program, torch.from_numpy(ids), torch.arange(ids.shape[1] - 1))
            found: Array = program.run(given)["logits"].numpy()
        return found

    return _Model(logits, words, int(program.meta["cache"]["positions"]))
