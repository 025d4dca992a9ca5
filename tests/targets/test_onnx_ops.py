"""The khtst:: operators in ONNX, run by onnxruntime: codes and int32 sums equal to the bit, float epilogues within their rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from khtst_compile.errors import LoweringError
from khtst_compile.lower.onnx import export_onnx
from khtst_compile.lower.onnx_ops import rotation_slack
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.ops.rotate import rotate_reference
from khtst_compile.ops.w8a8_linear import int8_matmul, w8a8_linear_reference
from khtst_compile.program import Program, TensorSpec

QUANTIZE, LINEAR = torch.ops.khtst.quantize_rows.default, torch.ops.khtst.w8a8_linear.default
ROTATE = torch.ops.khtst.rotate.default
U = 2.0**-24  # unit roundoff of float32


class Quantizer(nn.Module):
    """x (batch, seq, K) float32 -> codes (batch, seq, K) int8, scale (batch, seq) float32."""

    def __init__(self, smooth: torch.Tensor | None, static: torch.Tensor | None, block: int, points: int):
        super().__init__()
        self.register_buffer("smooth", smooth)
        self.register_buffer("static", static)
        self.block, self.points = block, points

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return QUANTIZE(x, self.smooth, self.static, self.block, self.points)


class Linear(nn.Module):
    """codes (batch, seq, K) int8, scale (batch, seq) -> y (batch, seq, N) float32."""

    def __init__(self, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)

    def forward(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return LINEAR(codes, scale, self.weight, self.weight_scale, self.bias)


class Both(nn.Module):
    """Quantizer, then linears that share its codes: x (batch, seq, K) -> one (batch, seq, N) per linear."""

    def __init__(self, quantizer: Quantizer, linears: list[Linear]):
        super().__init__()
        self.quantizer, self.linears = quantizer, nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scale = self.quantizer(x)
        return tuple(linear(codes, scale) for linear in self.linears)


def program_of(module: nn.Module, *examples: torch.Tensor, outputs: int) -> Program:
    """Axes 0 and 1 dynamic, named batch and seq; inputs in0.., outputs out0.. ."""
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    ep = torch.export.export(module.eval(), examples, dynamic_shapes=[{0: batch, 1: seq}] * len(examples), strict=False)
    results = module(*examples)
    results = results if isinstance(results, tuple) else (results,)

    def spec(name: str, t: torch.Tensor) -> TensorSpec:
        return TensorSpec(name, str(t.dtype).removeprefix("torch."), ("batch", "seq", *t.shape[2:]))

    return Program(
        ep,
        tuple(spec(f"in{i}", t) for i, t in enumerate(examples)),
        tuple(spec(f"out{i}", results[i]) for i in range(outputs)),
        {"batch": (1, 64), "seq": (1, 64)},
    )


def session(path: Path, also: list[str] | None = None) -> ort.InferenceSession:
    """A session on `path`, with inner values offered as outputs too."""
    model = onnx.load(path)
    for name in also or []:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, *inputs: torch.Tensor) -> list[torch.Tensor]:
    names = [i.name for i in session.get_inputs()]
    return [torch.from_numpy(y) for y in session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})]


def rows(features: int, seed: int = 0) -> torch.Tensor:
    """(3, 5, K): normal rows of many sizes, a row of zeros, tiny, huge, one-hot, and values on halves of a code."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, features, generator=g) * torch.logspace(-6, 6, 15).reshape(3, 5, 1)
    x[0, 1] = 0.0
    x[0, 2] = 1e-38
    x[1, 1] = 0.0
    x[1, 1, features // 2] = -3e38
    x[2, 2] = torch.arange(features) % 127 + 0.5  # scale 1: every value lies on a half
    x[2, 2, 0] = 127.0
    return x


@pytest.mark.parametrize("features, smoothed", [(16, False), (33, True), (128, False), (384, True)])
def test_dynamic_codes_and_scales_equal_to_the_bit(tmp_path: Path, features: int, smoothed: bool) -> None:
    x = rows(features)
    smooth = torch.rand(features, generator=torch.Generator().manual_seed(1)) + 0.5 if smoothed else None
    program = program_of(Quantizer(smooth, None, 0, 0), x, outputs=2)
    export_onnx(program, tmp_path / "q.onnx")
    codes, scale = run(session(tmp_path / "q.onnx"), x)
    want_codes, want_scale = quantize_rows_reference(x, smooth, None, 0, 0)
    assert codes.dtype == torch.int8 and torch.equal(codes, want_codes)
    assert torch.equal(scale, want_scale)


def test_values_between_two_codes_equal_to_the_bit(tmp_path: Path) -> None:
    """Every half of a code, in rows of many sizes: 127 / absmax rounded twice instead of once would move one code in ten."""
    absmax = torch.rand(30, 40, 1, generator=torch.Generator().manual_seed(11)) + 0.5
    x = torch.cat((absmax, (torch.arange(-126, 127) + 0.5) * (absmax / 127.0)), -1)
    export_onnx(program_of(Quantizer(None, None, 0, 0), x[:2, :7].contiguous(), outputs=2), tmp_path / "q.onnx")
    codes, scale = run(session(tmp_path / "q.onnx"), x)
    want_codes, want_scale = quantize_rows_reference(x, None, None, 0, 0)
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)
    twice = torch.round(x * (absmax.reciprocal() * 127.0)).to(torch.int8)
    assert not torch.equal(twice, want_codes), "the sample must be able to show the fault"


@pytest.mark.parametrize("block, points", [(16, 16), (32, 2), (128, 128), (128, 8)])
def test_exact_rotation_gives_the_same_bits(tmp_path: Path, block: int, points: int) -> None:
    x = rows(384)
    smooth = torch.rand(384, generator=torch.Generator().manual_seed(1)) + 0.5
    export_onnx(program_of(Quantizer(smooth, None, block, points), x, outputs=2), tmp_path / "q.onnx", rotation="exact")
    codes, scale = run(session(tmp_path / "q.onnx"), x)
    want_codes, want_scale = quantize_rows_reference(x, smooth, None, block, points)
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)


@pytest.mark.parametrize("block, points", [(16, 16), (128, 128), (128, 8)])
def test_product_rotation_moves_only_codes_on_the_edge(tmp_path: Path, block: int, points: int) -> None:
    x = torch.randn(16, 16, 384, generator=torch.Generator().manual_seed(3))
    export_onnx(program_of(Quantizer(None, None, block, points), x, outputs=2), tmp_path / "q.onnx")
    codes, _ = run(session(tmp_path / "q.onnx"), x)
    want, scale = quantize_rows_reference(x, None, None, block, points)
    t = rotate_reference(x, block, points)
    value = t.double() * (127.0 / (scale.double() * 127.0)).unsqueeze(-1)
    edge = (value - value.floor() - 0.5).abs()
    moved = codes != want
    assert (codes.int() - want.int()).abs().max() <= 1
    # The bound of rotation_slack, derived there; without it one code in hundreds would be enough to hide a wrong matrix.
    assert not moved.any() or edge[moved].max() <= rotation_slack(block, points)
    assert moved.float().mean() <= 2 * rotation_slack(block, points)


def test_rotate_alone(tmp_path: Path) -> None:
    class Rotated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ROTATE(x, 128, 128)

    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    export_onnx(program_of(Rotated(), x, outputs=1), tmp_path / "r.onnx", rotation="exact")
    (y,) = run(session(tmp_path / "r.onnx"), x)
    assert torch.equal(y, rotate_reference(x, 128, 128))


def test_static_scale_clamps_both_ways(tmp_path: Path) -> None:
    x, static = rows(33), torch.tensor([0.0371])
    export_onnx(program_of(Quantizer(None, static, 0, 0), x, outputs=2), tmp_path / "q.onnx")
    codes, scale = run(session(tmp_path / "q.onnx"), x)
    want_codes, want_scale = quantize_rows_reference(x, None, static, 0, 0)
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)
    assert codes.min() == -127 and codes.max() == 127, "the sample must reach both clamps"


def test_a_row_with_nan_spoils_no_other(tmp_path: Path) -> None:
    x = rows(33)
    bad = x.clone()
    bad[1, 2, 5], bad[2, 0, 7] = float("nan"), float("inf")
    export_onnx(program_of(Quantizer(None, None, 0, 0), x, outputs=2), tmp_path / "q.onnx")
    codes, _ = run(session(tmp_path / "q.onnx"), bad)
    want, _ = quantize_rows_reference(x, None, None, 0, 0)
    good = torch.ones(3, 5, dtype=torch.bool)
    good[1, 2] = good[2, 0] = False
    assert torch.equal(codes[good], want[good])


def extreme(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (m, k), weights (n, k), all +-127: such that pairwise int16 sums would saturate, in both directions, if a kernel made any."""
    g = torch.Generator().manual_seed(k)
    sign = torch.tensor([-127, 127], dtype=torch.int8)
    codes, weight = (sign[torch.randint(0, 2, (count, k), generator=g)] for count in (m, n))
    codes[0], codes[1], weight[0], weight[1:2] = 127, -127, 127, -127
    return codes, weight


@pytest.mark.parametrize("n, k", [(1, 16), (31, 33), (384, 128), (64, 1536)])
def test_sums_are_exact_with_extreme_codes(tmp_path: Path, n: int, k: int) -> None:
    codes, weight = extreme(14, n, k)
    # The scales are powers of two: multiplying by them is exact, so y shows the sums themselves.
    scale = torch.tensor([2.0**-i for i in range(14)])
    x = codes.reshape(2, 7, k), scale.reshape(2, 7)
    export_onnx(program_of(Linear(weight, torch.ones(n), None), *x, outputs=1), tmp_path / "l.onnx")
    nodes = onnx.load(tmp_path / "l.onnx").graph.node
    (acc_name,) = [name for node in nodes if node.op_type == "MatMulInteger" for name in node.output]
    y, acc = run(session(tmp_path / "l.onnx", [acc_name]), *x)
    want = int8_matmul(codes, weight).reshape(2, 7, n)
    assert acc.dtype == torch.int32 and torch.equal(acc, want)
    assert torch.equal(y, want.float() * x[1].unsqueeze(-1))


@pytest.mark.parametrize("static, biased", [(False, True), (True, False)])
def test_linears_on_one_quantizer(tmp_path: Path, static: bool, biased: bool) -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(3, 5, 48, generator=g) * torch.logspace(-2, 2, 15).reshape(3, 5, 1)
    linears = [
        Linear(
            torch.randint(-127, 128, (20, 48), dtype=torch.int8, generator=g),
            torch.rand(20, generator=g) + 0.1,
            torch.randn(20, generator=g) if biased else None,
        )
        for _ in range(3)
    ]
    quantizer = Quantizer(None, torch.tensor([0.01]) if static else None, 0, 0)
    done = export_onnx(program_of(Both(quantizer, linears), x, outputs=3), tmp_path / "b.onnx")
    assert (done.linears, done.quantizers, done.ops["QuantizeLinear"]) == (3, 1, 1)
    got = run(session(tmp_path / "b.onnx"), x)
    codes, scale = quantize_rows_reference(x, None, quantizer.static, 0, 0)
    for y, linear in zip(got, linears, strict=True):
        want = w8a8_linear_reference(codes, scale, linear.weight, linear.weight_scale, linear.bias)
        product = want if linear.bias is None else want - linear.bias
        # Three roundings of the product there and here (factor, product; y * w, * s) and one of each sum.
        assert ((y - want).abs() <= U * (4 * product.abs() + 2 * want.abs())).all()


def test_weights_read_twice_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randint(-127, 128, (256, 256), dtype=torch.int8)
    first, second = (Linear(w, torch.ones(256), None) for w in (weight, weight.clone()))
    x = torch.randn(2, 3, 256)
    export_onnx(program_of(Both(Quantizer(None, None, 0, 0), [first, second]), x, outputs=2), tmp_path / "w.onnx")
    kinds = [(t.data_type, tuple(t.dims)) for t in onnx.load(tmp_path / "w.onnx").graph.initializer]
    assert kinds.count((onnx.TensorProto.UINT8, (256, 256))) == 1
    assert (onnx.TensorProto.INT8, (256, 256)) not in kinds


def test_a_computed_weight_is_refused(tmp_path: Path) -> None:
    class Computed(Linear):
        def forward(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return LINEAR(codes, scale, self.weight * codes[0, 0], self.weight_scale, None)

    module = Computed(torch.zeros(4, 16, dtype=torch.int8), torch.ones(4), None)
    x = torch.zeros(2, 7, 16, dtype=torch.int8), torch.ones(2, 7)
    program = program_of(module, *x, outputs=1)
    with pytest.raises(LoweringError, match=r"weight .* is computed"):
        export_onnx(program, tmp_path / "c.onnx")
    assert list(tmp_path.iterdir()) == []


def test_every_byte_of_the_weight_counts(tmp_path: Path) -> None:
    """The planted fault: one flipped bit of one stored weight shows in the output."""
    codes, weight = extreme(4, 8, 32)
    x = codes.reshape(2, 2, 32), torch.ones(2, 2)
    export_onnx(program_of(Linear(weight, torch.ones(8), None), *x, outputs=1), tmp_path / "l.onnx")
    model = onnx.load(tmp_path / "l.onnx")
    (stored,) = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.UINT8 and list(t.dims) == [32, 8]]
    array = onnx.numpy_helper.to_array(stored).copy()
    array[7, 3] ^= 1
    stored.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array), stored.name))
    onnx.save(model, tmp_path / "bad.onnx")
    (good,), (bad,) = run(session(tmp_path / "l.onnx"), *x), run(session(tmp_path / "bad.onnx"), *x)
    assert (good != bad).any(-1).any() and torch.equal(good[..., :3], bad[..., :3])


@pytest.mark.parametrize("block, points", [(0, 0), (32, 32)])
def test_a_row_with_an_infinity_gives_nothing_finite_and_spoils_no_other(block: int, points: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, scale = torch.randint(-127, 128, (8, 64), dtype=torch.int8), torch.rand(8)
    module = Both(Quantizer(None, None, block, points), [Linear(weight, scale, torch.randn(8))])
    x = torch.randn(2, 3, 64)
    x[1, 2, 5] = torch.inf
    program = program_of(module, x, outputs=1)
    export_onnx(program, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"in0": x.numpy()})
    for result in (program.run({"in0": x})["out0"].numpy(), got):
        assert not np.isfinite(result[1, 2]).any()
        assert np.isfinite(np.delete(result.reshape(6, 8), 5, axis=0)).all()
