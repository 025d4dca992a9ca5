"""Models small enough to take the whole way in seconds: `tests.tiny:mlp` on the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn


class Block(nn.Module):
    """(..., 32) float32 -> (..., 32): one normalized, gated two-layer network with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + inner


class Mlp(nn.Module):
    """(batch, 32) float32 -> (batch, 8) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.block(x))
        return found


class Coder(nn.Module):
    """(batch, 32) float32 -> (batch, 8) float32 and (batch, 2) int64: a network, a residual codebook called by hand, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(32, 8)
        self.register_buffer("codes", torch.randn(2, 20, 32))
        self.register_buffer("bias", -0.5 * self.codes.square().sum(-1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.ops.khtst.codebook_lookup(self.block(x), self.codes, self.bias, self.codes, True, True)
        return self.head(values), ids.long()


class Unsupported(nn.Module):
    """Sorts, which no target can do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x)
        return torch.linalg.svdvals(found)


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Mlp(), (torch.randn(4, 32),)


def coder() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Coder(), (torch.randn(4, 32),)


def unsupported() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Unsupported(), (torch.randn(4, 32),)


def broken() -> tuple[nn.Module, tuple[torch.Tensor]]:
    raise RuntimeError("no weights today")


class Chatty(Mlp):
    """Prints when it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write("running\n")
        return super().forward(x)


class Exits(Mlp):
    """Ends the process when it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(0)


def chatty() -> tuple[nn.Module, tuple[torch.Tensor]]:
    sys.stdout.write("building\n")
    return Chatty(), (torch.randn(4, 32),)


def exits() -> tuple[nn.Module, tuple[torch.Tensor]]:
    sys.exit(0)


def exits_later() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Exits(), (torch.randn(4, 32),)


def save_bert(folder: Path, tokenizer: Path) -> Path:
    """A sentence-embedding model folder as sentence-transformers writes them: one BERT layer of width 32 with random weights, mean pooling.

    tokenizer: a folder to copy the tokenizer's files from.
    """
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(tokenizer / name, folder / name)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48, "do_lower_case": False}))
    return folder
