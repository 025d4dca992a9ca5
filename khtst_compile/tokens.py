"""Texts -> the arrays a lowered text model reads and back, with the tokenizer an artifact carries. Needs `tokenizers`, never torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.checks import check_count, check_type
from khtst_compile.errors import EnvironmentProblem, UsageError

Array = npt.NDArray[Any]
FOLDER = "tokenizer"  # inside an artifact
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


def room_for_text(tokenizer: Any) -> int:
    """The smallest length to cut at that leaves a token of the text beside those added to every text; below it `tokenizers` cuts
    nothing at all."""
    return int(tokenizer.num_special_tokens_to_add(False)) + 1


def unencodable(text: str) -> str | None:
    """The first character of `text` that no UTF-8 can hold, as its escape, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None


class TextEncoder:
    """folder: holds tokenizer.json; manifest: of the artifact; max_length: tokens a text is cut at, by default what the original model
    allows. Raises UsageError where there is no tokenizer, EnvironmentProblem without the `tokenizers` package."""

    def __init__(self, folder: Path, manifest: dict[str, Any], max_length: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EnvironmentProblem("reading texts needs tokenizers; pip install 'khtst-compile[hf]'") from error
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"{folder}: no tokenizer.json; quantize from a model folder that has one, or pass token ids")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._names = [e["name"] for e in manifest["inputs"]]
        self._lowest, highest = manifest["axes"].get("seq", (1, 2**31))
        self._highest = min(int(highest), int(manifest["meta"].get("max_length") or highest))
        found = (self._tokenizer.padding or {}).get("pad_id")
        ids = [found, *(self._tokenizer.token_to_id(t) for t in _PADDING)]
        self._pad = int(next((i for i in ids if i is not None), 0))
        self._tokenizer.no_padding()
        self.max_length = 0
        self.cut_at(max_length or self._highest)

    def cut_at(self, length: int) -> None:
        """Cut texts at so many tokens from now on; never more than the model reads."""
        check_count(length, "max_length")
        least, length = room_for_text(self._tokenizer), min(length, self._highest)
        if length < least:
            raise UsageError(
                f"max_length is {length}, of which the tokenizer adds {least - 1} tokens to every text; needed: at least {least}"
            )
        self.max_length = length
        self._tokenizer.enable_truncation(max_length=self.max_length)

    def __call__(self, texts: Sequence[str]) -> dict[str, Array]:
        """Input name -> (texts, longest) int64: token ids, padded; 1 at real tokens; type ids."""
        for number, text in enumerate(texts, 1):
            check_type(text, f"text {number}", str, "text")
            if (bad := unencodable(text)) is not None:
                raise UsageError(f"text {number} holds {bad}, half a surrogate pair; repair the text")
        rows = self._tokenizer.encode_batch(list(texts))
        width = max([self._lowest, *(len(r.ids) for r in rows)])
        made = {
            "input_ids": np.full((len(rows), width), self._pad, np.int64),
            "attention_mask": np.zeros((len(rows), width), np.int64),
            "token_type_ids": np.zeros((len(rows), width), np.int64),
        }
        for at, row in enumerate(rows):
            made["input_ids"][at, : len(row.ids)] = row.ids
            made["attention_mask"][at, : len(row.ids)] = 1
            made["token_type_ids"][at, : len(row.ids)] = row.type_ids
        return {name: made[name] for name in self._names}


class Detokenizer:
    """Text <-> token ids of a language model, with the tokenizer an artifact carries."""

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EnvironmentProblem("reading texts needs tokenizers; pip install 'khtst-compile[hf]'") from error
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    @staticmethod
    def find(artifact: Path) -> Detokenizer | None:
        """That of an artifact folder; None where it carries no tokenizer."""
        file = artifact / FOLDER / "tokenizer.json"
        return Detokenizer(file) if file.is_file() else None

    def encode(self, text: str) -> list[int]:
        """Token ids, with those the tokenizer puts at the start of a text."""
        return list(self.tokenizer.encode(text).ids)

    def writer(self, stops: Sequence[str] = ()) -> Writer:
        """For one growing text."""
        return Writer(self.tokenizer, tuple(stops))


class Writer:
    """Token ids, one by one -> text that is final: no half characters, nothing that may yet turn out to begin a stop text."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held, self._done = "", False

    def push(self, token: int) -> tuple[str, bool]:
        """What can be shown now, and whether a stop text was reached; it is not shown, nor what follows it."""
        if self._done:
            return "", True
        self._held += self._stream.step(self._tokenizer, token) or ""
        reached = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if reached:
            shown, self._held, self._done = self._held[: min(reached)], "", True
            return shown, True
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        shown, self._held = self._held, ""
        return shown
