"""Models off the beaten path: each works, or is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.errors import CalibrationError, CaptureError, UsageError


class Odd(nn.Module):
    """A linear inside whatever `function` does with it."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.linear, self.function = nn.Linear(32, 32), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear, x)


WORKING: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "one row without a batch": lambda f, x: f(x[0]) + x,
    "five axes": lambda f, x: f(x[:, None, None, None]).flatten(1),
    "no derivative": lambda f, x: f(x) // 0.5 + f(x),
    "a constant input": lambda f, x: f(torch.ones(4, 32)) + x[:1],
}


@pytest.mark.parametrize("name", WORKING)
def test_it_works(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = capture_module(Odd(WORKING[name]).eval(), (torch.randn(4, 32),))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32))
    kc.quantize(program, tmp_path / "q", calib=tmp_path / "x.npy")
    kc.lower(tmp_path / "q", tmp_path / "l", target="x86-avx2")
    assert kc.verify(tmp_path / "l", reference=tmp_path / "q").ok


def test_outputs_that_numpy_lacks_are_refused(tmp_path: Path) -> None:
    program = capture_module(Odd(lambda f, x: f(x).to(torch.bfloat16)).eval(), (torch.randn(4, 32),))
    with pytest.raises(CaptureError, match="output 'output' is bfloat16"):
        kc.quantize(program, tmp_path / "q", random=True)
    assert not (tmp_path / "q").exists()


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + y

    program = capture_module(Two().eval(), (torch.randn(4, 16), torch.randn(1, 16)))
    with pytest.raises(CalibrationError, match="input 'y': shape is"):
        kc.quantize(program, tmp_path / "q", random=True)


def test_outputs_of_one_name_are_refused() -> None:
    for result in (lambda f, x: {"a_b": f(x), "a": {"b": x}}, lambda f, x: {1: f(x), "1": x}):
        with pytest.raises(CaptureError, match="another key"):
            capture_module(Odd(result).eval(), (torch.randn(4, 32),))  # type: ignore[arg-type]


def test_an_artifact_is_not_written_over_its_source(quantized: Path) -> None:
    for output in (quantized, quantized / "inside"):
        with pytest.raises(UsageError, match="choose another output"):
            kc.lower(quantized, output)


def test_an_index_out_of_range_reads_no_stray_memory(tmp_path: Path) -> None:
    class Gather(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x.gather(1, i)

    program = capture_module(Gather(), (torch.randn(4, 8), torch.randint(0, 2, (4, 3))))
    kc.quantize(program, tmp_path / "q", recipe="fp32")
    kc.lower(tmp_path / "q", tmp_path / "l", target="x86-avx2")
    x = np.arange(8, dtype=np.float32)[None]
    got = kc.load(tmp_path / "l").run({"x": x, "i": np.array([[-(10**9), 3, 10**9]])})["output"]
    np.testing.assert_array_equal(got, [[0.0, 3.0, 7.0]])
