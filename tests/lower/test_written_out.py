"""Norms, rotary embeddings, gates and lookups as models write them: recognized by structure, and the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.api import load_program
from khtst_compile.artifact import read
from khtst_compile.capture.factory import capture_module
from khtst_compile.lower.fuse import fuse
from khtst_compile.program import Program, call_nodes, check_program

aten, khtst = torch.ops.aten, torch.ops.khtst
transformers = pytest.importorskip("transformers")


class Written(nn.Module):
    """A norm in one of the ways people write it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.scale, self.shift = nn.Parameter(torch.rand(24) + 0.5), nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        forms = {
            "llama": lambda: self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)),
            "bare": lambda: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3),
            "root": lambda: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.scale,
            "layer": lambda: self.scale * (centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-3)) + self.shift,
            "variance": lambda: centered * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-3) * self.scale + self.shift,
            "sample variance": lambda: centered * torch.rsqrt(x.var(-1, keepdim=True) + 1e-3),
            "cube": lambda: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-3),
            "other row": lambda: x * torch.rsqrt(x.flip(-1).pow(2).mean(-1, keepdim=True) + 1e-3),
            "first axis": lambda: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-3),
        }
        return forms[self.form]()


def same(program: Program, fused: Program, inputs: dict[str, torch.Tensor]) -> None:
    for a, b in zip(fused.run(inputs).values(), program.run(inputs).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["llama", "bare", "root", "layer", "variance"])
def test_written_norms_are_recognized(form: str) -> None:
    program = capture_module(Written(form).eval(), {"x": torch.randn(4, 24)})
    fused, counts = fuse(program)
    assert counts["written norms"] == counts["norms"] == 1
    assert len([n for n in fused.graph.nodes if n.op == "call_function" and n.target is not aten.sym_size.int]) == 1
    same(program, fused, {"x": torch.randn(6, 24) * 0.1 + 1})


@pytest.mark.parametrize("form", ["sample variance", "cube", "other row", "first axis"])
def test_what_only_looks_like_a_norm_is_left(form: str) -> None:
    program = capture_module(Written(form).eval(), {"x": torch.randn(4, 24)})
    fused, counts = fuse(program)
    assert counts["written norms"] == 0
    same(program, fused, {"x": torch.randn(6, 24)})


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 60, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized artifact of a tiny model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL))
    else:
        model = transformers.Qwen3Model(transformers.Qwen3Config(**SMALL, head_dim=16))
    model.save_pretrained(folder / "model")
    np.savez(
        folder / "calib.npz", input_ids=np.random.default_rng(0).integers(0, 60, (16, 12)), attention_mask=np.ones((16, 12), int)
    )
    kc.quantize(str(folder / "model"), folder / "q", calib=folder / "calib.npz", task="feature-extraction")
    return folder / "q"


def test_a_decoder_layer_is_ten_kernels(family: Path) -> None:
    """norm, qkv, rotary, attention, its quantizer, out, norm, gate and up, gate, down; nothing of it stays generic.

    Where heads are normalized (Qwen3), those of q and of k are each turned with a gamma of their own.
    """
    program = load_program(read(family))
    fused, _ = fuse(program)
    check_program(fused)
    names = [str(n.target).removesuffix(".default") for n in fused.graph.nodes if str(n.target).startswith("khtst.")]
    turned = sum(n.target is khtst.rotary.default for n in fused.graph.nodes) // 2
    assert turned == (2 if any(n.args[3] for n in call_nodes(fused.graph, khtst.rotary.default)) else 1)
    layer = ["norm_quantize", "w8a8_gemm", *["rotary"] * turned, "attention", "quantize_rows", "w8a8_gemm", "norm_quantize"]
    layer += ["w8a8_gemm", "gate_quantize", "w8a8_gemm"]
    assert names == ["khtst." + n for n in ["embed", *layer, *layer, "norm"]]
    tail = list(fused.graph.nodes)
    after = tail[next(i for i, n in enumerate(tail) if n.target is khtst.rotary.default) :]
    left = {str(n.target) for n in after if n.op == "call_function"}
    assert not [t for t in left if any(w in t for w in ("cat", "slice", "expand", "rsqrt", "silu", "neg", "transpose"))], left
    rng = np.random.default_rng(1)
    inputs = {"input_ids": torch.from_numpy(rng.integers(0, 60, (2, 9))), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    # Codes may differ by one where a float does in its last bits: the parts alone are compared elsewhere.
    a, b = (p.run(inputs)[program.outputs[0].name] for p in (fused, program))
    assert (a - b).norm() / b.norm() < 1e-2
    # The projections are the ones of their own weights, in order.
    gemm = next(call_nodes(fused.graph, khtst.w8a8_gemm.default))
    old = list(call_nodes(program.graph, khtst.w8a8_linear.default))[:3]
    whole, parts = fused.tensors()[gemm.args[2].name], [program.tensors()[n.args[2].name] for n in old]  # type: ignore[union-attr]
    assert torch.equal(whole, torch.cat(parts))


def test_it_lowers_and_every_kernel_agrees(family: Path) -> None:
    kc.lower(family, family.parent / "l", target="x86-avx2")
    loaded = kc.load(family.parent / "l", threads=1)
    rng = np.random.default_rng(2)
    for batch, length in ((1, 1), (3, 17)):
        ids = {"input_ids": rng.integers(0, 60, (batch, length)), "attention_mask": np.ones((batch, length), np.int64)}
        (got,) = loaded.run(ids).values()
        (want,) = load_program(read(family)).run({k: torch.from_numpy(v) for k, v in ids.items()}).values()
        assert np.linalg.norm(got - want.numpy()) / np.linalg.norm(want.numpy()) < 1e-2


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, 24) for n in (50, 32, 2))
        self.norm = nn.LayerNorm(24)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.norm(self.places(places) + self.words(ids) + self.kinds(kinds))


def test_lookups_and_their_norm_are_one_operator(tmp_path: Path) -> None:
    """Places first: of one text, so the words lead; a sum of two commutes."""
    examples = {"ids": torch.randint(0, 50, (3, 7)), "kinds": torch.randint(0, 2, (3, 7))}
    program = capture_module(Lookups().eval(), examples, shapes={"seq": (1, 32)})
    fused, counts = fuse(program)
    assert counts["embeddings"] == 1 and len(list(call_nodes(fused.graph, khtst.embed_norm.default))) == 1
    assert not list(call_nodes(fused.graph, aten.embedding.default, aten.add.Tensor))
    same(program, fused, {"ids": torch.randint(0, 50, (2, 11)), "kinds": torch.randint(0, 2, (2, 11))})
