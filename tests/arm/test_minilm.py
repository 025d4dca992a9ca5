"""MiniLM whole: on ARM the bits of x86, and on both platforms a runner of a few megabytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import khtst_compile as kc
from tests.arm.test_program import VARIANTS, check_golden

BUDGET_BYTES = 8_000_000  # of all but weights


@pytest.fixture(scope="module")
def quantized(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM with a rotation, so that every kernel of the default recipe is in it."""
    folder = tmp_path_factory.mktemp("minilm") / "q"
    recipe = "smooth{alpha=0.5} | rotate{block=128} | w8a8{rounding=nearest}"
    kc.quantize(minilm, folder, random=True, recipe=recipe, limit=4, max_length=16)
    return folder


def all_but_weights(manifest: dict[str, Any]) -> int:
    return sum(f["bytes"] for name, f in manifest["files"].items() if name != "weights.bin")


def test_the_bits_of_x86(quantized: Path, runner: Path, tmp_path: Path) -> None:
    made = kc.lower(quantized, tmp_path / "arm", target="arm", emit_runner=True)
    assert made.manifest["runner"]["platform"] == "linux/arm64" and all_but_weights(made.manifest) <= BUDGET_BYTES
    for variant in VARIANTS:
        check_golden(tmp_path / "arm", variant, tmp_path / variant, runner)


def test_four_x86_variants_are_small(quantized: Path, tmp_path: Path) -> None:
    made = kc.lower(quantized, tmp_path / "x86", target="x86", emit_runner=True)
    assert len(made.manifest["target"]["variants"]) == 4 and made.manifest["runner"]["platform"] == "linux/amd64"
    assert all_but_weights(made.manifest) <= BUDGET_BYTES
