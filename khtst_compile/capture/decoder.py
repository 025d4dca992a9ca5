"""A causal language model with its key-value cache as explicit inputs and outputs.

One program serves prompts (many tokens, no past), further pieces of a prompt, and single steps: it reads `past` positions computed
before and returns the keys and values of its `seq` new ones, which the caller puts behind them. Nothing is mutated and nothing copied:
positions are the leading axis of a cache, so the filled part of a larger buffer is contiguous.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from khtst_compile.capture.shapes import BATCH, Axis, Range, plan_axes
from khtst_compile.capture.tasks import read_json
from khtst_compile.errors import CaptureError, UsageError

ATTENTION = "khtst_cached"  # the name our attention goes by inside transformers
TRACE = {"batch": 2, "seq": 7, "past": 5, "rows": 3}  # all different, so that no two axes are taken for one
# Rotary embeddings whose frequencies follow the length of the text: no table of positions can hold them.
_MOVING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Decoder:
    """model: loaded, its attention and rotary embedding replaced; widths: per layer, features of one position's keys (kv_heads *
    head_dim) and values; positions: the longest text, in tokens."""

    model: nn.Module
    widths: tuple[tuple[int, int], ...]
    positions: int

    def names(self) -> list[str]:
        """The inputs in call order."""
        return ["input_ids", "logits_at", *(n for i in range(len(self.widths)) for n in past_names(i))]

    def call(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """input_ids (batch, seq) int64, logits_at (rows,) int64, pasts (past, batch, width) float32.

        Returns logits (batch, rows, vocabulary) at the new positions named by `logits_at` (0 is the first new one), and per layer
        new_key, new_value (seq, batch, width) float32, keys after their rotation.
        """
        cache = Cache([tuple(inputs[n] for n in past_names(i)) for i in range(len(self.widths))])
        logits = run(model, inputs["input_ids"], cache, inputs["logits_at"])
        found = {"logits": logits}
        for layer in range(len(self.widths)):
            found[f"new_key_{layer}"], found[f"new_value_{layer}"] = cache.new[layer]
        return found

    def meta(self) -> dict[str, Any]:
        """What the runtime has to know about the cache."""
        new = [f"new_{n}_{i}" for i in range(len(self.widths)) for n in ("key", "value")]
        return {"layers": len(self.widths), "positions": self.positions, "new": new}


def past_names(layer: int) -> tuple[str, str]:
    """The inputs that hold a layer's keys and values of earlier positions."""
    return f"past_key_{layer}", f"past_value_{layer}"


class Cache:
    """Stands in for a transformers cache while the model runs once.

    pasts: per layer, keys and values (past, batch, width). `new[layer]`: what the model made, (seq, batch, width) each. Without pasts
    it only records.
    """

    is_compileable = False

    def __init__(self, pasts: list[tuple[torch.Tensor, ...]] | None = None):
        self.pasts = pasts
        for past in (p for layer in pasts or () for p in layer):
            # torch.export may keep two symbols for one size, and then no rule can tell that the mask fits every layer.
            torch._check(past.shape[0] == self.get_seq_length())  # type: ignore[no-untyped-call]
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.pasts[0][0].shape[0] if self.pasts else 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: (batch, kv_heads, seq, head_dim) -> the same with the past before them."""
        if layer_idx in self.new:
            raise CaptureError(
                f"layer {layer_idx} writes its cache twice; needed: a model whose layers each have one of their own"
            )
        self.new[layer_idx] = (_rows(key), _rows(value))
        if self.pasts is None:
            return key, value
        past_key, past_value = self.pasts[layer_idx]
        return _behind(past_key, key), _behind(past_value, value)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seq, head_dim) -> (seq, batch, heads * head_dim)."""
    batch, heads, seq, head_dim = x.shape
    return x.permute(2, 0, 1, 3).reshape(seq, batch, heads * head_dim)


def _behind(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """past: (past, batch, heads * head_dim); new: (batch, heads, seq, head_dim) -> (batch, heads, past + seq, head_dim)."""
    batch, heads, _, head_dim = new.shape
    return torch.cat([past.reshape(past.shape[0], batch, heads, head_dim).permute(1, 2, 0, 3), new], 2)


def causal_mask(past: Any, seq: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """positions (seq,) int64 of the new tokens, and which keys each may see, (1, 1, seq, past + seq) bool."""
    positions = torch.arange(past, past + seq)
    return positions, (positions[:, None] >= torch.arange(past + seq)[None, :])[None, None]


def run(model: nn.Module, ids: torch.Tensor, cache: Cache, logits_at: torch.Tensor) -> torch.Tensor:
    """One pass of a transformers model over our cache; logits (batch, rows, vocabulary)."""
    positions, mask = causal_mask(cache.get_seq_length(), ids.shape[1])
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    given = {
        "attention_mask": mask,
        "position_ids": positions[None],
        "use_cache": True,
        "logits_to_keep": logits_at,
        keyword: cache,
    }
    logits: torch.Tensor = model(input_ids=ids, **given).logits
    return logits


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' own over torch's attention, but grouped heads stay grouped; (batch, heads, seq, head_dim) each."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CaptureError(
                f"{type(module).__name__}: attention with {name} is not supported; needed: plain softmax attention"
            )
    grouped = query.shape[1] != key.shape[1]
    y = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=grouped)
    return y.transpose(1, 2).contiguous(), None


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, looked up: the same bits everywhere, and nothing to compute. As a model's rotary embedding."""

    def __init__(self, rotary: nn.Module, positions: int):
        super().__init__()
        cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
        self.register_buffer("cos", cos[0].clone())
        self.register_buffer("sin", sin[0].clone())

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids: (1, seq) -> cos, sin, (1, seq, head_dim) float32 each."""
        return F.embedding(position_ids, self.cos), F.embedding(position_ids, self.sin)  # type: ignore[arg-type]


def prepare(model: nn.Module, config: Any, limit: int) -> Decoder:
    """Replace attention and rotary embedding, and find out what each layer caches. limit: positions wanted at most.

    Raises CaptureError for a model that keeps another state than keys and values, or whose attention or positions have no form here.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    where = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise CaptureError(f"{where}: its attention cannot be replaced (transformers does not list it); use --task causal-lm")
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    limit = min(limit, _window(config))
    for name, module in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] == "rotary_emb":
            _replace_rotary(model, name, module, limit)
    recorder = Cache()
    try:
        with torch.no_grad():
            run(model, torch.zeros(1, 2, dtype=torch.int64), recorder, torch.zeros(1, dtype=torch.int64))
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CaptureError(f"{where}: cannot run on a cache of keys and values ({error}); use --task causal-lm") from error
    layers = range(len(recorder.new))
    if not layers or sorted(recorder.new) != list(layers):
        raise CaptureError(f"{where}: caches keys and values of layers {sorted(recorder.new)}; needed: of every layer, from 0 on")
    return Decoder(model, tuple((recorder.new[i][0].shape[2], recorder.new[i][1].shape[2]) for i in layers), limit)


def _window(config: Any) -> int:
    """Positions up to which a sliding window hides nothing; 2**31 where there is none."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None and (unknown := set(kinds) - {"full_attention", "sliding_attention"}):
        raise CaptureError(f"{type(config).__name__}: layers of kind {sorted(unknown)}; needed: full attention")
    slides = "sliding_attention" in kinds if kinds is not None else getattr(config, "use_sliding_window", True)
    return int(window) if window and slides else 2**31


def _replace_rotary(model: nn.Module, name: str, rotary: nn.Module, positions: int) -> None:
    if getattr(rotary, "rope_type", "default") in _MOVING_ROPE:
        raise CaptureError(f"{name}: rotary embedding of type {rotary.rope_type!r} changes with the length; needed: a fixed one")
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, RotaryTable(rotary, positions))


def decoder_signature(
    decoder: Decoder, vocabulary: int, shapes: Mapping[str, Range] | None, seed: int
) -> tuple[list[Axis], dict[str, torch.Tensor]]:
    """The axes and example inputs to trace with. `seq` in shapes bounds the whole text, past included."""
    pasts = decoder.names()[2:]
    known = [
        Axis("batch", (("input_ids", 0), *((n, 1) for n in pasts)), *BATCH),
        Axis("seq", (("input_ids", 1),), 1, decoder.positions),
        Axis("past", tuple((n, 0) for n in pasts), 0, decoder.positions),
        Axis("rows", (("logits_at", 0),), 1, decoder.positions),
    ]
    if wrong := sorted(set(shapes or {}) & {"past", "rows"}):
        raise UsageError(f"shapes: {wrong[0]!r} follows from seq, which bounds the whole text; give seq")
    axes = plan_axes(known, {"input_ids": 2, "logits_at": 1, **dict.fromkeys(pasts, 3)}, shapes)
    generator = torch.Generator().manual_seed(seed)
    size = TRACE
    examples = {
        "input_ids": torch.randint(0, vocabulary, (size["batch"], size["seq"]), generator=generator),
        "logits_at": torch.arange(size["rows"]),
    }
    for names, widths in zip(map(past_names, range(len(decoder.widths))), decoder.widths, strict=True):
        for name, width in zip(names, widths, strict=True):
            examples[name] = torch.randn(size["past"], size["batch"], width, generator=generator)
    return axes, examples


def end_tokens(folder: Path, config: Any) -> list[int]:
    """Ids of the tokens that end a text."""
    found = getattr(config, "eos_token_id", None)
    if (folder / "generation_config.json").is_file():
        found = read_json(folder / "generation_config.json").get("eos_token_id", found)
    return [int(i) for i in (found if isinstance(found, list) else [found]) if i is not None]
