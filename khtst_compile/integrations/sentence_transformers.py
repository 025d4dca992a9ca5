"""An artifact as the only module of a SentenceTransformer, whose `encode` then runs the compiled model:
`SentenceTransformer(modules=[ArtifactModule("minilm-x86")]).encode(["a text"])`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.modules import InputModule

from khtst_compile import runtime
from khtst_compile.api import TOKENIZER
from khtst_compile.errors import UsageError
from khtst_compile.tokens import TextEncoder

FOLDER = "artifact"
OUTPUT = "sentence_embedding"


class ArtifactModule(InputModule):  # type: ignore[misc]
    """Tokenizes with the artifact's own tokenizer and computes with its library.

    artifact: a folder of `lower`, quantized for the task "sentence-embedding"; threads: worker threads (default: every usable core);
    max_seq_length: tokens a text is cut at (default: as the original model). Raises UsageError for an artifact without that output or
    without a tokenizer.
    """

    def __init__(self, artifact: str | Path, *, threads: int | None = None, max_seq_length: int | None = None) -> None:
        super().__init__()
        self.artifact = runtime.load(artifact, threads=threads)
        outputs = [s.name for s in self.artifact.outputs]
        if OUTPUT not in outputs:
            raise UsageError(
                f"{artifact}: outputs are {outputs}; needed: {OUTPUT!r}; quantize the model with task 'sentence-embedding'"
            )
        self._tokenizer: Any = None
        self.encoder = TextEncoder(self.artifact.path / TOKENIZER, self.artifact.manifest, max_seq_length)

    @property
    def tokenizer(self) -> Any:
        """The artifact's tokenizer as transformers has it, for callers that count tokens; `preprocess` does not go through it."""
        from transformers import PreTrainedTokenizerFast

        if self._tokenizer is None:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(self.artifact.path / TOKENIZER, local_files_only=True)
        self._tokenizer.model_max_length = self.max_seq_length
        return self._tokenizer

    @property
    def max_seq_length(self) -> int:
        """Tokens a text is cut at."""
        return self.encoder.max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.encoder.cut_at(value)

    def get_embedding_dimension(self) -> int:
        """Features of one embedding."""
        return int(next(s for s in self.artifact.outputs if s.name == OUTPUT).shape[-1])

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Texts -> the artifact's inputs, (texts, longest) int64 each."""
        texts = [(prompt or "") + str(text) for text in inputs]
        return {name: torch.from_numpy(array) for name, array in self.encoder(texts).items()}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Adds "sentence_embedding": (texts, features) float32."""
        inputs = {s.name: np.ascontiguousarray(features[s.name].cpu().numpy()) for s in self.artifact.inputs}
        features[OUTPUT] = torch.from_numpy(run_in_parts(self.artifact, inputs)[OUTPUT])
        return features

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Copy the artifact into the saved model."""
        shutil.copytree(self.artifact.path, Path(output_path) / FOLDER, dirs_exist_ok=True)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> ArtifactModule:
        """The module from a folder `save` wrote."""
        return cls(Path(model_name_or_path) / subfolder / FOLDER)


def run_in_parts(artifact: runtime.Artifact, inputs: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """inputs: name -> (texts, ...), any number of texts -> outputs of as many rows, computed in batches of sizes the artifact takes.

    The last rows are repeated where a batch would be smaller than the smallest.
    """
    axis = artifact.inputs[0].shape[0]
    low, high = (axis, axis) if isinstance(axis, int) else artifact.manifest["axes"].get(axis, (1, 2**31))
    total = len(next(iter(inputs.values())))
    parts = max(-(-total // high), 1)
    found: list[dict[str, np.ndarray[Any, Any]]] = []
    for rows in np.array_split(np.arange(total), parts):
        filled = np.concatenate([rows, np.full(max(low - len(rows), 0), rows[-1] if len(rows) else 0)])
        results = artifact.run({name: np.ascontiguousarray(array[filled]) for name, array in inputs.items()})
        found.append({name: np.array(value[: len(rows)]) for name, value in results.items()})
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}
