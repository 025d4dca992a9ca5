"""Text generation on a lowered language model: the prompt in pieces, then token by token over a cache it owns. Never needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import UsageError
from khtst_compile.sampling import Sampling
from khtst_compile.tokens import Detokenizer

if TYPE_CHECKING:
    from khtst_compile.runtime import Artifact

Array = npt.NDArray[Any]
Prompt = str | Sequence[int] | Array


class Options(TypedDict, total=False):
    """Keyword arguments of `Artifact.generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: str | Sequence[str]
    ignore_end: bool


PIECE = 512  # tokens of a prompt computed at once: longer ones need more memory and gain nothing


@dataclass(frozen=True)
class Step:
    """ids: (batch,) int64, the next token of each text, -1 where the text has ended; texts: what each text grew by, whole characters
    only ("" throughout where the artifact has no tokenizer)."""

    ids: Array
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """What the first text grew by."""
        return self.texts[0]


class Cache:
    """Keys and values of all layers for texts in progress, in memory that the program reads and writes in place.

    length: positions filled so far, of `capacity`.
    """

    def __init__(self, artifact: Artifact, batch: int, capacity: int):
        self.length, self.capacity = 0, capacity
        self._artifact, self._memory = artifact, artifact.store_cache(batch, capacity)

    def advance(self, ids: Array, logits_at: Array) -> Array:
        """ids: (batch, new) int64, the tokens after those there are; logits_at: (rows,) int64, which of them to predict after.

        Returns logits (batch, rows, vocabulary) float32. Raises UsageError where they do not fit.
        """
        end = self.length + ids.shape[1]
        if end > self.capacity:
            raise UsageError(
                f"the cache holds {self.capacity} positions, {self.length} of them filled; {ids.shape[1]} more do not fit"
            )
        logits: Array = self._artifact.step(self._memory, self.length, [ids, logits_at])[0]
        self.length = end
        return logits


class Generation(Iterator[Step]):
    """The running generation; iterate to get each Step as it is made. prompt_tokens: per text; new_tokens: steps made so far;
    prefill_s, decode_s: seconds the program took for the prompt and for the steps after the first."""

    def __init__(
        self, artifact: Artifact, ids: Array, limit: int, sampling: Sampling, seed: int, ends: frozenset[int], writers: list[Any]
    ):
        self._sampling, self._ends, self._writers = sampling, ends, writers
        self._ids, self._limit = ids, limit
        self._draws = [np.random.default_rng([seed, row]) for row in range(ids.shape[0])]
        self._open = np.ones(ids.shape[0], bool)
        self._cache = Cache(artifact, ids.shape[0], ids.shape[1] + limit)
        self.prompt_tokens, self.new_tokens = int(ids.shape[1]), 0
        self.prefill_s = self.decode_s = 0.0

    def rates(self) -> dict[str, float]:
        """Counts, seconds and tokens a second (all texts together) so far; 0 where nothing was timed yet."""
        texts, steps = len(self._ids), self.new_tokens - 1
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "prefill_tokens_per_s": texts * self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0,
            "decode_tokens_per_s": texts * steps / self.decode_s if self.decode_s else 0.0,
        }

    def __next__(self) -> Step:
        if self.new_tokens >= self._limit or not self._open.any():
            raise StopIteration
        started = time.perf_counter()
        logits = self._advance()
        seconds = time.perf_counter() - started
        if self.new_tokens == 0:
            self.prefill_s = seconds
        else:
            self.decode_s += seconds
        self.new_tokens += 1
        return self._step(logits)

    def _advance(self) -> Array:
        """Compute what is not in the cache yet; logits (batch, vocabulary) after its last token."""
        rest = self._ids
        while True:
            piece, rest = rest[:, :PIECE], rest[:, PIECE:]
            logits = self._cache.advance(piece, np.array([piece.shape[1] - 1]))
            if not rest.size:
                return logits[:, 0]

    def _step(self, logits: Array) -> Step:
        ids = np.full(len(logits), -1, np.int64)
        texts = [""] * len(logits)
        for row in np.flatnonzero(self._open):
            token = self._sampling.pick(logits[row], self._draws[row])
            ids[row] = token
            ended = token in self._ends
            if self._writers:
                texts[row], stopped = self._writers[row].push(token)
                ended = ended or stopped
                if ended or self.new_tokens >= self._limit:
                    texts[row] += self._writers[row].rest()
            self._open[row] = not ended
        self._ids = np.maximum(ids, 0)[:, None]  # an ended text goes on with token 0, which nobody sees
        return Step(ids, tuple(texts))


def generate(
    artifact: Artifact,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    ignore_end: bool = False,
) -> Generation:
    """See `Artifact.generate`."""
    cache = artifact.manifest["meta"].get("cache")
    if not cache:
        raise UsageError(
            f"{artifact.path}: no language model with a cache (its task is {artifact.manifest['meta'].get('task')!r}); needed: an "
            "artifact quantized with --task text-generation"
        )
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; needed: at least 1")
    sampling = Sampling(temperature, top_k, top_p)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise UsageError("stop holds an empty text, which ends everything; leave it out")
    detokenizer = Detokenizer.find(artifact.path)
    if detokenizer is None and (isinstance(prompt, str) or stops):
        raise UsageError(
            f"{artifact.path}: carries no tokenizer, so it takes no text; give token ids, or quantize from a folder with tokenizer.json"
        )
    ids = _prompt_ids(artifact, detokenizer, prompt)
    positions = int(cache["positions"])
    if ids.shape[1] >= positions:
        raise UsageError(f"prompt: {ids.shape[1]} tokens; the model has {positions} positions, so at most {positions - 1}")
    ends = frozenset() if ignore_end else frozenset(int(i) for i in artifact.manifest["meta"].get("end_tokens", ()))
    writers = [detokenizer.writer(stops) for _ in ids] if detokenizer is not None else []
    return Generation(artifact, ids, min(max_new_tokens, positions - ids.shape[1]), sampling, seed, ends, writers)


def _prompt_ids(artifact: Artifact, detokenizer: Detokenizer | None, prompt: Prompt) -> Array:
    """(batch, tokens) int64. Raises UsageError for an empty prompt, ids out of range, or anything but text and ids."""
    if isinstance(prompt, str):
        assert detokenizer is not None
        found: Any = [detokenizer.encode(prompt)]
    else:
        found = prompt
    try:
        ids = np.asarray(found)
    except ValueError as error:
        raise UsageError("prompt: texts of different lengths; needed: as many tokens in each, or one call a text") from error
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.size == 0:
        raise UsageError("prompt: holds no token; needed: at least one")
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"prompt: {ids.dtype} of shape {ids.shape}; needed: a text, token ids, or (batch, tokens) of them")
    low, high = artifact.manifest.get("ranges", {}).get("input_ids", (0, 2**31))
    if int(ids.min()) < low or int(ids.max()) > high:
        raise UsageError(f"prompt: token ids {ids.min()}..{ids.max()}; needed: {low}..{high}")
    batches = artifact.manifest["axes"].get("batch", [1, 1])
    if not batches[0] <= len(ids) <= batches[1]:
        raise UsageError(f"prompt: {len(ids)} texts; the artifact takes {batches[0]}..{batches[1]}")
    return np.ascontiguousarray(ids, np.int64)
