"""Calibration data of language models: token windows of one length, without padding or mask, and no past."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from khtst_compile.errors import CalibrationError
from khtst_compile.ops.kv_cache import dequantize, quantize_cache
from khtst_compile.samples import Samples, draw, existing_file, read_items
from khtst_compile.tokens import Detokenizer

if TYPE_CHECKING:
    from khtst_compile.program import Program

log = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]
Encode = Callable[[str], list[int]]
BATCH = 4  # windows a batch: every position has logits over the whole vocabulary, and those take the memory
GOLDEN_WINDOWS, GOLDEN_TOKENS, GOLDEN_ROWS = 2, 16, 4  # of a golden sample: texts, new tokens after a past, rows of logits


def window_samples(
    path: str | Path | None, program: Program, *, limit: int | None, max_length: int, seed: int, random: bool
) -> Samples:
    """As samples.load_samples. max_length: tokens of a window; limit: windows at most, drawn by `seed` where there are more."""
    low, high = program.axes.get("seq", (1, max_length))
    length = max(low, min(max_length, high))
    if length < 2:
        raise CalibrationError(f"calibration: windows of {length} token; needed: at least 2, so max_length of 2 or more")
    if random and path is not None:
        raise CalibrationError(f"calibration: both {path} and random samples were asked for; needed: one of them")
    if random:
        log.warning("calibrating on random inputs: ranges will not be those of real data, and accuracy will suffer")
        found, source = _random(limit or 256, length, Vocabulary.of(program).size, seed), f"random (seed {seed}), not real data"
    else:
        found, source = read_windows(Vocabulary.of(program), path, length, limit, seed), str(path)
    return Samples(len(found), source, random, lambda: batches(program, found))


@dataclass(frozen=True)
class Vocabulary:
    """size: how many tokens there are; tokenizer: folder with tokenizer.json, or None; end: the token between texts, or None."""

    size: int
    tokenizer: Path | None
    end: int | None

    @staticmethod
    def of(program: Program) -> Vocabulary:
        folder = program.meta.get("tokenizer")
        ends = program.meta.get("end_tokens") or [None]
        return Vocabulary(int(program.outputs[0].shape[-1]), Path(folder) if folder else None, ends[0])

    def encoder(self, file: Path) -> Encode:
        """Text -> ids. Raises CalibrationError naming `file`, which holds texts, where there is no tokenizer."""
        if self.tokenizer is None or not (self.tokenizer / "tokenizer.json").is_file():
            raise CalibrationError(
                f"{file}: holds texts, but the model came without tokenizer.json; give token ids as .npz, or add the file"
            )
        return Detokenizer(self.tokenizer / "tokenizer.json").encode


def read_windows(words: Vocabulary, path: str | Path | None, length: int, limit: int | None, seed: int) -> list[list[int]]:
    """Windows of at most `length` tokens from texts or from an array of ids, at most `limit`. Raises CalibrationError for none."""
    file = existing_file(path)
    if file.suffix in (".npz", ".npy"):
        found = draw(iter(_from_array(file, words.size, length)), limit, seed)
    else:
        texts = (t for t in read_items(file) if isinstance(t, str))
        found = draw(join(texts, words.encoder(file), words.end, length), limit, seed)
    if not found:
        raise CalibrationError(f"{file}: holds no text of two tokens or more; needed: at least one")
    return found


def join(texts: Iterable[str], encode: Encode, separator: int | None, length: int) -> Iterator[list[int]]:
    """Token windows of `length` from texts one after the other, the separator token after each; the last, shorter one only if alone."""
    rest: list[int] = []
    any_yet = False
    for text in texts:
        rest += encode(text)
        if separator is not None:
            rest.append(separator)
        while len(rest) >= length:
            yield rest[:length]
            rest, any_yet = rest[length:], True
    if len(rest) > 1 and not any_yet:
        yield rest


def _random(count: int, length: int, words: int, seed: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(seed).integers(0, words, (count, length)).tolist()
    return found


def _from_array(file: Path, words: int, length: int) -> list[list[int]]:
    """Rows of an array (windows, tokens) of token ids, alone or under "input_ids", cut at `length`."""
    try:
        with np.load(file, allow_pickle=False) if file.suffix == ".npz" else contextlib.nullcontext() as archive:
            array = archive["input_ids"] if archive is not None else np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise CalibrationError(f"{file}: no plain numpy file with token ids under 'input_ids' ({error})") from error
    if array.ndim != 2 or array.shape[1] < 2 or not np.issubdtype(array.dtype, np.integer):
        raise CalibrationError(
            f"{file}: input_ids is {array.dtype} {array.shape}; needed: integers (windows, tokens) with at least 2 tokens"
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) >= words):
        raise CalibrationError(f"{file}: token ids {array.min()}..{array.max()}; needed: 0..{words - 1}")
    found: list[list[int]] = array[:, :length].tolist()
    return found


def batches(program: Program, windows: list[list[int]], size: int = BATCH) -> Iterator[Batch]:
    """`size` windows at a time as inputs of the program: no past, logits at every position."""
    for start in range(0, len(windows), size):
        ids = torch.tensor(windows[start : start + size])
        yield inputs(program, ids, torch.arange(ids.shape[1]))


def inputs(program: Program, ids: torch.Tensor, logits_at: torch.Tensor) -> Batch:
    """ids: (batch, seq) int64, logits_at: (rows,) int64 -> the program's inputs with an empty past."""
    empty = {s.name: torch.zeros(0, ids.shape[0], int(s.shape[2]), dtype=getattr(torch, s.dtype)) for s in program.inputs[2:]}
    return {"input_ids": ids, "logits_at": logits_at, **empty}


def encoded(program: Program, batch: Batch) -> Batch:
    """A batch with keys and values in float32 -> as `program` takes them: the same, or codes and scales of them."""
    if program.meta["cache"].get("dtype", "float32") == "float32":
        return batch
    made = dict(batch)
    for layer in range(program.meta["cache"]["layers"]):
        names = [f"past_{what}_{layer}" for what in ("key", "value", "scale")]
        heads = next(int(s.shape[2]) // 2 for s in program.inputs if s.name == names[2])
        kept = [batch[n].transpose(0, 1) for n in names[:2]]
        made |= zip(names, quantize_cache(*kept, heads, kept[0].shape[2] // heads, [0, 0]), strict=True)
    return made


def decoded(batch: Batch) -> Batch:
    """The inverse of `encoded`, up to rounding; a batch in float32 as it is."""
    made = {n: t for n, t in batch.items() if not n.startswith("past_scale_")}
    for layer in range(len(batch) - len(made)):
        for what, scales in zip(("key", "value"), batch[f"past_scale_{layer}"].chunk(2, -1), strict=True):
            made[f"past_{what}_{layer}"] = dequantize(batch[f"past_{what}_{layer}"], scales)
    return made


def golden(program: Program, batch: Batch) -> Batch:
    """A small sample that passes through everything: a few tokens after a past that the program itself computes, logits of the last."""
    ids = batch["input_ids"][:GOLDEN_WINDOWS]
    new = min(GOLDEN_TOKENS, ids.shape[1] - 1)
    before, after = ids[:, :-new], ids[:, -new:]
    seen = program.run(inputs(program, before, torch.arange(1)))
    past = {s.name: seen["new" + s.name.removeprefix("past")] for s in program.inputs[2:]}
    return {"input_ids": after, "logits_at": torch.arange(max(0, new - GOLDEN_ROWS), new), **past}
