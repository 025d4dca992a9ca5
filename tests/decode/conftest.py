"""Tiny language models with a byte tokenizer, in float32 and quantized, compiled once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import khtst_compile as kc

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

END = 257  # the token that ends a text
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 258,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": END,
    "pad_token_id": END,
    "initializer_range": 0.3,  # logits so far apart that another order of float32 sums does not change the largest
}


@dataclass(frozen=True)
class Made:
    """model: transformers' own; folder: its files; fp32, w8a8, int8: "library" artifacts, the last with an int8 cache; quantized,
    int8_quantized: what the last two were lowered from."""

    model: Any
    folder: Path
    fp32: Path
    quantized: Path
    w8a8: Path
    int8_quantized: Path
    int8: Path


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens 0..255, then the start of a text and its end."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<start>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def make(kind: str, folder: Path) -> Made:
    torch.manual_seed(0)
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "model", safe_serialization=True)
    write_tokenizer(folder / "model")
    words = ["one two three", "four five six seven", "eight nine ten eleven twelve"]
    (folder / "calib.json").write_text(json.dumps(words * 8))
    kc.quantize(folder / "model", folder / "fp32-q", recipe="fp32", random=True, limit=4, max_length=16)
    kc.lower(folder / "fp32-q", folder / "fp32", target="x86-avx2")
    kc.quantize(folder / "model", folder / "q", calib=folder / "calib.json", recipe="smooth{alpha=0.5} | w8a8", max_length=16)
    kc.lower(folder / "q", folder / "w8a8", target="x86-avx2")
    recipe = "smooth{alpha=0.5} | w8a8"
    kc.quantize(folder / "model", folder / "q8", calib=folder / "calib.json", recipe=recipe, kv_cache="int8", max_length=16)
    kc.lower(folder / "q8", folder / "int8", target="x86-avx2")
    return Made(model, folder / "model", folder / "fp32", folder / "q", folder / "w8a8", folder / "q8", folder / "int8")


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def prompt() -> np.ndarray:
    """(2, 9) int64 token ids, without the end token."""
    return np.random.default_rng(3).integers(0, 256, (2, 9))
