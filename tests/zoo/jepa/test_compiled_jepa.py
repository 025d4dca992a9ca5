"""A trained encoder, quantized and compiled, says as much of a digit as it did in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import khtst_compile as kc
from khtst_compile.zoo.checkpoint import CALIBRATION, PROGRAM, save
from khtst_compile.zoo.jepa import VARIANTS, Settings, digits_probe, train


def as_telling(embeddings: Tensor, other: Tensor) -> bool:
    """The linear probe's accuracies are within half a point: 2 of the 449 digits held out."""
    return abs(digits_probe(embeddings) - digits_probe(other)) <= 0.005


def planted_two_bits(embeddings: Tensor) -> Tensor:
    """Codes of two bits a feature, where int8 has eight."""
    step = embeddings.abs().amax(-1, keepdim=True)
    return (embeddings / step).round() * step


def test_the_quantized_encoder_is_as_telling(tmp_path: Path) -> None:
    variant = VARIANTS["image"]()
    model = variant.build(0)
    train(model, variant.patches(), variant.draw, Settings(epochs=8, rate=5e-3))
    module, _ = variant.compiled(model)["encoder"]
    (images,) = variant.load()
    with torch.no_grad():
        exact = module(images)
    save(module, (images[:4],), [(images[::8],)], tmp_path)
    kc.quantize(str(tmp_path / PROGRAM), tmp_path / "q", calib=tmp_path / CALIBRATION)
    kc.lower(tmp_path / "q", tmp_path / "x86", target="x86-avx2")
    assert kc.verify(tmp_path / "x86", reference=tmp_path / "q").ok
    compiled = kc.load(tmp_path / "x86", threads=1)
    name = compiled.inputs[0].name
    made = np.concatenate([compiled.run({name: part.numpy()})["output"] for part in torch.split(images, 256)])
    assert not np.array_equal(made, exact.numpy())
    assert as_telling(torch.from_numpy(made), exact)
    assert not as_telling(planted_two_bits(exact), exact)
