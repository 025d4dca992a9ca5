"""Captured with a cache, a model gives the logits it gives without one, whatever is past and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from khtst_compile.capture import capture
from khtst_compile.errors import CaptureError, UsageError
from khtst_compile.lower.fuse import fuse
from khtst_compile.program import Program, call_nodes
from khtst_compile.windows import inputs

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

# The same float32 operators in the same order; only the blocking of matrix products may differ between shapes.
TOLERANCE = 2e-6
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config(kind: str, **more: Any) -> Any:
    return {
        "llama": lambda: transformers.LlamaConfig(**SMALL, **more),
        "qwen2": lambda: transformers.Qwen2Config(**SMALL, **more),
        "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8, **more),
        "mistral": lambda: transformers.MistralConfig(**SMALL, **{"sliding_window": 24, **more}),
        "smollm3": lambda: transformers.SmolLM3Config(**SMALL, **more),
        "olmo2": lambda: transformers.Olmo2Config(**SMALL, **more),
        "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=3.0, **more),
        "mamba": lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=97, state_size=4),
    }[kind]()


def saved(folder: Path, made: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


def pieces(program: Program, ids: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """Logits at every position, computed in calls of so many tokens."""
    given, logits = inputs(program, ids[:, :0], torch.arange(0)), []
    for piece in ids.split(cuts, 1):
        found = program.run({**given, "input_ids": piece, "logits_at": torch.arange(piece.shape[1])})
        logits.append(found["logits"])
        for name in given:
            if name.startswith("past_"):
                given[name] = torch.cat([given[name], found["new_" + name.removeprefix("past_")]])
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "granite"])
def test_families(tmp_path: Path, kind: str) -> None:
    model = saved(tmp_path, config(kind))
    program = capture(tmp_path)
    assert program.meta["task"] == "text-generation" and program.meta["end_tokens"] == [2]
    assert program.results() == ["logits"] and len(program.outputs) == 5
    limit = 24 if kind == "mistral" else 64
    assert program.axes == {"batch": (1, 4096), "seq": (1, limit), "past": (0, limit), "rows": (1, limit)}
    generator = torch.Generator().manual_seed(1)
    for batch, cuts in ((1, (1,)), (1, (5, 1, 1, 1)), (3, (7, 2, 9)), (2, (24,))):
        ids = torch.randint(3, 97, (batch, sum(cuts)), generator=generator)
        with torch.no_grad():
            want = model(ids, use_cache=False).logits
        got = pieces(program, ids, cuts)
        assert torch.allclose(got, want, atol=TOLERANCE * max(1.0, float(want.abs().max())), rtol=0), (got - want).abs().max()
    fused, counts = fuse(program)
    assert counts["cached attention"] == 2 and not list(
        call_nodes(fused.graph, torch.ops.aten.scaled_dot_product_attention.default)
    )


def test_logits_come_where_they_are_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, config("llama"))
    program = capture(tmp_path)
    ids = torch.arange(3, 12)[None]
    every = program.run(inputs(program, ids, torch.arange(9)))["logits"]
    some = program.run(inputs(program, ids, torch.tensor([8, 2])))["logits"]
    assert torch.allclose(some, every[:, [8, 2]], atol=1e-6)  # a matrix product of other shape


def test_a_mask_that_is_not_causal_stays_in_the_graph(tmp_path: Path) -> None:
    saved(tmp_path, config("llama"))
    program = capture(tmp_path)
    (compare,) = call_nodes(program.graph, torch.ops.aten.ge.Tensor)
    compare.target = torch.ops.aten.gt.Tensor
    assert fuse(program)[1]["cached attention"] == 0


def test_shapes_bound_the_whole_text(tmp_path: Path) -> None:
    saved(tmp_path, config("llama"))
    program = capture(tmp_path, shapes={"seq": (1, 20)})
    assert program.axes["past"] == (0, 20) and program.meta["cache"]["positions"] == 20
    tables = [t for name, t in program.tensors().items() if name.endswith(("cos", "sin"))]
    assert [tuple(t.shape) for t in tables] == [(20, 8)] * 2
    with pytest.raises(UsageError, match="follows from seq"):
        capture(tmp_path, shapes={"past": (1, 20)})


def test_models_without_a_form_here_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "mamba", config("mamba"))
    with pytest.raises(CaptureError, match="MambaForCausalLM cannot be loaded"):
        capture(tmp_path / "mamba")
    moving = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    saved(tmp_path / "dynamic", config("llama", rope_parameters=moving))
    with pytest.raises(CaptureError, match="changes with the length"):
        capture(tmp_path / "dynamic")
