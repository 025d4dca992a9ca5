"""Texts -> the arrays a lowered text model reads, with the tokenizer an artifact carries. Needs `tokenizers`, never torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.checks import check_count, check_type
from khtst_compile.errors import EnvironmentProblem, UsageError

Array = npt.NDArray[Any]
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
