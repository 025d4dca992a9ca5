"""Inputs to a codes file on one side, outputs from it on the other, by artifacts of every kind."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import khtst_compile as kc
from khtst_compile.codebooks import halves
from khtst_compile.codebooks.cut import Book
from khtst_compile.coding import open_artifact
from khtst_compile.errors import ArtifactError, PassError, UnsupportedError, UsageError
from khtst_compile.program import Rewriter
from khtst_compile.runtime import load
from khtst_compile.signature import TensorSpec
from tests.cli.conftest import ROOT, run_cli
from tests.codes.coders import Skipping, captured
from tests.quantizers import FEATURES, TOKENS, VECTORS, Distances, model, plain_model, samples

KINDS = ("", "-x86", "-onnx")
LEVELS, BITS = 3, 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A residual codebook quantized ("q") and lowered, its halves ("enc", "dec") as every kind, and another model's encoder ("other")."""
    folder = tmp_path_factory.mktemp("halves")
    np.savez(folder / "x.npz", x=samples(7, 64).numpy())
    for seed, name in enumerate(("q", "other_q")):
        torch.manual_seed(seed)
        kc.quantize(captured(model(VECTORS["residual"]())), folder / name, calib=folder / "x.npz")
    kc.split(folder / "q", encoder=folder / "enc", decoder=folder / "dec")
    kc.split(folder / "other_q", encoder=folder / "other", decoder=folder / "other_dec")
    for name in ("q", "enc", "dec"):
        kc.lower(folder / name, folder / f"{name}-x86", target="x86-avx2")
        kc.export(folder / name, folder / f"{name}-onnx")
    return folder


def x(batch: int = 9) -> dict[str, np.ndarray]:
    return {"x": samples(3, batch).numpy()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [9, 1])
def test_both_ways_by_every_kind(made: Path, kind: str, batch: int, tmp_path: Path) -> None:
    codes = kc.encode(made / f"enc{kind}", x(batch), output=tmp_path / "x.codes", pack=True)
    (book,) = codes.books
    assert book.ids.shape == (batch, TOKENS, LEVELS) and book.lost == 0
    assert codes.bytes(packed=True) == -(-batch * TOKENS * LEVELS * BITS // 8)
    expected = open_artifact(made / f"q{kind}").run(x(batch))
    assert (book.ids == expected["output_1"]).all(), "the ids the model itself returns"
    for source in (codes, tmp_path / "x.codes"):
        found = kc.decode(made / f"dec{kind}", source)
        assert list(found) == ["output_0"]
        assert found["output_0"].tobytes() == expected["output_0"].tobytes()
    whole = kc.encode(made / f"q{kind}", x(batch))
    assert (whole.books[0].ids == book.ids).all() and whole.lost is None
    assert kc.decode(made / f"dec{kind}", whole)["output_0"].tobytes() == expected["output_0"].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_refused_both_ways(made: Path, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="axis 'batch' is 0; needed: 1"):
        kc.encode(made / f"enc{kind}", x(0), output=tmp_path / "x.codes")
    assert list(tmp_path.iterdir()) == []
    (book,) = kc.encode(made / "enc", x()).books
    with pytest.raises(UsageError, match="axis 'batch' is 0; needed: 1"):
        kc.decode(made / f"dec{kind}", kc.Codes((type(book)(book.site, book.sha256, book.codes, book.ids[:0]),)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_code_are_counted_or_refused(made: Path, kind: str, tmp_path: Path) -> None:
    given = x()
    given["x"][2, 3:5] = np.nan
    given["x"][8, 0, 1] = np.inf
    codes = kc.encode(made / f"enc{kind}", given)
    assert codes.lost == 3 and not codes.books[0].ids[2, 3:5].any()
    with pytest.raises(UnsupportedError, match="3 of 90 rows of 'quantizer' have no code"):
        kc.encode(made / f"enc{kind}", given, output=tmp_path / "x.codes", strict=True)
    assert list(tmp_path.iterdir()) == []
    assert kc.encode(made / f"enc{kind}", x(), strict=True).lost == 0
    with pytest.raises(UsageError, match="does not count rows without a code"):
        kc.encode(made / f"q{kind}", x(), strict=True)


def test_a_codebook_of_one_code_takes_no_bits(made: Path, tmp_path: Path) -> None:
    kc.quantize(captured(model(Distances(codes=1))), tmp_path / "q", calib=made / "x.npz")
    kc.split(tmp_path / "q", encoder=tmp_path / "enc", decoder=tmp_path / "dec")
    codes = kc.encode(tmp_path / "enc", x(), output=tmp_path / "c", pack=True)
    assert codes.bytes(packed=True) == 0 and codes.count == 9 * TOKENS
    found = kc.decode(tmp_path / "dec", tmp_path / "c")["output_0"]
    assert found.tobytes() == open_artifact(tmp_path / "q").run(x())["output_0"].tobytes()


def test_one_flipped_id_changes_its_sample_alone(made: Path) -> None:
    codes = kc.encode(made / "enc-x86", x())
    before = kc.decode(made / "dec-x86", codes)["output_0"]
    codes.books[0].ids[4, 6, 1] ^= 1
    after = kc.decode(made / "dec-x86", codes)["output_0"]
    assert sorted({tuple(i) for i in np.argwhere(before != after)[:, :2].tolist()}) == [(4, 6)]


def test_what_does_not_fit_is_refused(made: Path, tmp_path: Path) -> None:
    codes = kc.encode(made / "enc", x())
    with pytest.raises(UsageError, match=r"ids of another codebook \('quantizer', sha256 [0-9a-f]{12}\)"):
        kc.decode(made / "dec", kc.encode(made / "other", x()))
    (book,) = codes.books
    for ids, words in (
        (book.ids[:, :5], rf"shape \(9, 5, {LEVELS}\); needed: \('batch', {TOKENS}, {LEVELS}\)"),
        (book.ids[0], rf"shape \({TOKENS}, {LEVELS}\)"),
    ):
        with pytest.raises(UsageError, match=words):
            kc.decode(made / "dec", kc.Codes((type(book)(book.site, book.sha256, book.codes, ids),)))
    with pytest.raises(UsageError, match=r"codes of 2 codebooks .*; needed: of 1"):
        kc.decode(made / "dec", kc.Codes((book, book)))
    with pytest.raises(UsageError, match=r"are of \(32, 32, 33\) codes"):
        kc.decode(made / "dec", kc.Codes((type(book)(book.site, book.sha256, (32, 32, 33), book.ids),)))
    with pytest.raises(UsageError, match="no input holds ids of its codebooks; needed: the decoder"):
        kc.decode(made / "enc", codes)
    with pytest.raises(UsageError, match="no output holds ids of its codebooks; needed: the encoder"):
        kc.encode(made / "dec", x())
    beyond = book.ids.copy()
    beyond[0, 0, 0] = 32
    for kind in KINDS:
        with pytest.raises(UsageError, match=r"input 'quantizer': values 0..32; needed: 0..31"):
            open_artifact(made / f"dec{kind}").run({"quantizer": beyond})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda meta: meta["codebooks"][0].pop("sha256"), r"meta.codebooks\[0\] lacks 'sha256'"),
        (lambda meta: meta["codebooks"][0].update(codes=[-1]), r"codes\[0\] is -1"),
        (lambda meta: meta["codebooks"][0].update(ids=None), "does not describe all of"),
        (lambda meta: meta["split"].pop("ids"), "meta.split lacks 'ids'"),
    ],
)
def test_manifests_that_lie_about_codebooks(made: Path, edit: Callable[[dict[str, Any]], Any], words: str) -> None:
    opened = open_artifact(made / "enc-x86")
    edited = copy.deepcopy(opened.manifest)
    edit(edited["meta"])
    with pytest.raises(ArtifactError, match=words):
        kc.encode(replace(opened, manifest=edited), x())


def test_halves_are_artifacts_like_others(made: Path) -> None:
    for part in ("enc", "dec"):
        for kind in ("-x86", "-onnx"):
            for reference in (made / part, None):
                report = kc.verify(made / f"{part}{kind}", reference=reference)
                assert report.ok, report.table()
        assert kc.verify(made / part).ok
        with pytest.raises(UsageError, match="of a model that was split"):
            kc.verify(made / f"{part}-x86", reference="tests.quantizers:vq_model")
        with pytest.raises(UsageError, match="bench it without baselines"):
            kc.bench(made / f"{part}-x86", baselines=["torch"], seconds=0.01)
        assert {r.engine.split()[0] for r in kc.bench(made / f"{part}-x86", baselines=[], seconds=0.01)} == {"khtst"}
    encoder, decoder = kc.inspect(made / "enc-x86"), kc.inspect(made / "dec-x86")
    assert encoder["meta"]["codebooks"][0]["sha256"] == decoder["meta"]["codebooks"][0]["sha256"]
    assert decoder["ranges"] == {"quantizer": [0, 31]}
    assert load(made / "dec-x86").inputs == (TensorSpec("quantizer", "int32", ("batch", TOKENS, LEVELS)),)


def test_coding_needs_no_torch(made: Path) -> None:
    program = (
        "import sys\nfor name in ('torch', 'onnx', 'onnxruntime', 'transformers'): sys.modules[name] = None\n"
        "import numpy as np, khtst_compile as kc\n"
        f"codes = kc.encode({str(made / 'enc-x86')!r}, {{'x': np.ones((2, {TOKENS}, {FEATURES}), np.float32)}})\n"
        f"print(kc.decode({str(made / 'dec-x86')!r}, codes)['output_0'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"(2, {TOKENS}, 5)", done.stderr


def test_on_the_command_line(made: Path, tmp_path: Path) -> None:
    run_cli("split", made / "q", "--encoder", tmp_path / "enc", "--decoder", tmp_path / "dec")
    shown = run_cli("run", made / "enc-x86", "--inputs", made / "x.npz", "--codes", tmp_path / "c", "--pack", "--strict").stdout
    assert "quantizer: (64, 10, 3) ids of 5, 5, 5 bits, 0 rows without a code\n1920 ids, 1200 bytes" in shown
    run_cli("decode", tmp_path / "dec", tmp_path / "c", "--outputs", tmp_path / "y.npz", "-q")
    run_cli("run", made / "q", "--inputs", made / "x.npz", "--outputs", tmp_path / "whole.npz", "-q")
    assert (np.load(tmp_path / "y.npz")["output_0"] == np.load(tmp_path / "whole.npz")["output_0"]).all()
    (tmp_path / "c").write_bytes((tmp_path / "c").read_bytes()[:-1])
    failed = run_cli("decode", tmp_path / "dec", tmp_path / "c", "--outputs", tmp_path / "z.npz", code=2).stderr
    assert "cut off" in failed and not (tmp_path / "z.npz").exists()
    for options in (
        (),
        ("--outputs", tmp_path / "z.npz", "--codes", tmp_path / "d"),
        ("--outputs", tmp_path / "z.npz", "--pack"),
    ):
        run_cli("run", made / "enc", "--inputs", made / "x.npz", *options, code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "dec", "enc", "whole.npz", "y.npz"]


def test_a_split_that_is_refused_leaves_nothing(made: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=samples(7, 64).numpy())
    kc.quantize(captured(Skipping().eval()), tmp_path / "skip", calib=tmp_path / "x.npz")
    inputs = plain_model()[1]
    np.savez(tmp_path / "plain.npz", input=inputs[0].numpy())
    kc.quantize("tests.quantizers:plain_model", tmp_path / "plain", calib=tmp_path / "plain.npz")
    left = sorted(tmp_path.iterdir())
    with pytest.raises(UnsupportedError, match="would need more than ids"):
        kc.split(tmp_path / "skip", encoder=tmp_path / "e", decoder=tmp_path / "d")
    with pytest.raises(UsageError, match="has no codebook"):
        kc.split(tmp_path / "plain", encoder=tmp_path / "e", decoder=tmp_path / "d")
    with pytest.raises(UsageError, match="has no codebook"):
        kc.encode(tmp_path / "plain", {"input": inputs[0].numpy()})
    for encoder, decoder in (("e", "e"), ("e", "e/d"), ("skip", "d"), ("e", "skip")):
        with pytest.raises(UsageError, match="is, or lies inside"):
            kc.split(tmp_path / "skip", encoder=tmp_path / encoder, decoder=tmp_path / decoder)
    assert sorted(tmp_path.iterdir()) == left


def test_a_split_that_computes_another_bit_is_refused(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels added in another order give other roundings, which no tolerance may pass."""
    original, add = halves._levels, torch.ops.aten.add.Tensor

    def reversed_(rw: Rewriter, node: fx.Node, ids: fx.Node, book: Book) -> fx.Node:
        total = original(rw, node, ids, book)
        first, last = total.all_input_nodes
        return rw.call(add, first.all_input_nodes[0], rw.call(add, first.all_input_nodes[1], last, before=node), before=node)

    monkeypatch.setattr(halves, "_levels", reversed_)
    with pytest.raises(PassError, match="to the bit"):
        kc.split(made / "q", encoder=tmp_path / "e", decoder=tmp_path / "d")
    assert list(tmp_path.iterdir()) == []
