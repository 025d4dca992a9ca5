"""Models with codebooks, whose modules branch on buffers and run under autocast, come through capture with the outputs of eval mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from vector_quantize_pytorch import FSQ, LFQ, GroupedResidualVQ, ResidualVQ, VectorQuantize

from khtst_compile.capture import capture, capture_module
from khtst_compile.errors import CaptureError


class Coded(nn.Module):
    """(batch, 10, 12) -> a projection, a quantizer, a projection: values and ids."""

    def __init__(self, quantizer: nn.Module, d: int = 16) -> None:
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(12, d), quantizer, nn.Linear(d, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.quantizer(self.encoder(x))
        return self.decoder(found[0]), found[1]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "euclidean": lambda: VectorQuantize(dim=16, codebook_size=32),
    "cosine": lambda: VectorQuantize(dim=16, codebook_size=32, use_cosine_sim=True),
    "residual": lambda: ResidualVQ(dim=16, codebook_size=32, num_quantizers=3),
    "grouped": lambda: GroupedResidualVQ(dim=16, codebook_size=32, num_quantizers=2, groups=2),
    "steps": lambda: FSQ(levels=[8, 5, 5, 5], dim=16),
    "signs": lambda: LFQ(codebook_size=2**8, dim=16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_eval_mode_and_the_module_stays(kind: str) -> None:
    torch.manual_seed(0)
    model = Coded(KINDS[kind]())
    before, buffers = {k: v.clone() for k, v in model.state_dict().items()}, [n for n, _ in model.named_buffers()]
    program = capture_module(model, (torch.randn(3, 10, 12),))
    assert model.training and [n for n, _ in model.named_buffers()] == buffers
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], v) for k, v in before.items())
    x = torch.randn(5, 10, 12)
    with torch.no_grad():
        expected, found = model.eval()(x), list(program.run({"x": x}).values())
    for want, have in zip(expected, found, strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_a_codebook_that_was_never_initialized_is_refused_by_name() -> None:
    model = Coded(VectorQuantize(dim=16, codebook_size=32, kmeans_init=True))
    with pytest.raises(CaptureError, match=r"quantizer\._codebook\.initted.*train the model") as caught:
        capture_module(model, (torch.randn(3, 10, 12),))
    assert len(str(caught.value).splitlines()) == 1


class Branching(nn.Module):
    """Branches on one flag and computes with another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("twice", torch.tensor(True))
        self.register_buffer("shift", torch.tensor([True]))
        self.register_buffer("initted", torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.initted:
            x = x - 1
        if self.twice:
            x = x + x
        x = torch.where(self.shift & self.shift, x, -x)
        return torch.where(self.shift, x + 1, x)


def test_only_flags_that_are_branched_on_become_constants() -> None:
    model = Branching()
    program = capture_module(model, (torch.randn(3, 4),))
    x = torch.randn(2, 4)
    torch.testing.assert_close(next(iter(program.run({"x": x}).values())), model(x), rtol=0, atol=0)
    assert list(program.tensors()) == ["b_khtst_model_shift"] and isinstance(model.twice, torch.Tensor)


class Autocast(nn.Module):
    def __init__(self, device: str, enabled: bool) -> None:
        super().__init__()
        self.fc, self.device, self.enabled = nn.Linear(4, 4), device, enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.enabled):
            return self.fc(x) + self.fc.bias


@pytest.mark.parametrize(("device", "enabled"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_autocast_that_changes_nothing_here_is_inlined(device: str, enabled: bool) -> None:
    model = Autocast(device, enabled)
    program = capture_module(model, (torch.randn(3, 4),))
    x = torch.randn(2, 4)
    torch.testing.assert_close(next(iter(program.run({"x": x}).values())), model(x), rtol=0, atol=0)


def test_autocast_on_the_cpu_is_refused() -> None:
    with pytest.raises(CaptureError, match="wrap_with_autocast"):
        capture_module(Autocast("cpu", True), (torch.randn(3, 4),))


def test_orthogonal_parametrizations_are_captured() -> None:
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)))
    program = capture_module(model, (torch.randn(3, 8),))
    x = torch.randn(2, 8)
    torch.testing.assert_close(next(iter(program.run({"input": x}).values())), model(x), rtol=0, atol=0)


class Counting(nn.Module):
    """Counts its passes while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps.add_(1)
        return x * 2


@pytest.mark.parametrize("model", [Counting(), nn.Dropout(0.5), nn.BatchNorm1d(4)], ids=["counter", "dropout", "batch norm"])
def test_a_file_exported_in_training_mode_is_refused_with_the_way_out(model: nn.Module, tmp_path: Path) -> None:
    torch.export.save(torch.export.export(model.train(), (torch.randn(3, 4),)), tmp_path / "model.pt2")
    with pytest.raises(CaptureError, match=r"model\.eval\(\)"):
        capture(tmp_path / "model.pt2")
