"""Dynamic axes: what is asked for, what the model allows, and what is said where the two differ; constructs that cannot be captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from khtst_compile.capture import capture_module, parse_shapes
from khtst_compile.errors import CaptureError, UsageError

torch.set_num_threads(1)


def test_parse_shapes() -> None:
    assert parse_shapes(["seq=1..512", "batch=8", "x.1=16..64"]) == {"seq": (1, 512), "batch": (8, 8), "x.1": (16, 64)}


@pytest.mark.parametrize("text", ["seq", "seq=", "seq=a..b", "seq=5..2", "seq=0..4", "=3", "seq=1-5", "seq=1..2..3"])
def test_parse_shapes_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shapes"):
        parse_shapes([text])


def test_parse_shapes_refuses_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_shapes(["a=1", "a=2"])


class Fixed(nn.Module):
    """Axis 1 is bound to a parameter's size, axis 0 is free."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6, 1))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.bias)


def test_axis_the_model_fixes_is_refused_when_asked_for() -> None:
    with pytest.raises(CaptureError, match=r"shapes x_1=1\.\.9 is not possible: .*fixed at 6"):
        capture_module(Fixed().eval(), (torch.randn(2, 6, 4),), shapes={"x.1": (1, 9)})


def test_batch_the_model_fixes_becomes_static_and_is_reported() -> None:
    class Bound(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(4.0)[:, None]

    program = capture_module(Bound(), (torch.randn(4, 3),))
    assert program.inputs[0].shape == (4, 3) and program.axes == {}
    assert len(program.meta["static_axes"]) == 1 and program.meta["static_axes"][0].startswith("batch: fixed at 4")


def test_range_is_narrowed_to_what_the_model_allows() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(10, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[1] <= 10
            return x + self.positions[: x.shape[1]]

    with pytest.raises(CaptureError, match=r"x_1: 1\.\.64 narrowed to 1\.\.10"):
        capture_module(Table(), (torch.randn(2, 5, 3),), shapes={"x.1": (1, 64)})
    program = capture_module(Table(), (torch.randn(2, 5, 3),), shapes={"x.1": (1, 10)})
    assert program.axes == {"batch": (1, 4096), "x_1": (1, 10)} and program.outputs[0].shape == ("batch", "x_1", 3)


def test_inputs_of_different_batch_stay_static_unless_named() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    program = capture_module(Two(), (torch.randn(2, 5), torch.randn(5, 3)))
    assert program.axes == {} and [s.shape for s in program.inputs] == [(2, 5), (5, 3)]
    program = capture_module(Two(), (torch.randn(2, 5), torch.randn(5, 3)), shapes={"x.0": (1, 7)})
    assert program.inputs[0].shape == ("x_0", 5) and program.run({"x": torch.ones(7, 5), "y": torch.ones(5, 3)})[
        "output"
    ].shape == (7, 3)


def test_shapes_of_unknown_axis() -> None:
    with pytest.raises(UsageError, match=r"no axis 'width'; there are batch, input\.0, input\.1"):
        capture_module(nn.Linear(3, 3), (torch.randn(2, 3),), shapes={"width": (1, 2)})


def test_example_of_one_sample_still_gives_a_dynamic_batch() -> None:
    program = capture_module(nn.Linear(3, 3).eval(), (torch.randn(1, 3),))
    assert program.axes == {"batch": (1, 4096)} and program.run({"input": torch.ones(9, 3)})["output"].shape == (9, 3)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.nonzero(x[:, 0]).flatten().tolist()]


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()


class Crash(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(99, 2)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Strange(nn.Module):
    def forward(self, x: torch.Tensor) -> object:
        return {"y": x, "text": "no tensor"}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Branch(), ["control flow that depends on data", "test_dynamic.py", "if x.sum() > 0", "torch.where"]),
        (Nonzero(), ["test_dynamic.py", "torch.nonzero"]),
        (Item(), ["aten.item", "test_dynamic.py", "x.max().item()"]),
        (Crash(), ["test_dynamic.py", "x @ torch.ones(99, 2)"]),
        (Counter(), ["writes into", "count"]),
        (Strange(), ["returns a str at text"]),
    ],
)
def test_constructs_that_cannot_be_captured(model: nn.Module, said: list[str]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_module(model.eval(), (torch.randn(4, 3),))
    for part in said:
        assert part in str(caught.value)


def test_unknown_operator_is_named() -> None:
    class Sort(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.unique(x)

    with pytest.raises(CaptureError, match=r"unique"):
        capture_module(Sort(), (torch.randn(4, 3),))


def test_one_tensor_given_for_two_inputs_stays_two() -> None:
    class Difference(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - y

    same = torch.randn(2, 3)
    program = capture_module(Difference(), (same, same))
    assert torch.equal(program.run({"x": torch.full((1, 3), 5.0), "y": torch.ones(1, 3)})["output"], torch.full((1, 3), 4.0))
