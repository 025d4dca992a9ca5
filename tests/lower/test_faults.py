"""Planted faults: each makes `verify` fail and name the layer that was hit, and no other first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import artifact, cpu
from khtst_compile.errors import ArtifactError, EnvironmentProblem, OverBudget, UsageError
from khtst_compile.runtime import WEIGHTS

HIT = "blocks.1.up"  # the layer the faults are planted in


def edit(folder: Path, change: Any) -> None:
    """Apply `change(manifest, weights)` to an artifact and sign it again, as a fault in the compiler would have it."""
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    weights = np.fromfile(folder / WEIGHTS, np.uint8)
    change(manifest, weights)
    weights.tofile(folder / WEIGHTS)
    manifest["files"][WEIGHTS]["sha256"] = artifact.sha256(folder / WEIGHTS)
    (folder / artifact.MANIFEST).write_text(json.dumps(manifest))


def gemm_entries(manifest: dict[str, Any], site: str) -> list[dict[str, Any]]:
    """Weight entries of a layer: its int8 matrix, scale and bias. The matrices stand in the order the layers run."""
    sites = [t["site"] for t in manifest["taps"] if t["operator"] == "w8a8_gemm"]
    runs = next(v for v in manifest["target"]["variants"] if not cpu.missing(v["cpu_flags"]))
    entries = [manifest["weights"][i] for i in runs["arrays"]]
    starts = [i for i, e in enumerate(entries) if e["dtype"] == "int8"]
    start = starts[sites.index(site)]
    floats = [e for e in entries[start : start + 4] if e["dtype"] == "float32"]
    return [entries[start], *floats[:2]]


@pytest.fixture
def copy(library: Path, tmp_path: Path) -> Path:
    shutil.copytree(library, tmp_path / "library")
    return tmp_path / "library"


def flip_weight(manifest: dict[str, Any], weights: np.ndarray) -> None:
    offset = gemm_entries(manifest, HIT)[0]["offset"]
    weights[offset + 16] ^= 1  # the lowest bit of one weight


def wrong_scale(manifest: dict[str, Any], weights: np.ndarray) -> None:
    offset = gemm_entries(manifest, HIT)[1]["offset"]
    weights[offset : offset + 4].view(np.float32)[:] *= 1.001


def shifted_zero(manifest: dict[str, Any], weights: np.ndarray) -> None:
    """A zero point off by one adds the column's scale times its weights' sum; here a shift of the bias, its equal in effect."""
    entry = gemm_entries(manifest, HIT)[2]
    weights[entry["offset"] : entry["offset"] + 4].view(np.float32)[:] += 1e-3


@pytest.mark.parametrize("fault", [flip_weight, wrong_scale, shifted_zero])
def test_a_planted_fault_is_named(copy: Path, quantized: Path, fault: Any) -> None:
    edit(copy, fault)
    for report in (kc.verify(copy), kc.verify(copy, reference=quantized)):
        assert not report.ok
        first = report.first_over
        assert first is not None and first.site == HIT
        with pytest.raises(OverBudget, match=HIT):
            report.require("here")
        assert f'classname="{HIT}"' in report.junit() and "<failure" in report.junit()


def test_only_the_layer_at_fault_fails_in_the_replay(copy: Path, quantized: Path) -> None:
    edit(copy, flip_weight)
    report = kc.verify(copy, reference=quantized)
    assert {r.site for r in report.rows if not r.ok and not r.site.startswith("output")} == {HIT}


def test_a_sound_artifact_passes_every_way(library: Path, quantized: Path) -> None:
    for report in (kc.verify(library), kc.verify(library, reference=quantized), kc.verify(quantized)):
        assert report.ok, report.table(5)


def test_onnx_agrees_and_a_flipped_weight_is_named(quantized: Path, tmp_path: Path) -> None:
    import onnx

    kc.export(quantized, tmp_path / "onnx")
    sound = kc.verify(tmp_path / "onnx", reference=quantized)
    assert sound.ok, sound.table(5)
    assert {"int32 sums", "codes", "output"} <= {r.what for r in sound.rows}
    model = onnx.load(tmp_path / "onnx" / "model.onnx")
    (weight,) = (t for t in model.graph.initializer if t.name.endswith("up_int8.kn") and "blocks_1" in t.name)
    data = bytearray(weight.raw_data)
    data[5] ^= 1
    weight.raw_data = bytes(data)
    onnx.save(model, tmp_path / "onnx" / "model.onnx")
    manifest = json.loads((tmp_path / "onnx" / artifact.MANIFEST).read_text())
    manifest["files"]["model.onnx"]["sha256"] = artifact.sha256(tmp_path / "onnx" / "model.onnx")
    (tmp_path / "onnx" / artifact.MANIFEST).write_text(json.dumps(manifest))
    first = kc.verify(tmp_path / "onnx", reference=quantized).first_over
    assert first is not None and (first.site, first.what) == (HIT, "int32 sums")


def test_an_altered_file_is_refused_before_it_is_loaded(copy: Path) -> None:
    weights = bytearray((copy / WEIGHTS).read_bytes())
    weights[100] ^= 1
    (copy / WEIGHTS).write_bytes(bytes(weights))
    with pytest.raises(ArtifactError, match="altered"):
        kc.load(copy)


@pytest.mark.parametrize("name", ["library", WEIGHTS, "golden.npz"])
def test_a_truncated_or_missing_file_is_refused(copy: Path, name: str) -> None:
    if name == "library":
        name = artifact.read(copy).manifest["target"]["variants"][-1]["library"]
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=name):
        kc.load(copy)
    (copy / name).unlink()
    with pytest.raises(ArtifactError, match="missing"):
        kc.load(copy)


def test_an_artifact_for_another_cpu_is_refused_by_flag(copy: Path) -> None:
    edit(copy, lambda manifest, _: [v["cpu_flags"].append("avx9000") for v in manifest["target"]["variants"]])
    with pytest.raises(EnvironmentProblem, match="lacks avx9000"):
        kc.load(copy)


def test_another_tvm_or_version_is_refused(copy: Path) -> None:
    edit(copy, lambda manifest, _: manifest["made_by"].update(tvm="0.1"))
    with pytest.raises(EnvironmentProblem, match=r"tvm 0\.1"):
        kc.load(copy)
    edit(copy, lambda manifest, _: manifest.update(version=99))
    with pytest.raises(ArtifactError, match="version 99"):
        kc.load(copy)


def test_the_original_of_a_file_and_of_a_seeded_factory(tmp_path: Path) -> None:
    import torch

    from tests.tiny import Mlp

    batch = torch.export.Dim("batch", max=64)
    torch.export.save(
        torch.export.export(Mlp().eval(), (torch.randn(4, 32),), dynamic_shapes={"x": {0: batch}}), tmp_path / "m.pt2"
    )
    for name, source, seed in (("file", str(tmp_path / "m.pt2"), 0), ("factory", "tests.tiny:mlp", 7)):
        kc.quantize(source, tmp_path / name, random=True, recipe="w8a8", limit=8, seed=seed)
        report = kc.verify(tmp_path / name, reference=source)
        assert report.ok, report.table(5)


def test_a_model_folder_given_for_a_modules_original(library: Path, minilm: Path) -> None:
    with pytest.raises(UsageError, match="is not the original"):
        kc.verify(library, reference=minilm)
