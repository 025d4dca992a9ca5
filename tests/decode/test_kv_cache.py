"""The int8 cache the whole way: what the pass writes, what the kernels read, and that a text may be cut anywhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import khtst_compile as kc
from khtst_compile import windows
from khtst_compile.api import load_program
from khtst_compile.artifact import read
from khtst_compile.capture import capture
from khtst_compile.contract import run_passes
from khtst_compile.errors import PassError, UsageError
from khtst_compile.lower.fuse import fuse
from khtst_compile.lower.relax import kernel_graph
from khtst_compile.lower.replay import replay
from khtst_compile.parity import relative_error_db
from khtst_compile.passes.kv_cache import KvCache
from khtst_compile.program import Program, Rewriter, arguments, call_nodes

aten, khtst = torch.ops.aten, torch.ops.khtst
NEW = 20


def ids_of(steps: Any) -> np.ndarray:
    """(batch, steps) int64."""
    return np.stack([s.ids for s in steps], axis=1)


@pytest.fixture(scope="module")
def plain(made: Any) -> Program:
    return capture(made.folder)


@pytest.fixture(scope="module")
def coded(plain: Program) -> Program:
    return run_passes(plain, [KvCache()])


def test_signature(plain: Program, coded: Program) -> None:
    kept = ("past", "batch")
    assert [(s.name, s.dtype, s.shape) for s in coded.inputs[2:]] == [
        *((f"past_{what}_{i}", "int8", (*kept, 16)) for i in range(2) for what in ("key", "value")),
        *((f"past_scale_{i}", "float32", (*kept, 4)) for i in range(2)),
    ]
    assert [s.name for s in coded.outputs[1:]] == [s.name.replace("past", "new") for s in coded.inputs[2:]]
    assert coded.results() == plain.results() == ["logits"]
    assert coded.history[-1]["changed"] == 2
    assert list(coded.history[-1]["details"].values()) == [{"kv_heads": 2, "head_dim": 8, "bytes_per_position": 48}] * 2
    assert [s.dtype for s in plain.inputs[2:]] == ["float32"] * 4  # the program that was given is as it was
    given = windows.inputs(coded, torch.arange(3, 9)[None], torch.arange(6))
    with torch.no_grad():  # torch's own way to call it, too
        assert torch.equal(coded.ep.module()(*given.values())[0], coded.run(given)["logits"])


def test_what_is_kept_is_what_the_float_program_keeps_rounded(plain: Program, coded: Program) -> None:
    """Of the first layer, whose inputs are equal; half a step of a head's largest value, in float32."""
    ids, at = torch.arange(3, 21).reshape(2, 9), torch.arange(9)
    with torch.no_grad():
        exact, found = (p.run(windows.inputs(p, ids, at)) for p in (plain, coded))
    for place, what in enumerate(("key", "value")):
        want = exact[f"new_{what}_0"].reshape(9, 2, 2, 8)
        scale = found["new_scale_0"].chunk(2, -1)[place].unsqueeze(-1)
        torch.testing.assert_close(scale, want.abs().amax(-1, keepdim=True) / 127, rtol=0, atol=1e-7)
        off = (found[f"new_{what}_0"].reshape(9, 2, 2, 8) * scale - want).abs() / scale
        assert 0.3 < float(off.max()) <= 0.5 + 1e-4
    db = relative_error_db(found["logits"].numpy(), exact["logits"].numpy())
    assert -60 < db < -30, db  # -42 dB is what rounding of 1/254 of the largest of 8 values leaves, and attention averages


def test_the_order_of_passes_does_not_matter(plain: Program) -> None:
    ids, at = torch.arange(3, 12)[None], torch.arange(9)
    first, last = (
        run_passes(plain, [kc.recipe.parse(text)[i] for i in range(2)]) for text in ("kv_cache | w8a8", "w8a8 | kv_cache")
    )
    with torch.no_grad():
        a, b = (p.run(windows.inputs(p, ids, at))["logits"] for p in (first, last))
    assert torch.equal(a, b)


def test_one_call_and_many_agree_in_torch(coded: Program) -> None:
    ids = torch.arange(3, 21).reshape(2, 9)
    with torch.no_grad():
        whole = coded.run(windows.inputs(coded, ids, torch.arange(9)))
        given, logits = windows.inputs(coded, ids[:, :0], torch.arange(0)), []
        for piece in ids.split((4, 1, 1, 3), 1):
            found = coded.run({**given, "input_ids": piece, "logits_at": torch.arange(piece.shape[1])})
            logits.append(found["logits"])
            given |= {n: torch.cat([given[n], found["new" + n.removeprefix("past")]]) for n in given if n.startswith("past_")}
    # Matrix products of another shape: a code next to a rounding tie may move.
    assert relative_error_db(torch.cat(logits, 1).numpy(), whole["logits"].numpy()) < -60


def test_refusals(plain: Program, coded: Program, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="int8 already"):
        run_passes(coded, [KvCache()])
    with pytest.raises(PassError, match="keeps no keys and values"):
        run_passes(dataclasses.replace(plain, meta={"task": "other"}), [KvCache()])
    with pytest.raises(UsageError, match="known: float32, int8"):
        kc.quantize("x", tmp_path / "q", kv_cache="int4")
    with pytest.raises(PassError, match="keeps no keys and values"):
        kc.quantize("tests.tiny:mlp", tmp_path / "q", random=True, recipe="w8a8", kv_cache="int8", limit=4)
    assert not (tmp_path / "q").exists()
    odd = Rewriter(plain).finish()
    cat = next(n for n in call_nodes(odd.graph, aten.cat.default) if arguments(n)[1] == 2)
    cat.meta["val"] = cat.meta["val"][..., :4]
    with pytest.raises(PassError, match="layer 0: keys are 2 heads of 4 features, values 2 of 8"):
        run_passes(odd, [KvCache()])
    cat.args = (cat.args[0], 0)
    with pytest.raises(PassError, match=r"layer 0: past_key_0 is read by aten\.cat"):
        run_passes(odd, [KvCache()])


def test_kernels_read_codes_and_projections_in_place(made: Any) -> None:
    program = load_program(read(made.int8_quantized))
    fused, counts = fuse(program)
    assert (counts["int8 attention"], counts["int8 cache"], counts["cached attention"]) == (2, 2, 0)
    assert not list(call_nodes(fused.graph, aten.cat.default, aten.permute.default, aten.scaled_dot_product_attention.default))
    manifest = read(made.int8).manifest
    operators = [t["operator"] for t in manifest["taps"]]
    assert operators.count("attention_int8") == 2 and operators.count("quantize_cache") == 6
    assert manifest["recipe"] == "smooth{alpha=0.5} | w8a8 | kv_cache" and manifest["meta"]["cache"]["dtype"] == "int8"


def test_a_mask_that_is_not_causal_stays_in_the_graph(coded: Program) -> None:
    odd = Rewriter(coded).finish()
    (compare,) = call_nodes(odd.graph, aten.ge.Tensor)
    compare.target = aten.gt.Tensor
    assert fuse(odd)[1]["int8 attention"] == 0


def test_tokens_are_those_of_torch_without_a_cache(made: Any, prompt: np.ndarray) -> None:
    program = load_program(read(made.int8_quantized))
    text = torch.from_numpy(prompt)
    for _ in range(NEW):
        logits = program.run(windows.inputs(program, text, torch.tensor([text.shape[1] - 1])))["logits"]
        text = torch.cat([text, logits[:, 0].argmax(-1, keepdim=True)], 1)
    art = kc.load(made.int8, threads=1)
    got = ids_of(art.generate(prompt, max_new_tokens=NEW, ignore_end=True))
    np.testing.assert_array_equal(got, text[:, 9:].numpy())
    bytes_kept = [sum(int(s.shape[2]) * np.dtype(s.dtype).itemsize for s in a.inputs[2:]) for a in (art, kc.load(made.w8a8))]
    assert bytes_kept == [2 * 48, 2 * 128]


def test_verify_covers_it(made: Any, tmp_path: Path) -> None:
    golden = read(made.int8_quantized).arrays("golden.npz")
    assert golden["in/past_key_0"].dtype == np.int8 and golden["in/past_key_0"].any() and golden["in/past_scale_1"].all()
    report = kc.verify(made.int8, reference=made.int8_quantized)
    judged = {row.what: row for row in report.rows}
    assert report.ok
    assert (judged["quantize_cache cache"].budget, judged["quantize_cache scale"].budget) == (0.0, 0.0)
    assert "attention_int8 float" in judged
    assert kc.verify(made.int8).ok and kc.verify(made.int8, reference=made.folder).ok
    # The reference of another cache is told apart.
    with pytest.raises(UsageError, match="its layers differ"):
        kc.verify(made.int8, reference=made.quantized)


@pytest.mark.parametrize("kind", ["cache", "scale"])
def test_a_wrong_code_or_scale_is_named(made: Any, kind: str) -> None:
    graph = kernel_graph(load_program(read(made.int8_quantized)))
    golden = read(made.int8_quantized).arrays("golden.npz")
    given = {k[3:]: v for k, v in golden.items() if k.startswith("in/")}
    outputs, taps = kc.load(made.int8, threads=1).run_with_taps(given)
    tensors = {k: torch.from_numpy(v) for k, v in given.items()}
    place = [t.operator == "quantize_cache" and t.kind == kind for t in graph.taps].index(True)
    taps = [np.array(t) for t in taps]
    first = (0,) * taps[place].ndim
    taps[place][first] = taps[place][first] + 1 if kind == "cache" else np.nextafter(taps[place][first], np.float32(np.inf))
    rows = replay(graph, list(outputs.values()), taps, tensors)
    assert f"quantize_cache {kind}" in [row.what for row in rows if not row.ok and "layers.0.self_attn" in row.site]


def test_perplexity_and_bench_take_it(made: Any, tmp_path: Path) -> None:
    data = tmp_path / "t.json"
    data.write_text(json.dumps(["one two three four five", "six seven eight nine"]))
    rounded, in_torch = kc.perplexity(made.int8, data, reference=made.int8_quantized, max_length=12)
    # A code next to a tie moves, and what follows it: a step is 1/127 here, and heads have 8 features. `verify` judges bit for bit.
    assert in_torch is not None and rounded.nll == pytest.approx(in_torch.nll, abs=1e-2)
    assert rounded.nll != kc.perplexity(made.w8a8, data, max_length=12)[0].nll
    rows = kc.bench(made.int8, baselines=["torch"], shapes=[(2, 15, 4, 3)], seconds=0.01)
    assert rows[0].error_db is not None and rows[0].error_db < -15


def test_onnx(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    kc.export(made.int8_quantized, tmp_path / "onnx")
    assert kc.verify(tmp_path / "onnx", reference=made.int8_quantized).ok
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    golden = read(made.int8_quantized).arrays("golden.npz")
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(names, {k[3:]: v for k, v in golden.items() if k.startswith("in/")}), strict=True))
    for name in ("new_key_0", "new_value_0"):
        assert found[name].dtype == np.int8
        assert np.abs(found[name].astype(int) - golden[f"quantized/{name}"].astype(int)).max() <= 1  # next to a rounding tie
    np.testing.assert_allclose(found["new_scale_0"], golden["quantized/new_scale_0"], rtol=1e-4)  # of codes that moved by one
