"""A saved model is quantized from its two files alone, and gives what the model gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import khtst_compile as kc
from khtst_compile.api import load_program
from khtst_compile.artifact import read
from khtst_compile.zoo.catalog import Entry
from khtst_compile.zoo.catalog_codes import ENTRIES
from khtst_compile.zoo.checkpoint import CALIBRATION, PROGRAM, save

NAMED = {entry.name: entry for entry in ENTRIES}


@pytest.mark.parametrize("entry", [NAMED["gsq-residual"], NAMED["ssm"]], ids=lambda e: e.name)
def test_what_is_saved_can_be_quantized(entry: Entry, tmp_path: Path) -> None:
    model, samples = entry.build(), entry.samples()
    save(model, entry.inputs(), samples[:8], tmp_path)
    kc.quantize(str(tmp_path / PROGRAM), tmp_path / "same", recipe="fp32", calib=tmp_path / CALIBRATION)
    made = kc.quantize(str(tmp_path / PROGRAM), tmp_path / "q", calib=tmp_path / CALIBRATION)
    assert made.manifest["axes"]["batch"][0] == 1 and [s["name"] for s in made.manifest["inputs"]] == ["x"]
    assert any(p["pass"] == "w8a8" and p["changed"] for p in made.manifest["passes"])
    x = torch.cat([s[0] for s in samples[8:11]])
    with torch.no_grad():
        found = list(load_program(read(tmp_path / "same", kind="quantized")).run({"x": x}).values())
        exact = model(x)
    exact = [exact] if isinstance(exact, torch.Tensor) else list(exact)
    assert len(found) == len(exact) and all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
