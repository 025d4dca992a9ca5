"""Every model family: what was captured computes what the model computes, at other sizes than it was traced at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from khtst_compile.capture import capture, capture_module
from khtst_compile.errors import CaptureError
from khtst_compile.program import Program, call_nodes, check_program, site_of

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

# Same float32 operators in the same order; only the blocking of matrix products may differ between shapes.
TOLERANCE = 2e-6
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "pad_token_id": 0,
}


def text_config(kind: str) -> Any:
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return {
        "bert": lambda: transformers.BertConfig(**SMALL, max_position_embeddings=64),
        "roberta": lambda: transformers.RobertaConfig(**{**SMALL, "pad_token_id": 1}, max_position_embeddings=66),
        "distilbert": lambda: transformers.DistilBertConfig(
            dim=32, n_heads=4, n_layers=2, hidden_dim=48, vocab_size=97, max_position_embeddings=64
        ),
        "modernbert": lambda: transformers.ModernBertConfig(
            **SMALL, max_position_embeddings=64, local_attention=8, cls_token_id=1, sep_token_id=2, **special
        ),
        "llama": lambda: transformers.LlamaConfig(**SMALL, **heads, **special),
        "qwen3": lambda: transformers.Qwen3Config(**SMALL, **heads, head_dim=8, **special),
    }[kind]()


def saved(folder: Path, model: Any) -> Any:
    model.save_pretrained(folder, safe_serialization=True)
    return model.eval()


def text_inputs(batch: int, seq: int, names: list[str], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens, the last sample padded on the right by a third."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[-1, seq - seq // 3 :] = 0
    made = {"input_ids": torch.randint(3, 97, (batch, seq), generator=generator), "attention_mask": mask}
    made["token_type_ids"] = torch.randint(0, 2, (batch, seq), generator=generator)
    return {n: made[n] for n in names}


def assert_same(program: Program, eager: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
    """Compares real tokens only: what padded positions hold is nobody's business."""
    (got,) = program.run(inputs).values()
    with torch.no_grad():
        want = eager(**inputs)
    assert got.shape == want.shape and got.dtype == want.dtype
    mask = inputs.get("attention_mask")
    if mask is not None and got.shape[:2] == mask.shape:
        got, want = got[mask != 0], want[mask != 0]
    assert torch.allclose(got, want, atol=TOLERANCE * max(1.0, float(want.abs().max())), rtol=0), (got - want).abs().max()


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "llama", "qwen3"])
def test_text_encoder(tmp_path: Path, kind: str) -> None:
    config = text_config(kind)
    model = saved(tmp_path, transformers.AutoModel.from_config(config, attn_implementation="sdpa"))
    program = capture(tmp_path)
    check_program(program)
    assert program.meta["task"] == "feature-extraction" and program.meta["static_axes"] == []
    assert program.axes == {"batch": (1, 4096), "seq": (1, 64)}
    assert [s.shape for s in program.inputs] == [("batch", "seq")] * 2
    assert program.outputs[0].name == "last_hidden_state" and program.outputs[0].shape == ("batch", "seq", 32)
    for batch, seq in ((1, 1), (1, 9), (3, 33), (2, 64), (5, 2)):
        assert_same(program, lambda **x: model(**x).last_hidden_state, text_inputs(batch, seq, ["input_ids", "attention_mask"]))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_causal_lm(tmp_path: Path, kind: str) -> None:
    model = saved(tmp_path, transformers.AutoModelForCausalLM.from_config(text_config(kind)))
    program = capture(tmp_path, task="causal-lm")
    assert program.meta["task"] == "causal-lm" and program.outputs[0].shape == ("batch", "seq", 97)
    for batch, seq in ((1, 5), (3, 21)):
        inputs = text_inputs(batch, seq, ["input_ids", "attention_mask"])
        assert_same(program, lambda **x: model(**x, use_cache=False).logits, inputs)


@pytest.mark.parametrize(
    ("auto", "task"),
    [
        ("AutoModelForSequenceClassification", "sequence-classification"),
        ("AutoModelForTokenClassification", "token-classification"),
        ("AutoModelForMaskedLM", "fill-mask"),
    ],
)
def test_bert_heads(tmp_path: Path, auto: str, task: str) -> None:
    model = saved(tmp_path, getattr(transformers, auto).from_config(text_config("bert")))
    program = capture(tmp_path)
    assert program.meta["task"] == task
    names = [s.name for s in program.inputs]
    assert ("token_type_ids" in names) == (task == "sequence-classification")
    assert_same(program, lambda **x: model(**x).logits, text_inputs(3, 17, names))


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForImageClassification"])
def test_vit(tmp_path: Path, auto: str) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, image_size=24, patch_size=8
    )
    model = saved(tmp_path, getattr(transformers, auto).from_config(config))
    program = capture(tmp_path)
    assert program.inputs[0].shape == ("batch", 3, 24, 24)
    images = {"pixel_values": torch.randn(3, 3, 24, 24)}
    assert_same(program, lambda **x: model(**x)[0], images)


def test_bfloat16_weights_are_upcast(tmp_path: Path) -> None:
    model = saved(tmp_path, transformers.AutoModel.from_config(text_config("bert")).bfloat16())
    program = capture(tmp_path)
    assert {t.dtype for n, t in program.tensors().items() if n.startswith("p_")} == {torch.float32}
    upcast = model.float()
    assert_same(program, lambda **x: upcast(**x).last_hidden_state, text_inputs(2, 7, ["input_ids", "attention_mask"]))


@pytest.mark.parametrize(
    ("mode", "normalize"), [("mean_tokens", False), ("cls_token", True), ("max_tokens", False), ("mean_sqrt_len_tokens", False)]
)
def test_sentence_embedding_pools_as_sentence_transformers_does(tmp_path: Path, mode: str, normalize: bool) -> None:
    pooling = pytest.importorskip("sentence_transformers.models").Pooling
    model = saved(tmp_path, transformers.AutoModel.from_config(text_config("bert")))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "path": "1_Pooling" if k == "Pooling" else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, f"pooling_mode_{mode}": True}))
    program = capture(tmp_path)
    assert program.outputs[0].name == "sentence_embedding"
    pool = pooling(32, **{"pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True})

    def eager(**x: torch.Tensor) -> torch.Tensor:
        features = {"token_embeddings": model(**x).last_hidden_state, "attention_mask": x["attention_mask"]}
        pooled: torch.Tensor = pool(features)["sentence_embedding"]
        return nn.functional.normalize(pooled, dim=-1) if normalize else pooled

    assert_same(program, eager, text_inputs(3, 11, ["input_ids", "attention_mask"]))


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    program = capture_module(model, (torch.randn(2, 5, 16),), shapes={"seq": (1, 32)})
    assert program.inputs[0].name == "src" and program.inputs[0].shape == ("batch", "seq", 16)
    assert program.axes["seq"] == (1, 32)
    assert_same(program, model, {"src": torch.randn(3, 7, 16)})
    assert len(list(call_nodes(program.graph, torch.ops.aten.linear.default))) == 8


def test_conv_net_with_in_place_activations() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
    )
    model[1].running_mean.fill_(0.3)
    program = capture_module(model.eval(), (torch.randn(1, 3, 8, 8),))
    assert program.inputs[0].shape == ("batch", 3, 8, 8)
    assert not any(n.target._schema.is_mutable for n in program.graph.nodes if hasattr(n.target, "_schema"))
    image = torch.randn(5, 3, 8, 8)
    before = image.clone()
    assert_same(program, lambda input: model(input), {"input": image})
    assert torch.equal(image, before)


def test_mlp_keeps_sites_and_order() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4)).eval()
    program = capture_module(model, (torch.randn(4, 8),))
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.linear.default,
        torch.ops.aten.gelu.default,
        torch.ops.aten.linear.default,
    ]
    assert [site_of(n) for n in call_nodes(program.graph, torch.ops.aten.linear.default)] == ["0", "3"]
    assert program.meta["parameters"] == sum(p.numel() for p in model.parameters())
    assert_same(program, lambda input: model(input), {"input": torch.randn(7, 8)})


def test_minilm_matches_and_loses_its_unused_pooler(minilm: Path) -> None:
    program = capture(minilm)
    assert program.meta["task"] == "sentence-embedding" and program.meta["max_length"] == 256
    assert len(list(call_nodes(program.graph, torch.ops.aten.linear.default))) == 36
    assert not any("pooler" in str(s.target) for s in program.ep.graph_signature.input_specs)
    first = next(call_nodes(program.graph, torch.ops.aten.linear.default))
    assert first.args[0].target is torch.ops.aten.layer_norm.default and site_of(first) == "encoder.layer.0.attention.self.query"
    model = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()

    def eager(**x: torch.Tensor) -> torch.Tensor:
        weight = x["attention_mask"].unsqueeze(-1).float()
        mean = (model(**x).last_hidden_state * weight).sum(1) / weight.sum(1)
        return nn.functional.normalize(mean, dim=-1)

    for batch, seq in ((1, 1), (5, 31)):
        assert_same(program, eager, text_inputs(batch, seq, ["input_ids", "attention_mask"]))


def test_mixture_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    saved(tmp_path, transformers.AutoModelForCausalLM.from_config(config))
    with pytest.raises(CaptureError, match=r"(aten|transformers|torch)\S*(histc|grouped_mm|one_hot|nonzero).*") as caught:
        capture(tmp_path)
    assert "modeling_qwen3_moe.py" in str(caught.value) or "moe.py" in str(caught.value)


class Drawn(nn.Module):
    """A linear and whatever `function` draws."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.linear, self.function = nn.Linear(16, 16), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def attend(y: torch.Tensor, dropout: float) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=dropout)


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn_like": lambda y: y + torch.randn_like(y),
    "rand_like": lambda y: y + torch.rand_like(y),
    "rand": lambda y: y + torch.rand(16),
    "randint": lambda y: y + torch.randint(0, 3, (16,)),
    "bernoulli": lambda y: y * torch.bernoulli(torch.sigmoid(y)),
    "multinomial": lambda y: y + torch.multinomial(torch.sigmoid(y), 1),
    "normal": lambda y: torch.normal(y, 1.0),
    "dropout": lambda y: nn.functional.dropout(y, training=True),
    "feature_dropout": lambda y: nn.functional.dropout1d(y, training=True),
    "rrelu": lambda y: nn.functional.rrelu(y, training=True),
    "scaled_dot_product_attention": lambda y: attend(y, 0.1),
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_draws_random_numbers_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"{name}.*draws random numbers") as caught:
        capture_module(Drawn(RANDOM[name]).eval(), (torch.randn(4, 16),))
    assert "test_families.py:" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [lambda y: nn.functional.dropout(y, training=False), lambda y: nn.functional.rrelu(y), lambda y: attend(y, 0.0)],
    ids=["dropout", "rrelu", "attention"],
)
def test_what_could_draw_but_does_not_is_taken(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    capture_module(Drawn(function).eval(), (torch.randn(4, 16),))


class Products(nn.Module):
    """(batch, 5, 16) float32 times constants, written in ways that are no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(16, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.a.T
        x = torch.einsum("bsk, nk -> bsn", x, self.b)
        return torch.matmul(x, self.c.transpose(0, 1))


def test_products_with_constants_are_captured_as_linears() -> None:
    module, x = Products().eval(), torch.randn(4, 5, 16)
    program = capture_module(module, (x,))
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten.linear.default] * 3
    with torch.no_grad():
        torch.testing.assert_close(program.run({"x": x})["output"], module(x), rtol=1e-5, atol=1e-4)


def test_other_einsums_and_attention_stay_as_they_are() -> None:
    class Other(Products):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.einsum("bsk,kn->bsn", x, self.a) @ self.b
            return torch.einsum("bsk,btk->bst", x, x) @ x

    module, x = Other().eval(), torch.randn(4, 5, 16)
    program = capture_module(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(program.run({"x": x})["output"], module(x), rtol=1e-5, atol=1e-3)
    assert torch.ops.aten.linear.default not in [n.target for n in program.graph.nodes]
