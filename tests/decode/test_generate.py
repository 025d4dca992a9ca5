"""Generation on compiled models: the tokens are those of the original, however the text is cut into calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import khtst_compile as kc
from khtst_compile import generate as generation
from khtst_compile.api import load_program
from khtst_compile.artifact import read
from khtst_compile.errors import ArtifactError, UsageError
from khtst_compile.program import call_nodes
from khtst_compile.windows import inputs

NEW = 24


def ids_of(steps: Any) -> np.ndarray:
    """(batch, steps) int64."""
    return np.stack([s.ids for s in steps], axis=1)


def test_greedy_tokens_are_those_of_transformers(made: Any, prompt: np.ndarray) -> None:
    want = made.model.generate(torch.from_numpy(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[:, 9:]
    art = kc.load(made.fp32, threads=1)
    got = ids_of(art.generate(prompt, max_new_tokens=NEW, ignore_end=True))
    np.testing.assert_array_equal(got, want.numpy())
    alone = ids_of(art.generate(prompt[1].tolist(), max_new_tokens=NEW, ignore_end=True))
    np.testing.assert_array_equal(alone, got[1:])


def test_quantized_tokens_are_those_of_torch_without_a_cache(made: Any, prompt: np.ndarray) -> None:
    program = load_program(read(made.quantized))
    text = torch.from_numpy(prompt)
    for _ in range(NEW):
        last = torch.tensor([text.shape[1] - 1])
        logits = program.run(inputs(program, text, last))["logits"]
        text = torch.cat([text, logits[:, 0].argmax(-1, keepdim=True)], 1)
    got = ids_of(kc.load(made.w8a8, threads=1).generate(prompt, max_new_tokens=NEW, ignore_end=True))
    np.testing.assert_array_equal(got, text[:, 9:].numpy())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_in_pieces_gives_the_same_bits(made: Any, prompt: np.ndarray, threads: int) -> None:
    for path in (made.fp32, made.w8a8, made.int8):
        art = kc.load(path, threads=threads)
        empty = [np.zeros((0, 2, int(s.shape[2])), s.dtype) for s in art.inputs[2:]]
        whole = art.call([prompt, np.arange(9), *empty])
        for cuts in ((4,), (1, 2, 8), tuple(range(1, 9))):
            cache, kept = generation.Cache(art, 2, 9), empty
            logits, steps = [], []
            for piece in np.split(prompt, cuts, axis=1):
                steps.append(cache.advance(piece, np.arange(piece.shape[1])))
                got, *new = art.call([np.ascontiguousarray(piece), np.arange(piece.shape[1]), *kept])
                logits.append(got)
                kept = [np.concatenate(pair) for pair in zip(kept, new, strict=True)]
            np.testing.assert_array_equal(np.concatenate(logits, 1), whole[0])
            np.testing.assert_array_equal(np.concatenate(steps, 1), whole[0])
            for mine, wanted in zip(kept, whole[1:], strict=True):
                np.testing.assert_array_equal(mine, wanted)
            assert cache.length == 9
            with pytest.raises(UsageError, match="holds 9 positions, 9 of them filled; 1 more"):
                cache.advance(prompt[:, :1], np.arange(1))


def test_texts_of_one_artifact_do_not_share_a_cache(made: Any, prompt: np.ndarray) -> None:
    art = kc.load(made.w8a8, threads=1)
    alone = [ids_of(art.generate(p, max_new_tokens=4, ignore_end=True)) for p in (prompt, prompt[:1, :5])]
    both = [art.generate(p, max_new_tokens=4, ignore_end=True) for p in (prompt, prompt[:1, :5])]
    steps = [[next(g).ids for g in both] for _ in range(4)]  # in turns
    for place, want in enumerate(alone):
        np.testing.assert_array_equal(np.stack([s[place] for s in steps], 1), want)


def test_long_prompts_are_computed_in_pieces(made: Any, prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    art = kc.load(made.w8a8, threads=1)
    want = ids_of(art.generate(prompt, max_new_tokens=5, ignore_end=True))
    seen = []
    step = art.step
    monkeypatch.setattr(art, "step", lambda cache, n, arrays: (seen.append(arrays[0].shape), step(cache, n, arrays))[1])
    monkeypatch.setattr(generation, "PIECE", 4)
    np.testing.assert_array_equal(ids_of(art.generate(prompt, max_new_tokens=5, ignore_end=True)), want)
    assert seen == [(2, 4), (2, 4), (2, 1), *[(2, 1)] * 4]


def test_the_kernel_reads_the_cache_in_place(made: Any) -> None:
    taps = [t["operator"] for t in read(made.w8a8).manifest["taps"]]
    assert taps.count("attention_cached") == 2 and "attention" not in taps
    program = load_program(read(made.quantized))
    assert len(list(call_nodes(program.graph, torch.ops.khtst.w8a8_linear.default))) == 15  # 7 a layer, and the head


def test_text_streams_and_ends(made: Any) -> None:
    art = kc.load(made.w8a8, threads=1)
    running = art.generate("some text", max_new_tokens=NEW, ignore_end=True)
    texts = [s.text for s in running]
    whole = "".join(texts)
    assert len(texts) == running.new_tokens == NEW and running.prompt_tokens == len("some text") and len(whole) > 4
    assert running.rates()["decode_tokens_per_s"] > 0
    stop = whole[2:4]
    cut = "".join(s.text for s in art.generate("some text", max_new_tokens=NEW, stop=stop, ignore_end=True))
    assert cut == whole[: whole.index(stop)]


def test_the_end_token_ends_one_text_and_not_the_other(made: Any, prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    art = kc.load(made.fp32, threads=1)
    free = ids_of(art.generate(prompt, max_new_tokens=NEW, ignore_end=True))
    end = next(int(t) for t in free[0] if t not in free[1])
    at = int(np.flatnonzero(free[0] == end)[0])
    monkeypatch.setitem(art.manifest["meta"], "end_tokens", [end])
    got = ids_of(art.generate(prompt, max_new_tokens=NEW))
    np.testing.assert_array_equal(got[1], free[1])
    np.testing.assert_array_equal(got[0], [*free[0][: at + 1], *[-1] * (NEW - at - 1)])
    assert ids_of(art.generate(prompt[0], max_new_tokens=NEW)).shape == (1, at + 1)


def test_draws_follow_the_seed(made: Any, prompt: np.ndarray) -> None:
    art = kc.load(made.fp32, threads=1)

    def drawn(seed: int, **options: Any) -> list[int]:
        steps = art.generate(prompt[0], max_new_tokens=12, temperature=3.0, seed=seed, ignore_end=True, **options)
        return [int(s.ids[0]) for s in steps]

    assert drawn(1) == drawn(1) != drawn(2)
    greedy = [int(s.ids[0]) for s in art.generate(prompt[0], max_new_tokens=12, ignore_end=True)]
    assert drawn(1, top_k=1) == greedy and drawn(1, top_p=1e-9) == greedy and drawn(1) != greedy


def test_generation_ends_where_positions_do(made: Any, prompt: np.ndarray) -> None:
    art = kc.load(made.fp32, threads=1)
    assert ids_of(art.generate(prompt[0], max_new_tokens=500, ignore_end=True)).shape == (1, 64 - 9)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([], {}, "no token"),
        ([[1, 2], [3]], {}, "different lengths"),
        ([1.5], {}, "needed: a text, token ids"),
        ([258], {}, "needed: 0..257"),
        ([1] * 64, {}, "at most 63"),
        ([1], {"max_new_tokens": 0}, "at least 1"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"stop": ("",)}, "empty text"),
    ],
)
def test_bad_requests_are_refused_at_once(made: Any, given: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kc.load(made.fp32, threads=1).generate(given, **options)


def test_artifacts_that_cannot_are_refused(made: Any, tmp_path: Path) -> None:
    art = kc.load(made.fp32, threads=1)
    art.manifest["meta"].pop("cache")
    with pytest.raises(UsageError, match="task text-generation"):
        art.generate([1])
    (made.folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        kc.quantize(made.folder, tmp_path / "q", recipe="fp32", random=True, limit=2, max_length=8)
        kc.lower(tmp_path / "q", tmp_path / "lo", target="x86-avx2")
    finally:
        (tmp_path / "tokenizer.json").rename(made.folder / "tokenizer.json")
    bare = kc.load(tmp_path / "lo", threads=1)
    with pytest.raises(UsageError, match="carries no tokenizer"):
        bare.generate("text")
    (step,) = bare.generate([1, 2], max_new_tokens=1)
    assert step.ids.shape == (1,) and step.text == ""


def test_a_library_of_a_version_without_steps_is_refused(made: Any) -> None:
    with pytest.raises(ArtifactError, match="has no function 'stride'; lower again"):
        kc.load(made.w8a8)._engine._bound("stride")
