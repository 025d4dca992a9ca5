"""Token windows for calibration and perplexity."""

from __future__ import annotations

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
from khtst_compile.calibrate import calibrate
from khtst_compile.capture import capture
from khtst_compile.errors import CalibrationError, UsageError
from khtst_compile.evaluate import negative_log_likelihood
from khtst_compile.samples import load_samples


def test_texts_become_one_stream() -> None:
    encode = lambda text: [int(c) for c in text]  # noqa: E731
    assert list(windows.join(["123", "45", "6"], encode, 0, 4)) == [[1, 2, 3, 0], [4, 5, 0, 6]]
    assert list(windows.join(["12", "3"], encode, None, 4)) == [[1, 2, 3]]  # too short for a window, but all there is
    assert list(windows.join(["1"], encode, None, 4)) == []


def test_samples_of_a_language_model(made: Any, tmp_path: Path) -> None:
    program = capture(made.folder)
    (tmp_path / "t.txt").write_text("abcdefgh\nijklmnopq\n")
    samples = load_samples(tmp_path / "t.txt", program, max_length=6)
    (batch,) = list(samples)
    assert samples.count == 3 and batch["input_ids"].shape == (3, 6) and batch["past_key_1"].shape == (0, 3, 16)
    assert batch["logits_at"].tolist() == list(range(6))
    limited = load_samples(tmp_path / "t.txt", program, max_length=6, limit=2, seed=1)
    assert limited.count == 2 and all(row in batch["input_ids"].tolist() for row in next(iter(limited))["input_ids"].tolist())
    np.save(tmp_path / "ids.npy", np.arange(40).reshape(5, 8))
    assert [b["input_ids"].shape for b in load_samples(tmp_path / "ids.npy", program, max_length=6)] == [(4, 6), (1, 6)]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.ones((2, 3), np.float32), "needed: integers"),
        (np.ones(3, np.int64), "needed: integers"),
        (np.full((2, 3), 258), "needed: 0..257"),
        (np.full((2, 3), -1), "needed: 0..257"),
        (np.zeros((0, 3), np.int64), "holds no text"),
    ],
)
def test_unusable_ids_are_refused(made: Any, tmp_path: Path, array: np.ndarray, said: str) -> None:
    np.savez(tmp_path / "x.npz", input_ids=array)
    with pytest.raises(CalibrationError, match=said):
        load_samples(tmp_path / "x.npz", capture(made.folder))
    np.savez(tmp_path / "x.npz", other=array)
    with pytest.raises(CalibrationError, match="input_ids"):
        load_samples(tmp_path / "x.npz", capture(made.folder))


def test_gradients_come_from_logits_and_reach_every_layer(made: Any) -> None:
    program = capture(made.folder)
    samples = load_samples(None, program, limit=12, max_length=10, random=True)
    stats = calibrate(program, samples)
    assert stats.samples == 12 and sum(len(b["input_ids"]) for b in stats.held_samples) > 0
    grads = {name: g for a in stats.activations.values() for name, g in a.grads.items()}
    assert len(grads) == 15 and all(float(g.abs().max()) > 0 for g in grads.values())
    # The last layer's keys are read by nothing but attention and the cache; what is handed on carries no weight of its own.
    quiet = [name for name in program.results() if name.startswith("new_")]
    assert program.results() == ["logits"] and quiet == []


def test_golden_values_pass_through_a_past(made: Any) -> None:
    golden = read(made.quantized).arrays("golden.npz")
    assert golden["in/past_key_0"].shape[0] >= 1 and golden["in/past_key_0"].any()
    assert [k for k in golden if k.startswith("fp32/")] == ["fp32/logits"]
    report = kc.verify(made.w8a8, reference=made.quantized)
    assert report.ok and sum("attention_cached" in row.what for row in report.rows) == 2
    assert kc.verify(made.w8a8, reference=made.folder).ok


def test_perplexity_of_all_forms(made: Any, tmp_path: Path) -> None:
    data = tmp_path / "t.json"
    data.write_text(json.dumps(["one two three four five", "six seven eight nine"]))
    exact, same = kc.perplexity(made.fp32, data, reference=made.folder, max_length=12)
    rounded, in_torch = kc.perplexity(made.w8a8, data, reference=made.quantized, max_length=12)
    assert same is not None and in_torch is not None and exact.tokens == rounded.tokens == 33
    assert exact.nll == pytest.approx(same.nll, abs=1e-5)  # float32 sums in another order
    assert rounded.nll == pytest.approx(in_torch.nll, abs=1e-3)  # codes next to a rounding tie
    assert rounded.nll != exact.nll
    (window,) = windows.read_windows(windows.Vocabulary.of(capture(made.folder)), data, 46, None, 0)
    with torch.no_grad():
        logits = made.model(torch.tensor([window])).logits[0, :-1]
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none").numpy()
    np.testing.assert_allclose(negative_log_likelihood(logits.numpy(), np.array(window[1:])), want, rtol=1e-5)


def test_perplexity_refuses_what_is_no_language_model(made: Any, tmp_path: Path) -> None:
    program = load_program(read(made.quantized))
    assert "cache" in program.meta
    kc.quantize("tests.tiny:mlp", tmp_path / "q", random=True, recipe="w8a8", limit=4)
    with pytest.raises(UsageError, match="text-generation"):
        kc.perplexity(tmp_path / "q", tmp_path / "x.txt")
