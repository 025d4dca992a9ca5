"""A Hugging Face folder (config.json, safetensors, tokenizer.json) -> Program, without network, remote code or pickles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from khtst_compile.capture.decoder import decoder_signature, end_tokens, prepare
from khtst_compile.capture.export import fit_examples, to_program
from khtst_compile.capture.shapes import BATCH, Axis, Range, plan_axes
from khtst_compile.capture.tasks import Call, Task, infer_task, model_call, read_json
from khtst_compile.capture.wrapper import Named
from khtst_compile.errors import CaptureError, EnvironmentProblem, UsageError
from khtst_compile.program import WRAPPED, Program

TRACE_TOKENS = 13
# Position tables that start after the padding index (transformers: create_position_ids_from_input_ids).
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text", "xmod", "longformer")


def capture_folder(folder: Path, *, task: str | None, shapes: Mapping[str, Range] | None, seed: int) -> Program:
    """Load the model in float32 and export it for `task`; batch and sequence dynamic. Errors: UsageError, CaptureError."""
    folder = folder.resolve()
    check_folder(folder)
    config = load_config(folder)
    architecture = str((getattr(config, "architectures", None) or [type(config).__name__])[0])
    images = hasattr(config, "image_size") or hasattr(config, "num_channels")
    chosen = infer_task(folder, architecture, images, task)
    model, missing = load_model(folder, chosen, architecture)
    meta: dict[str, Any] = {
        "source": str(folder),
        "task": chosen.name,
        "tokenizer": str(folder) if (folder / "tokenizer.json").is_file() else None,
        "max_length": None if chosen.images else max_length(folder, config),
    }
    call: Call
    if chosen.cached:
        limit = (shapes or {}).get("seq", (1, positions(config)))[1]
        decoder = prepare(model, config, min(limit, positions(config)))
        axes, examples = decoder_signature(decoder, int(config.vocab_size), shapes, seed)
        call = decoder.call
        meta |= {"cache": decoder.meta(), "end_tokens": end_tokens(folder, config)}
    else:
        axes, examples = signature(folder, config, chosen, shapes, seed)
        call = model_call(chosen, folder)
    program = to_program(Named(model, list(examples), call), fit_examples(examples, axes), axes, meta)
    refuse_missing(program, missing, chosen, architecture)
    return program


def check_folder(folder: Path) -> None:
    """Raise UsageError where config or weights are missing, or the weights are pickles."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no config.json; needed: a Hugging Face folder with config.json and *.safetensors")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for suffix in ("bin", "pt", "pth") for p in folder.glob(f"*.{suffix}"))
        if pickles:
            raise UsageError(
                f"{folder}: the weights are pickles ({', '.join(pickles)}), which can run code when opened; convert them to safetensors "
                "first (model.save_pretrained(folder, safe_serialization=True) where you trust them)"
            )
        raise UsageError(f"{folder}: no *.safetensors file with the weights")


def load_config(folder: Path) -> Any:
    """The model's configuration object. Raises CaptureError for an architecture transformers does not know."""
    raw = read_json(folder / "config.json")
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UsageError(f"{folder / 'config.json'}: no model_type; needed: the configuration of a transformers model")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "some method")
        raise CaptureError(f"{folder}: the weights are already quantized ({method}); start from the float checkpoint")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise EnvironmentProblem("capturing a Hugging Face folder needs transformers; pip install 'khtst-compile[hf]'") from error
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise CaptureError(
            f"{folder}: architecture {raw['model_type']!r} is not in the installed transformers ({str(error).splitlines()[0]}); "
            "write a factory (package.module:function) that builds the model"
        ) from error


def load_model(folder: Path, task: Task, architecture: str) -> tuple[nn.Module, set[str]]:
    """The model in eval mode and float32, and the names of weights the folder lacks."""
    import transformers
    from safetensors import SafetensorError

    try:
        with quiet():
            model, info = getattr(transformers, task.auto).from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise UsageError(f"{folder}: the safetensors weights are damaged ({error}); fetch them again") from error
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        text = str(error).splitlines()[0]
        raise CaptureError(f"{folder}: {architecture} cannot be loaded for task {task.name!r}: {text}") from error
    if mismatched := info.get("mismatched_keys"):
        raise UsageError(f"{folder}: weights do not fit the configuration: {sorted(str(m) for m in mismatched)[:3]}")
    # A cache of earlier tokens would be a second, invisible output.
    model.config.use_cache = False
    return model.eval(), set(info["missing_keys"])


def refuse_missing(program: Program, missing: set[str], task: Task, architecture: str) -> None:
    """Raise CaptureError where the graph reads weights the folder lacks: they would be random."""
    used = {str(s.target).removeprefix(WRAPPED + ".") for s in program.ep.graph_signature.input_specs if s.target is not None}
    if lacking := sorted(missing & used):
        raise CaptureError(
            f"{program.meta['source']}: the weights of {', '.join(lacking[:3])} are not in the folder ({architecture}), so task "
            f"{task.name!r} would run on random ones; choose another --task or a checkpoint trained for it"
        )


def signature(
    folder: Path, config: Any, task: Task, shapes: Mapping[str, Range] | None, seed: int
) -> tuple[list[Axis], dict[str, torch.Tensor]]:
    """The axes and example inputs to trace with."""
    generator = torch.Generator().manual_seed(seed)
    if task.images:
        size = image_size(folder, config)
        axes = plan_axes([Axis("batch", (("pixel_values", 0),), *BATCH)], {"pixel_values": 4}, shapes)
        return axes, {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), *size, generator=generator)}
    names = ["input_ids", "attention_mask"]
    if task.pairs and getattr(config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    limit = positions(config)
    known = [
        Axis("batch", tuple((n, 0) for n in names), *BATCH),
        Axis("seq", tuple((n, 1) for n in names), 1, limit),
    ]
    axes = plan_axes(known, dict.fromkeys(names, 2), shapes)
    for axis in axes:
        if axis.name == "seq" and axis.high > limit:
            raise UsageError(f"shapes: seq goes to {axis.high}; the model has {limit} positions")
    shape = (2, TRACE_TOKENS)
    vocabulary = int(getattr(config, "vocab_size", 2))
    examples = {n: torch.ones(shape, dtype=torch.int64) for n in names}
    examples["input_ids"] = torch.randint(0, vocabulary, shape, generator=generator)
    if "token_type_ids" in examples:
        examples["token_type_ids"] = torch.zeros(shape, dtype=torch.int64)
    return axes, examples


def positions(config: Any) -> int:
    """How many tokens the model can hold."""
    limit = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048)
    if config.model_type in _OFFSET_POSITIONS:
        limit -= int(config.pad_token_id or 0) + 1
    return limit


def max_length(folder: Path, config: Any) -> int:
    """Where the model's own tokenizer cuts a text: the smallest of what the folder says."""
    limits = [positions(config)]
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / file).is_file():
            value = read_json(folder / file).get(key)
            limits.append(int(value) if value else limits[0])
    return min(limits)


def image_size(folder: Path, config: Any) -> tuple[int, int]:
    """(height, width) in pixels, from the configuration or the preprocessor's; 224 where neither says."""
    size = getattr(config, "image_size", None)
    if size is None and (folder / "preprocessor_config.json").is_file():
        size = read_json(folder / "preprocessor_config.json").get("size")
    if isinstance(size, dict):
        edge = size.get("shortest_edge", 224)
        size = (size.get("height", edge), size.get("width", edge))
    if isinstance(size, (tuple, list)):
        return int(size[0]), int(size[1])
    return int(size or 224), int(size or 224)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars and loading chatter; what matters is raised as an error instead."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
