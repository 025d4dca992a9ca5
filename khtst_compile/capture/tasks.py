"""What a Hugging Face model is asked to compute: which class to load, what goes in, what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from khtst_compile.errors import CaptureError, UsageError

Call = Callable[[nn.Module, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """auto: the transformers class that loads it; images: pixel_values instead of token ids; pairs: the model may read two texts;
    cached: keys and values of earlier tokens come in and go out (capture/decoder.py)."""

    name: str
    auto: str
    output: str
    images: bool = False
    pairs: bool = False
    cached: bool = False


TASKS = {
    t.name: t
    for t in (
        Task("feature-extraction", "AutoModel", "last_hidden_state"),
        Task("sentence-embedding", "AutoModel", "sentence_embedding"),
        Task("sequence-classification", "AutoModelForSequenceClassification", "logits", pairs=True),
        Task("token-classification", "AutoModelForTokenClassification", "logits"),
        Task("fill-mask", "AutoModelForMaskedLM", "logits"),
        Task("text-generation", "AutoModelForCausalLM", "logits", cached=True),
        Task("causal-lm", "AutoModelForCausalLM", "logits"),
        Task("image-classification", "AutoModelForImageClassification", "logits", images=True),
        Task("image-features", "AutoModel", "last_hidden_state", images=True),
    )
}

_SUFFIXES = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
}


def infer_task(folder: Path, architecture: str, images: bool, asked: str | None) -> Task:
    """The task asked for, else what modules.json or the architecture's name says. Raises UsageError naming --task and its choices."""
    choices = ", ".join(TASKS)
    if asked is not None:
        if asked not in TASKS:
            raise UsageError(f"--task {asked!r} is unknown; choose one of {choices}")
        return TASKS[asked]
    if (folder / "modules.json").is_file():
        return TASKS["sentence-embedding"]
    for suffix, name in _SUFFIXES.items():
        if architecture.endswith(suffix):
            return TASKS[name]
    if architecture.endswith("Model"):
        return TASKS["image-features" if images else "feature-extraction"]
    raise UsageError(
        f"{folder}: the task does not follow from architecture {architecture!r}; say it with --task, one of {choices}"
    )


def known_task(meta: dict[str, Any]) -> str | None:
    """The task a model folder was captured for, from an artifact's `meta`; None where it was a module or a file, which have none."""
    found = meta.get("task")
    return str(found) if found in TASKS else None


def model_call(task: Task, folder: Path) -> Call:
    """The function that runs the loaded model for `task` and names its one output."""
    if task.name != "sentence-embedding":
        return lambda model, inputs: {task.output: getattr(model(**inputs), task.output)}
    mode, normalize = read_pooling(folder)
    pool = POOLINGS[mode]

    def embed(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pooled = pool(model(**inputs).last_hidden_state, inputs["attention_mask"])
        return {task.output: nn.functional.normalize(pooled, dim=-1) if normalize else pooled}

    return embed


def pool_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """hidden: (batch, seq, features) float32, mask: (batch, seq) int64, 1 at real tokens -> (batch, features), their mean."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def pool_mean_sqrt_len(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As `pool_mean`, divided by the square root of the number of tokens instead."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9).sqrt()


def pool_cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The first token. Shapes as in `pool_mean`."""
    return hidden[:, 0]


def pool_max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The largest value per feature over real tokens. Shapes as in `pool_mean`."""
    return torch.where(mask.unsqueeze(-1) != 0, hidden, torch.full_like(hidden, -1e9)).amax(1)


POOLINGS = {"mean": pool_mean, "cls": pool_cls, "max": pool_max, "mean_sqrt_len_tokens": pool_mean_sqrt_len}


def read_pooling(folder: Path) -> tuple[str, bool]:
    """What sentence-transformers puts behind the model: (key of POOLINGS, whether to normalize); mean alone where nothing says.

    Raises CaptureError for modules and pooling modes that are not among these.
    """
    if not (folder / "modules.json").is_file():
        return "mean", False
    modules = read_json(folder / "modules.json")
    kinds = [str(m["type"]).rsplit(".", 1)[-1] for m in modules]
    unknown = [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds.count("Pooling") != 1:
        raise CaptureError(
            f"{folder / 'modules.json'}: modules {kinds}; supported: Transformer, Pooling, Normalize. Use --task "
            "feature-extraction for the transformer alone"
        )
    config = read_json(folder / modules[kinds.index("Pooling")]["path"] / "config.json")
    modes = [
        k.removeprefix("pooling_mode_").removesuffix("_token") for k, v in config.items() if k.startswith("pooling_mode_") and v
    ]
    modes = modes or ["mean" if m == "mean_tokens" else m for m in [config.get("pooling_mode", "mean")]]
    modes = [{"mean_tokens": "mean", "max_tokens": "max"}.get(m, m) for m in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise CaptureError(f"{folder}: pooling {modes}; supported: exactly one of {sorted(POOLINGS)}")
    return modes[0], "Normalize" in kinds


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises UsageError where it is missing or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from error
