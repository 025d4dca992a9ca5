"""The ONNX file itself: names, dynamic axes, external data, errors, what onnxruntime makes of it, and whole models against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import khtst_compile as kc
from khtst_compile.capture.factory import capture_module
from khtst_compile.errors import LoweringError, ResourceError, UsageError
from khtst_compile.lower import onnx as lower_onnx
from khtst_compile.lower.onnx import export_onnx
from khtst_compile.ops.rotate import rotate_reference
from khtst_compile.program import Program, Rewriter, TensorSpec, call_nodes, site_of

LINEAR = torch.ops.aten.linear.default


class Mlp(nn.Module):
    """ids (batch, seq) int64, mask (batch, seq) int64 -> last (batch, seq, 32), pooled (batch, 32), float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 32)
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        x = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        keep = mask.unsqueeze(-1).to(x.dtype)
        return x, (x * keep).sum(1) / keep.sum(1)


def mlp_program() -> Program:
    batch, seq = torch.export.Dim("b", max=512), torch.export.Dim("s", max=512)
    example = torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)
    ep = torch.export.export(Mlp().eval(), example, dynamic_shapes=[{0: batch, 1: seq}] * 2, strict=False)
    inputs = tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask"))
    outputs = TensorSpec("last", "float32", ("batch", "seq", 32)), TensorSpec("pooled", "float32", ("batch", 32))
    return Program(ep, inputs, outputs, {"batch": (1, 512), "seq": (1, 512)})


def quantized(program: Program, block: int = 0, points: int = 0) -> Program:
    """Every linear as quantize_rows + w8a8_linear; linears that read one value share its codes."""
    r = Rewriter(program)
    shared: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = {}
    for node in list(call_nodes(r.graph, LINEAR)):
        x, weight_node, bias = (*node.args, None)[:3]
        weight = r.value(weight_node)
        assert weight is not None
        weight = rotate_reference(weight, block, points) / max(points, 1)
        scale = weight.abs().amax(1) / 127
        codes = torch.round(weight / scale[:, None]).to(torch.int8)
        if x.name not in shared:
            q = r.call(torch.ops.khtst.quantize_rows.default, x, None, None, block, points, before=node)
            shared[x.name] = r.getitem(q, 0, node), r.getitem(q, 1, node)
        args = r.add_tensor(site_of(node) + ".wq", codes), r.add_tensor(site_of(node) + ".ws", scale), bias
        r.replace(node, r.call(torch.ops.khtst.w8a8_linear.default, *shared[x.name], *args, before=node))
    return r.finish()


@pytest.fixture(scope="module")
def mlp() -> Program:
    return quantized(mlp_program())


def feeds(batch: int, seq: int, vocabulary: int = 50) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, seq), generator=torch.Generator().manual_seed(batch * 1000 + seq))
    return {"input_ids": ids, "attention_mask": torch.ones(batch, seq, dtype=torch.int64)}


def options(optimized: Path | None = None) -> ort.SessionOptions:
    o = ort.SessionOptions()
    o.intra_op_num_threads, o.log_severity_level = 1, 3
    if optimized is not None:
        o.optimized_model_filepath = str(optimized)
    return o


def session(path: Path, optimized: Path | None = None) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), options(optimized), providers=["CPUExecutionProvider"])


def run(s: ort.InferenceSession, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = s.run(None, {k: v.numpy() for k, v in inputs.items()})
    return {o.name: torch.from_numpy(v) for o, v in zip(s.get_outputs(), values, strict=True)}


def test_names_axes_and_shapes_are_those_of_the_program(mlp: Program, tmp_path: Path) -> None:
    done = export_onnx(mlp, tmp_path / "m.onnx")
    s = session(tmp_path / "m.onnx")
    assert [(i.name, i.shape) for i in s.get_inputs()] == [
        ("input_ids", ["batch", "seq"]),
        ("attention_mask", ["batch", "seq"]),
    ]
    assert [(o.name, o.shape) for o in s.get_outputs()] == [("last", ["batch", "seq", 32]), ("pooled", ["batch", 32])]
    for batch, seq in ((1, 1), (2, 7), (5, 33)):
        want, got = mlp.run(feeds(batch, seq)), run(s, feeds(batch, seq))
        for name in want:
            # One layer deep no code lies near enough to a half to move: float32 rounding of sums of 32 to 64 terms of size 1 remains.
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=2e-6)
    assert (done.linears, done.quantizers, done.data) == (2, 2, None)
    assert done.bytes == (tmp_path / "m.onnx").stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_file_tells_nothing_of_the_machine_and_uses_only_standard_operators(mlp: Program, tmp_path: Path) -> None:
    export_onnx(mlp, tmp_path / "m.onnx")
    content = (tmp_path / "m.onnx").read_bytes()
    for trace in (b".py", b"stack_trace", b"site-packages", str(Path.cwd()).encode()):
        assert trace not in content, trace
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""} and [o.domain for o in model.opset_import] == [""]
    assert model.producer_name == "khtst-compile"


def test_onnxruntime_runs_every_quantized_linear_in_int8(mlp: Program, tmp_path: Path) -> None:
    export_onnx(mlp, tmp_path / "m.onnx")
    session(tmp_path / "m.onnx", tmp_path / "optimized.onnx")
    assert int8_and_float_products(tmp_path / "optimized.onnx") == (2, 0)


def int8_and_float_products(path: Path) -> tuple[int, int]:
    """In an optimized graph: int8 products; float products with a stored matrix (attention's two operands are both computed)."""
    graph = onnx.load(path).graph
    stored = {t.name for t in graph.initializer}
    # MatMulIntegerToFloat would be int8 too, but takes one row's scale for all rows (onnxruntime 1.32): it must not appear.
    int8 = [n for n in graph.node if n.op_type == "MatMulInteger" and n.input[1] in stored]
    floats = [n for n in graph.node if n.op_type in ("MatMul", "Gemm", "FusedMatMul") and n.input[1] in stored]
    return len(int8), len(floats)


@pytest.mark.parametrize("opset", [18, 23])
def test_other_opsets(mlp: Program, tmp_path: Path, opset: int) -> None:
    export_onnx(mlp, tmp_path / "m.onnx", opset=opset)
    assert [o.version for o in onnx.load(tmp_path / "m.onnx").opset_import] == [opset]
    want, got = mlp.run(feeds(2, 7)), run(session(tmp_path / "m.onnx"), feeds(2, 7))
    torch.testing.assert_close(got["pooled"], want["pooled"], rtol=0, atol=2e-6)


def test_external_data_and_replacing_a_model(mlp: Program, tmp_path: Path) -> None:
    done = export_onnx(mlp, tmp_path / "m.onnx", external_above=1000)
    assert done.data == tmp_path / "m.onnx.data" and sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert done.bytes == sum(p.stat().st_size for p in tmp_path.iterdir())
    want, got = mlp.run(feeds(3, 5)), run(session(tmp_path / "m.onnx"), feeds(3, 5))
    torch.testing.assert_close(got["last"], want["last"], rtol=0, atol=2e-6)
    export_onnx(mlp, tmp_path / "m.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"], "the old weights must not stay beside the new model"


@pytest.mark.parametrize(
    "failure, shown", [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), ResourceError)]
)
def test_interrupted_export_leaves_no_file_and_the_old_one_whole(
    mlp: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, shown: type[BaseException]
) -> None:
    def fail(path: Path) -> None:
        assert path.exists()
        raise failure

    (tmp_path / "m.onnx").write_bytes(b"old")
    monkeypatch.setattr(lower_onnx, "_check", fail)
    with pytest.raises(shown):
        export_onnx(mlp, tmp_path / "m.onnx", external_above=1000)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"] and (tmp_path / "m.onnx").read_bytes() == b"old"


def test_wrong_options(mlp: Program, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="opset is 17"):
        export_onnx(mlp, tmp_path / "m.onnx", opset=17)
    with pytest.raises(UsageError, match="rotation is 'fast'"):
        export_onnx(mlp, tmp_path / "m.onnx", rotation="fast")
    with pytest.raises(UsageError, match="does not exist"):
        export_onnx(mlp, tmp_path / "no" / "m.onnx")
    with pytest.raises(UsageError, match="is a folder"):
        export_onnx(mlp, tmp_path)


def one_input(module: nn.Module, x: torch.Tensor, shape: tuple[int | str, ...], **dynamic: object) -> Program:
    ep = torch.export.export(module.eval(), (x,), strict=False, **dynamic)  # type: ignore[arg-type]
    return Program(ep, (TensorSpec("x", "float32", shape),), (TensorSpec("y", "float32", shape),))


def test_unknown_operator_is_named_with_its_line(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.qr(x)[0] + 1

    program = one_input(Odd(), torch.eye(3), (3, 3))
    with pytest.raises(LoweringError, match=r"aten\.linalg_qr\.default \(test_onnx_export\.py:\d+: return torch\.linalg\.qr"):
        export_onnx(program, tmp_path / "odd.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_axis_capture_fixed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="axis 'batch' of input 'x' was fixed to 4"):
        export_onnx(one_input(nn.ReLU(), torch.ones(4, 3), ("batch", 3)), tmp_path / "fixed.onnx")


def test_an_output_that_is_an_input_keeps_both_names(tmp_path: Path) -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    program = one_input(Same(), torch.ones(4, 3), ("batch", 3), dynamic_shapes=[{0: torch.export.Dim("n")}])
    export_onnx(program, tmp_path / "same.onnx")
    s = session(tmp_path / "same.onnx")
    assert ([i.name for i in s.get_inputs()], [o.name for o in s.get_outputs()]) == (["x"], ["y"])
    assert torch.equal(run(s, {"x": torch.full((2, 3), 7.0)})["y"], torch.full((2, 3), 7.0))


class Repeated(nn.Module):
    """One linear called twice on one input, the results told apart by what follows; its own output is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.linear(x), self.linear(x)
        return self.head(first + 2 * second), second


def test_equal_products_that_the_exporter_merges_are_verified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = capture_module(Repeated().eval(), (torch.randn(4, 32),))
    kc.quantize(program, tmp_path / "q", random=True, recipe="w8a8", limit=8)
    kc.export(tmp_path / "q", tmp_path / "o")
    report = kc.verify(tmp_path / "o", reference=tmp_path / "q")
    assert report.ok, report.table(5)
    assert [r.site for r in report.rows if r.what == "int32 sums"] == ["linear", "linear", "head"]


class Queue(nn.Module):
    """x (batch, 3) float32 -> the place of each element in its column, largest first, equal ones in order: (batch, 3) int64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argsort(dim=0, descending=True, stable=True).argsort(dim=0)


def test_a_stable_sort_keeps_equal_elements_in_order(tmp_path: Path) -> None:
    program = capture_module(Queue(), (torch.zeros(4, 3),))
    export_onnx(program, tmp_path / "queue.onnx")
    for rows in (1, 2, 9, 1000):  # onnxruntime chooses among algorithms by the number of rows
        x = torch.randint(0, 4, (rows, 3), generator=torch.Generator().manual_seed(rows)).float()
        got = run(session(tmp_path / "queue.onnx"), {"x": x})["output"]
        assert torch.equal(got, Queue()(x))


class Masked(nn.Module):
    """(batch, 2, 4, 8) float32 attending to itself twice under one mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attend = nn.functional.scaled_dot_product_attention
        return attend(attend(x, x, x, mask), x, x, mask)


@pytest.mark.parametrize("kind", ["bool", "float", "one row for all"])
def test_attention_rows_that_see_nothing_are_zero_as_in_torch(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(3, 2, 4, 8), torch.rand(3, 1, 1 if kind == "one row for all" else 4, 4) > 0.3
    mask[1, 0, 0] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if kind == "float" else mask
    program = capture_module(Masked().eval(), (x, given))
    want = Masked()(x, given).numpy()
    assert (want[1, :, 0] == 0).all(), "what torch defines"
    export_onnx(program, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": x.numpy(), "mask": given.numpy()})
    assert (got[1, :, 0] == 0).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)  # softmax and two products of 4 and 8 terms, in another order
    x[0, 0, 1, 2] = torch.nan
    (got,) = session.run(None, {"x": x.numpy(), "mask": given.numpy()})
    assert np.isnan(got[0, 0, 1]).all(), "a NaN is not hidden with them"


class Guarded(nn.Module):
    """Constants that are nearly 0 or 1, and matter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(x) + 1e-10) * 1.000005 - (x - 3e-9) / 1.000003


def test_constants_near_zero_and_one_stay(tmp_path: Path) -> None:
    x = torch.tensor([[-1.0, 0.0, 1e-9, 2.0], [3.0, -2.0, 1e-8, 0.5]])
    program = one_input(Guarded(), x, (2, 4))
    export_onnx(program, tmp_path / "m.onnx")
    (got,) = run(session(tmp_path / "m.onnx"), {"x": x}).values()
    want = Guarded()(x)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, rtol=4e-7, atol=0.0)  # a few roundings of float32, and log's last place
    assert not torch.allclose(got, torch.log(torch.relu(x) + 1e-10) - x, rtol=4e-7, atol=0.0)
