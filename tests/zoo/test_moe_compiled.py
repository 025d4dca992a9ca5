"""Mixtures through the compiler: who takes which token comes out the same, quantized or not, and ties go as in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.zoo.catalog import Entry, catalog
from khtst_compile.zoo.catalog_moe import ENTRIES
from khtst_compile.zoo.moe import DECODER, Output, RedirectableMoe, Roles, Routed, SonicMoe


def outputs(folder: Path, recipe: str, module: torch.nn.Module, example: torch.Tensor, x: torch.Tensor) -> list[np.ndarray]:
    """Of the artifact for AVX2 and of the ONNX file, on `x`, whose batch is not the example's."""
    kc.quantize(capture_module(module, (example,)), folder / "q", recipe=recipe, random=recipe != "fp32")
    kc.lower(folder / "q", folder / "l", target="x86-avx2")
    assert kc.verify(folder / "l", reference=folder / "q").ok
    kc.export(folder / "q", folder / "m.onnx")
    session = ort.InferenceSession(str(folder / "m.onnx"), providers=["CPUExecutionProvider"])
    return [kc.load(folder / "l", threads=1).run({"x": x.numpy()})["output"], session.run(None, {"x": x.numpy()})[0]]


def test_a_full_expert_drops_the_tokens_it_drops_in_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    moe = Output(SonicMoe(32, 4, 1, capacity=5)).eval()
    x = torch.randn(18, 32).repeat_interleave(2, 0)  # twins: of equal probability the earlier goes first
    want = moe(x).detach()
    empty = (want == 0).all(-1)
    assert bool((empty[1::2] & ~empty[::2]).any())
    for got in outputs(tmp_path, "fp32", moe, torch.randn(64, 32), x):
        assert np.array_equal((got == 0).all(-1), empty.numpy())
        # float32 sums of 64 products and a polynomial sigmoid, on outputs of about .1.
        assert np.abs(got - want.numpy()).max() < 1e-6


def test_a_role_in_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = RedirectableMoe(32, 4, 1, capacity=40, heads=2).eval()
    with torch.no_grad():
        block.gain.fill_(0.5)
    module, x = Output(block, DECODER), torch.randn(5, 8, 32)
    want = module(x).detach().numpy()
    for got in outputs(tmp_path, "w8a8", module, torch.randn(4, 8, 32), x):
        # 8 bits a layer are -40 dB; a token that goes to another expert because of them would be louder.
        assert np.square(got - want).sum() / np.square(want).sum() < 1e-3


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_entries_are_what_the_catalog_promises(entry: Entry) -> None:
    assert catalog()[entry.name] is entry
    module, other, samples = entry.build(), entry.build(), entry.samples()
    assert module is not other and not module.training and len(samples) >= 8
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True))
    (x,), (first,) = entry.inputs(), samples[0]
    assert torch.equal(x, first) and len(x) >= 2
    program = capture_module(module, (x,))
    assert program.axes["batch"][0] == 1
    with torch.no_grad():
        for (y,) in samples[:2]:
            found = program.run({program.inputs[0].name: y[:7]})[program.outputs[0].name]
            assert torch.equal(found, module(y[:7]))


def test_a_trained_redirectable_block_attends_and_uses_both_roles() -> None:
    layer = catalog()["redirectable-encoder"].build().layer
    assert isinstance(layer, RedirectableMoe) and layer.roles == Roles.alternating(4) and abs(float(layer.gain.detach())) > 0.01
    found = layer(catalog()["redirectable-encoder"].inputs()[0])
    assert isinstance(found, Routed) and int(found.load.min()) > 0
