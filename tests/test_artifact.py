"""The folder format: written whole or not at all, checked before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from khtst_compile import artifact
from khtst_compile.errors import ArtifactError, UsageError
from khtst_compile.layout import ALIGN

FIELDS: dict[str, Any] = {
    "kind": "quantized",
    "made_by": {},
    "source": "s",
    "recipe": "w8a8",
    "passes": [],
    "inputs": [],
    "outputs": [],
    "axes": {},
    "golden": {"accuracy": {}},
    "meta": {},
}


def make(path: Path, text: str = "hello") -> Path:
    with artifact.staging(path) as folder:
        (folder / "data.bin").write_text(text)
        artifact.write_manifest(folder, FIELDS)
    return path


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    assert artifact.read(path, kind="quantized").file("data.bin").read_text() == "hello"
    make(path, "again")
    assert artifact.read(path).file("data.bin").read_text() == "again"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_error_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    with pytest.raises(RuntimeError), artifact.staging(path) as folder:
        (folder / "data.bin").write_text("half")
        raise RuntimeError
    assert artifact.read(path).file("data.bin").read_text() == "hello"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_a_dead_process_left_is_swept_up(tmp_path: Path) -> None:
    dead = tmp_path / ".a.tmp-999999999"
    dead.mkdir()
    make(tmp_path / "a")
    assert not dead.exists()


def test_a_death_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    make(tmp_path / "a").rename(tmp_path / ".a.old-999999999")
    with pytest.raises(RuntimeError), artifact.staging(tmp_path / "a"):
        raise RuntimeError
    assert artifact.read(tmp_path / "a").file("data.bin").read_text() == "hello"


def test_foreign_folders_and_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(UsageError, match="not an artifact"), artifact.staging(path):
            pass
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "zip"}, "not a khtst-artifact"),
        ({"version": 2}, "version 2"),
        ({"kind": "soup"}, "soup"),
        ({"inputs": None}, "inputs is None; needed: a list"),
        ({"files": {"../../etc/passwd": {"sha256": "", "bytes": 0}}}, "impossible file"),
        ({"kind": ["library"]}, "artifact kind"),
        ({"files": {"data.bin": {"sha256": 1, "bytes": 5}}}, r"files\.data\.bin\.sha256 is 1; needed: text"),
        ({"files": {"data.bin": {"bytes": 5}}}, r"lacks 'sha256'"),
        ({"inputs": [{"name": "x"}]}, r"inputs\[0\] lacks 'dtype', 'shape'"),
        (
            {"inputs": [{"name": "x", "dtype": "int64", "shape": [1.5]}]},
            r"inputs\[0\]\.shape\[0\] is 1\.5; needed: a whole number",
        ),
        ({"inputs": [{"name": "x", "dtype": "int64", "shape": [-1]}]}, r"shape\[0\] is -1; needed: a whole number of at least 0"),
        ({"axes": {"batch": 3}}, r"axes\.batch is 3; needed: a list"),
        ({"ranges": {"ids": ["a", 3]}}, r"ranges\.ids\[0\] is 'a'"),
        ({"golden": {"accuracy": {"y": "good"}}}, r"accuracy\.y is 'good'; needed: a number"),
        ({"passes": ["w8a8"]}, r"passes\[0\] is 'w8a8'; needed: an object"),
        ({"made_by": {"tvm": 27}}, r"made_by\.tvm is 27"),
    ],
)
def test_a_wrong_manifest_is_refused_in_words(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = make(tmp_path / "a")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(ArtifactError, match=said):
        artifact.read(path)


def test_no_artifact_and_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not an artifact"):
        artifact.read(tmp_path)
    with pytest.raises(ArtifactError, match="khtst-compile lower"):
        artifact.read(make(tmp_path / "a"), kind="library")
    (tmp_path / "a" / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="JSON"):
        artifact.read(tmp_path / "a")


def test_weights_are_mapped_in_place(tmp_path: Path) -> None:
    arrays = [np.arange(5, dtype=np.int8), np.ones((3, 2), np.float32), np.zeros((0,), np.int32), np.array([True])]
    table = artifact.write_weights(tmp_path / "w", arrays)
    mapped = artifact.map_weights(tmp_path / "w", table)
    for a, b in zip(arrays, mapped, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype == b.dtype and b.ctypes.data % ALIGN == 0) or not b.size
    mapped[0][0] = 9  # private: the file stays as it is
    np.testing.assert_array_equal(artifact.map_weights(tmp_path / "w", table)[0], arrays[0])
    with pytest.raises(ArtifactError, match="outside"):
        artifact.map_weights(tmp_path / "w", [{"dtype": "int8", "shape": [10**9], "offset": 0}])
    with pytest.raises(ArtifactError, match="object"):
        artifact.map_weights(tmp_path / "w", [{"dtype": "object", "shape": [1], "offset": 0}])


def test_a_file_is_never_put_in_place_of_a_device_or_a_link(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no ordinary file"), artifact.staged_file(Path("/dev/null")):
        pass
    assert Path("/dev/null").is_char_device()
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with artifact.staged_file(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


VARIANT: dict[str, Any] = {
    "name": "x86-avx2",
    "isa": "avx2",
    "cpu_flags": ["avx2"],
    "codes_dtype": "int16",
    "codes_offset": 0,
    "library": "data.bin",
    "build_s": 1.0,
    "arrays": [0, 0],
    "layouts": [None, "4x8 in 2x2x8 as 0x2x1"],
}
LIBRARY: dict[str, Any] = {
    **FIELDS,
    "kind": "library",
    "target": {"name": "x86-avx2", "variants": [VARIANT]},
    "weights": [{"dtype": "int8", "shape": [3, 8], "offset": 0}],
    "taps": [],
    "program": [],
    "independent": None,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"library": "other.so"}, "not among the files"),
        ({"arrays": [0]}, "1 arrays and 2 layouts"),
        ({"arrays": [0, 1]}, "array 1 of 1"),
        ({"arrays": [0, -1]}, r"arrays\[1\] is -1"),
        ({"cpu_flags": "avx2"}, r"variants\[0\]\.cpu_flags is 'avx2'; needed: a list"),
        ({"codes_offset": True}, "codes_offset is True"),
        ({"layouts": [None, "4x8"]}, "PADDED in BLOCKS as AXES"),
        ({"layouts": [None, "4x8 in 2x2x9 as 0x2x1"]}, "does not fit"),
        ({"layouts": [None, "4x8 in 2x2x8 as 0x2x2"]}, "does not fit"),
        ({"layouts": [None, "2x8 in 2x8 as 0x1"]}, "does not fit"),
    ],
)
def test_a_damaged_variant_is_refused_in_words(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with artifact.staging(tmp_path / "a") as folder:
        (folder / "data.bin").write_text("hello")
        artifact.write_manifest(folder, LIBRARY)
    assert artifact.read(tmp_path / "a").manifest["version"] == 2
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["target"]["variants"][0] |= change
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=said):
        artifact.read(tmp_path / "a")


def test_a_library_of_an_older_version_says_what_to_do(tmp_path: Path) -> None:
    old = {"format": "khtst-artifact", **LIBRARY, "version": 1, "target": {"name": "x86-avx2", "cpu_flags": []}, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(ArtifactError, match=r"library artifact version 1, .* reads version 2; run khtst-compile lower again"):
        artifact.read(tmp_path)
