"""Every kind of calibration file, and one clear error for every way it can be wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from khtst_compile.calibrate import Samples, calibrate, load_samples
from khtst_compile.capture import capture_module
from khtst_compile.errors import CalibrationError
from khtst_compile.program import Program

torch.set_num_threads(1)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(input_ids)) * attention_mask.unsqueeze(-1)


@pytest.fixture(scope="module")
def text_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Reads token ids; its tokenizer splits at blanks, and knows a, b, c and d."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.save(str(folder / "tokenizer.json"))
    ids = torch.ones(2, 5, dtype=torch.int64)
    program = capture_module(Embedder().eval(), {"input_ids": ids, "attention_mask": ids}, shapes={"seq": (1, 32)})
    program.meta.update(tokenizer=str(folder), max_length=16)
    return program


@pytest.fixture(scope="module")
def array_program() -> Program:
    return capture_module(nn.Linear(3, 2).eval(), (torch.randn(2, 3),))


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def tokens(samples: Samples) -> list[list[int]]:
    """The unpadded rows of all batches."""
    rows = []
    for batch in samples:
        assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            rows.append(ids[mask != 0].tolist())
            assert ids[mask == 0].tolist() == [0] * int((mask == 0).sum())
    return rows


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.txt", "a b c\n\nd\n"),
        ("t.jsonl", '"a b c"\n{"text": "d", "label": 1}\n'),
        ("t.json", '["a b c", "d"]'),
        ("t.json", '{"calib": ["a b c", "d"], "queries": ["a"]}'),
        ("t.json", '{"only": ["a b c", "d"], "note": "hello"}'),
    ],
)
def test_text_files(tmp_path: Path, text_program: Program, name: str, content: str) -> None:
    samples = load_samples(write(tmp_path / name, content), text_program)
    assert samples.count == 2 and not samples.random and samples.source.endswith(name)
    assert sorted(tokens(samples)) == [[2, 4, 5, 6, 3], [2, 7, 3]]
    assert tokens(samples) == tokens(samples), "samples can be read again"


def test_texts_are_cut_limited_and_batched_by_length(tmp_path: Path, text_program: Program) -> None:
    lines = [" ".join(["a"] * n) for n in range(1, 41)]
    path = write(tmp_path / "t.txt", "\n".join(lines))
    assert max(map(len, tokens(load_samples(path, text_program)))) == 16, "the tokenizer's own limit"
    assert max(map(len, tokens(load_samples(path, text_program, max_length=7)))) == 7
    some = load_samples(path, text_program, limit=10, batch=4)
    assert some.count == 10 and [len(b["input_ids"]) for b in some] == [4, 4, 2]
    lengths = [len(t) for t in tokens(some)]
    assert lengths == sorted(lengths)
    other = load_samples(path, text_program, limit=10, seed=1)
    assert tokens(other) != tokens(some), "which samples are drawn follows the seed, not the order in the file"


def test_arrays(tmp_path: Path, array_program: Program) -> None:
    x = np.random.default_rng(0).normal(size=(9, 3))
    np.savez(tmp_path / "x.npz", input=x)
    np.save(tmp_path / "x.npy", x.astype(np.float16))
    write(tmp_path / "x.jsonl", "\n".join(json.dumps({"input": row.tolist()}) for row in x))
    for name in ("x.npz", "x.npy", "x.jsonl"):
        samples = load_samples(tmp_path / name, array_program, batch=4)
        got = torch.cat([b["input"] for b in samples])
        assert got.dtype is torch.float32 and [len(b["input"]) for b in samples] == [4, 4, 1]
        assert torch.allclose(got, torch.from_numpy(x).float(), atol=2e-3), "float16 keeps 11 bits"


def test_random_says_so(text_program: Program, array_program: Program, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        samples = load_samples(None, text_program, limit=20, random=True)
    assert samples.random and "random" in samples.source and "random inputs" in caplog.text
    ids = torch.cat([b["input_ids"] for b in samples])
    assert len(ids) == 20 and set(ids.flatten().tolist()) == set(range(8)), "ids span the embedding table and stay in it"
    assert all(bool((b["attention_mask"] == 1).all()) for b in samples)
    assert torch.equal(ids, torch.cat([b["input_ids"] for b in samples]))
    stats = calibrate(text_program, samples)
    assert "random" in stats.source and stats.samples == 20
    assert next(iter(load_samples(None, array_program, random=True)))["input"].shape == (16, 3)


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.txt", "\n \n", "empty"),
        ("t.jsonl", "", "empty"),
        ("t.json", "[]", "empty"),
        ("t.csv", "a", "unknown kind '.csv'"),
        ("t.jsonl", '"a"\n{oops\n', "line 2: not JSON"),
        ("t.jsonl", '"a"\n7\n', "line 2: found int"),
        ("t.jsonl", '"a"\n{"input_ids": [1]}\n', "line 2: texts and arrays are mixed"),
        ("t.json", "{", "not JSON"),
        ("t.json", '{"p": ["a"], "q": ["b"]}', "lists of texts under ['p', 'q']"),
        ("t.json", "[1, 2]", "needed: a list of texts"),
    ],
)
def test_text_errors(tmp_path: Path, text_program: Program, name: str, content: str, said: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(CalibrationError) as caught:
        load_samples(path, text_program)
    assert said in str(caught.value) and name in str(caught.value)


def test_text_without_tokenizer(tmp_path: Path, text_program: Program, array_program: Program) -> None:
    path = write(tmp_path / "t.txt", "a b")
    with pytest.raises(CalibrationError, match=r"the model reads \['input'\]"):
        load_samples(path, array_program)
    bare = capture_module(Embedder().eval(), {n: torch.ones(2, 5, dtype=torch.int64) for n in ("input_ids", "attention_mask")})
    with pytest.raises(CalibrationError, match=r"without tokenizer\.json"):
        load_samples(path, bare)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="not UTF-8"):
        load_samples(tmp_path / "bad.txt", text_program)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"input": np.zeros((4, 3), np.int64)}, "'input' is int64; needed: float32"),
        ({"input": np.zeros((4, 5), np.float32)}, "has shape (4, 5); needed: (samples, 3)"),
        ({"input": np.zeros(3, np.float32)}, "has shape (3,)"),
        ({"input": np.zeros((0, 3), np.float32)}, "empty"),
        ({"inputs": np.zeros((4, 3), np.float32)}, "unknown input 'inputs'"),
        ({}, "input 'input' is missing"),
        ({"input": np.array(["a", "b"])}, "needed: float32"),
    ],
)
def test_array_errors(tmp_path: Path, array_program: Program, arrays: dict[str, Any], said: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        load_samples(npz(tmp_path / "x.npz", **arrays), array_program)
    assert said in str(caught.value) and "x.npz" in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_input_names_the_sample(tmp_path: Path, array_program: Program, value: float) -> None:
    x = np.zeros((40, 3), np.float32)
    x[23, 1] = value
    samples = load_samples(npz(tmp_path / "x.npz", input=x), array_program)
    with pytest.raises(CalibrationError, match=r"'input', sample 23 holds NaN or infinity"):
        list(samples)


def test_other_errors(tmp_path: Path, text_program: Program, array_program: Program) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        load_samples(tmp_path / "none.txt", text_program)
    with pytest.raises(CalibrationError, match="no file was given"):
        load_samples(None, text_program)
    with pytest.raises(CalibrationError, match="both"):
        load_samples(tmp_path / "x.npz", array_program, random=True)
    np.save(tmp_path / "one.npy", np.zeros((3, 5)))
    with pytest.raises(CalibrationError, match="one array, but the model reads"):
        load_samples(tmp_path / "one.npy", text_program)
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(CalibrationError, match="not a plain"):
        load_samples(tmp_path / "objects.npy", array_program)
    write(tmp_path / "cut.npz", "PK not really")
    with pytest.raises(CalibrationError, match="not a plain"):
        load_samples(tmp_path / "cut.npz", array_program)
    write(tmp_path / "r.jsonl", '{"input": [1.0, 2.0, 3.0]}\n{"input": [1.0, 2.0]}\n')
    with pytest.raises(CalibrationError, match=r"sample 2: input 'input' has shape \(2,\)"):
        load_samples(tmp_path / "r.jsonl", array_program)


def test_fixed_batch_takes_whole_batches_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = capture_module(nn.Linear(3, 2).eval(), (torch.randn(4, 3),), shapes={"batch": (4, 4)})
    path = npz(tmp_path / "x.npz", input=np.zeros((10, 3), np.float32))
    with caplog.at_level(logging.WARNING):
        samples = load_samples(path, program)
    assert samples.count == 8 and [len(b["input"]) for b in samples] == [4, 4] and "last 2 samples" in caplog.text
    with pytest.raises(CalibrationError, match="at least 4 are needed"):
        load_samples(npz(tmp_path / "y.npz", input=np.zeros((3, 3), np.float32)), program)


def test_damaged_and_foreign_array_files(array_program: Program, tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", x=np.zeros((4, 3), np.float32))
    data = (tmp_path / "good.npz").read_bytes()
    files = {"cut.npz": data[:100], "flipped.npz": bytes([*data[:180], data[180] ^ 255, *data[181:]]), "zip.npy": data}
    np.save(tmp_path / "whole.npy", np.zeros((4, 3), np.float32))
    files |= {"cut.npy": (tmp_path / "whole.npy").read_bytes()[:100], "header.npy": b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[["}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CalibrationError, match=name.replace(".", r"\.")) as caught:
            load_samples(tmp_path / name, array_program)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_the_other_byte_order_gives_the_same_values(array_program: Program, tmp_path: Path, kind: str) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    other = values.astype(np.dtype(np.float32).newbyteorder("S"))
    file = tmp_path / f"x.{kind}"
    np.save(file, other) if kind == "npy" else np.savez(file, **{array_program.inputs[0].name: other})
    (batch,) = load_samples(file, array_program)
    assert np.array_equal(next(iter(batch.values())).numpy(), values)


@pytest.mark.parametrize("bad", [-1, 8, 2**40])
def test_ids_outside_the_table_name_the_sample(text_program: Program, tmp_path: Path, bad: int) -> None:
    ids = np.ones((3, 5), np.int64)
    ids[2, 4] = bad
    np.savez(tmp_path / "x.npz", input_ids=ids, attention_mask=np.ones((3, 5), np.int64))
    with pytest.raises(CalibrationError, match=r"'input_ids', sample 2 holds ids .*needed: 0\.\.7"):
        list(load_samples(tmp_path / "x.npz", text_program))


def test_an_index_that_only_running_finds_is_named_too() -> None:
    class Shifted(Embedder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids + 5, attention_mask)

    ids = torch.ones(2, 5, dtype=torch.int64)
    program = capture_module(Shifted().eval(), {"input_ids": ids, "attention_mask": ids})
    batch = {"input_ids": ids + 4, "attention_mask": ids}
    with pytest.raises(CalibrationError, match="indexes past the end of a table"):
        calibrate(program, Samples(2, "here", False, lambda: iter([batch])))


def test_text_no_utf8_can_hold(text_program: Program, tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", r'["a b", "c \ud800 d"]')
    with pytest.raises(CalibrationError, match=r"text 2 holds '\\ud800'"):
        load_samples(path, text_program)


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_json_nested_too_deep(text_program: Program, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "[" * 200_000)
    with pytest.raises(CalibrationError, match="not JSON"):
        load_samples(path, text_program)


@pytest.mark.parametrize("length", [1, 2])
def test_a_length_without_room_for_text_is_refused(text_program: Program, tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "x.txt", "a b c d\n")
    with pytest.raises(CalibrationError, match="needed: a maximum length of at least 3"):
        load_samples(path, text_program, max_length=length)
    assert tokens(load_samples(path, text_program, max_length=3)) == [[2, 4, 3]]
