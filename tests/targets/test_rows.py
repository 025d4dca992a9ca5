"""Row kernels (quantise, norm, softmax): the bits of torch and numpy at awkward sizes, floats against float64, the assembly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import tvm

from khtst_compile.errors import LoweringError
from khtst_compile.ops.quantize_rows import quantize_rows_reference
from khtst_compile.targets.isa import AVX2, AVX512, AVX512VNNI, AVXVNNI, X86_ISAS, Isa
from khtst_compile.targets.kernels import norm, quantize, softmax
from khtst_compile.targets.kernels.act import activation
from khtst_compile.targets.kernels.norm import Lookup, NormQuantize
from khtst_compile.targets.kernels.quantize import Quantizer, QuantizeRows, Rotation
from khtst_compile.targets.kernels.rows import PARALLEL_ELEMENTS, Lead, round_up
from khtst_compile.targets.kernels.softmax import Softmax

RUNNABLE = (AVX2, *(isa.emulate() for isa in (AVXVNNI, AVX512, AVX512VNNI)))
WIDTHS = (1, 7, 8, 9, 16, 31, 33, 64, 128, 384, 576, 1536)
LEADS = ((0, 3), (1, 1), (1, 7), (3, 11))
ROTATIONS = (None, *(Rotation(b, p) for b in (16, 32, 64, 128) for p in {b, max(2, b // 16)} if p == b or b > 16))
PAINT = 85
"""What outputs hold before a kernel runs; padding may change, everything else must."""


def build(module: Any, spec: Any) -> Any:
    """The compiled kernel of `spec`."""
    lib = tvm.tirx.build(tvm.IRModule({spec.name: module.prim_func(spec)}), target=tvm.target.Target(spec.isa.tvm_target()))
    return lib[spec.name]


def call(kernel: Any, inputs: Sequence[np.ndarray], outputs: Sequence[tuple[tuple[int, ...], str]]) -> list[np.ndarray]:
    """Run a kernel on arrays; outputs are (shape, dtype)."""
    results = [tvm.runtime.tensor(np.full(shape, PAINT, dtype)) for shape, dtype in outputs]
    kernel(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in inputs), *results)
    return [r.numpy() for r in results]


def awkward(lead: tuple[int, ...], width: int, seed: int = 0) -> np.ndarray:
    """Rows of every kind: normal, zero, zero channels, denormal, huge, half-way values, NaN, infinite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*lead, width)).astype(np.float32) * np.exp(rng.normal(size=(*lead, 1))).astype(np.float32)
    x[..., width // 2] = 0
    rows = x.reshape(-1, width)
    kinds = [
        lambda r: 0.0 * r,
        lambda r: r * np.float32(1e-40),
        lambda r: r * np.float32(1e37),
        lambda r: np.where(np.arange(width) == 0, np.float32(127), np.round(r * 9) + np.float32(0.5)),
        lambda r: np.where(np.arange(width) == width - 1, np.float32(np.nan), r),
        lambda r: np.where(np.arange(width) == width // 3, np.float32(-np.inf), r),
        lambda r: np.full_like(r, np.nan),
        lambda r: np.full_like(r, -0.0),
    ]
    for i, kind in enumerate(kinds):
        if 2 * i + 1 < len(rows):
            rows[2 * i + 1] = kind(rows[2 * i + 1])
    return x


def check_codes(spec: QuantizeRows, kernel: Any, x: np.ndarray, smooth: np.ndarray, step: np.ndarray) -> None:
    """Codes and scales of the kernel equal the torch operator's, bit for bit; step: (1,) float32, the static scale."""
    quantizer, lead, width = spec.quantizer, x.shape[:-1], spec.width
    inputs = [x]
    if quantizer.smooth:
        inputs.append(smooth)
    if quantizer.static:
        inputs += [np.float32(1) / step, step]
    codes, scale = call(kernel, inputs, [((*lead, round_up(width)), spec.isa.codes_dtype), (lead, "float32")])
    rotation = quantizer.rotation
    with np.errstate(all="ignore"):
        v = activation(spec.act).reference(x)
    want_codes, want_scale = quantize_rows_reference(
        torch.from_numpy(v),
        torch.from_numpy(smooth) if quantizer.smooth else None,
        torch.from_numpy(step) if quantizer.static else None,
        rotation.block if rotation else 0,
        rotation.points if rotation else 0,
    )
    np.testing.assert_array_equal(codes[..., :width].astype(np.int32) - spec.isa.codes_offset, want_codes.numpy())
    np.testing.assert_array_equal(scale.view(np.int32), want_scale.numpy().view(np.int32))
    stored, plain_scale = quantize.reference(
        spec.isa, quantizer, v, smooth if quantizer.smooth else None, float(np.float32(1) / step[0]), float(step[0])
    )
    np.testing.assert_array_equal(codes, stored)
    np.testing.assert_array_equal(scale.view(np.int32), plain_scale.view(np.int32))


def smooth_of(width: int) -> np.ndarray:
    factors = np.random.default_rng(1).uniform(0.3, 3, width).astype(np.float32)
    factors[0] = 0
    return factors


@pytest.mark.parametrize(
    ("isa", "width"),
    [(AVX2, n) for n in WIDTHS] + [(RUNNABLE[3], n) for n in WIDTHS[1::3]] + [(i, 33) for i in RUNNABLE[1:3]],
    ids=lambda v: getattr(v, "name", v),
)
def test_codes_are_torchs(isa: Isa, width: int) -> None:
    """Dynamic and static, with and without smoothing, at every width and number of rows."""
    for smooth, static in ((False, False), (True, True)) if width % 2 else ((True, False), (False, True)):
        spec = QuantizeRows(isa, width, quantizer=Quantizer(smooth=smooth, static=static))
        kernel = build(quantize, spec)
        for lead in LEADS:
            check_codes(spec, kernel, awkward(lead, width), smooth_of(width), np.array([0.021], np.float32))


@pytest.mark.parametrize("rotation", ROTATIONS[1:], ids=lambda r: f"{r.block}-{r.points}")
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_rotated_codes_are_torchs(rotation: Rotation, static: bool) -> None:
    for isa, blocks in ((RUNNABLE[0], 3), (RUNNABLE[3], 1)):
        width = rotation.block * blocks
        spec = QuantizeRows(isa, width, quantizer=Quantizer(True, rotation, static))
        kernel = build(quantize, spec)
        for lead in LEADS:
            check_codes(spec, kernel, awkward(lead, width), smooth_of(width), np.array([0.3], np.float32))


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh", "silu", "sigmoid"])
@pytest.mark.parametrize("width", [9, 128])
def test_activation_comes_first(act: str, width: int) -> None:
    """The tail of width 9 is padded with zeros, which sigmoid would turn into 0.5: they must not enter the maximum."""
    spec = QuantizeRows(AVX2, width, act=act, quantizer=Quantizer(smooth=width % 2 == 0))
    kernel = build(quantize, spec)
    x = -np.abs(awkward((3, 11), width))
    check_codes(spec, kernel, x, smooth_of(width), np.array([1], np.float32))


@pytest.mark.parametrize("width", [1, 9, 33, 128])
def test_gate_multiplies_before_anything_else(width: int) -> None:
    """Codes of act(first half) * second half, smoothed and rotated where the width allows."""
    rotation = Rotation(128, 128) if width == 128 else None
    spec = QuantizeRows(AVX2, width, act="silu", quantizer=Quantizer(smooth=True, rotation=rotation), gate=True)
    x = np.random.default_rng(2).standard_normal((3, 11, 2 * width)).astype(np.float32) * 3
    x[0, 1], x[1, 2, width:] = 0, 0
    smooth = smooth_of(width)
    codes, scale = call(build(quantize, spec), [x, smooth], [((3, 11, round_up(width)), "int16"), ((3, 11), "float32")])
    v = activation("silu").reference(x[..., :width]) * x[..., width:]
    want, want_scale = quantize.reference(AVX2, spec.quantizer, v, smooth)
    np.testing.assert_array_equal(codes[..., :width], want[..., :width])
    np.testing.assert_array_equal(scale, want_scale)


def test_dynamic_codes_reach_127_and_not_further() -> None:
    spec = QuantizeRows(AVX2, 16)
    rng = np.random.default_rng(3)
    x = (rng.uniform(1, 2, (1, 20000, 1)) * np.ones(16)).astype(np.float32)
    codes, _ = call(build(quantize, spec), [x], [(x.shape, "int16"), (x.shape[:-1], "float32")])
    assert codes.min() == codes.max() == 127


@pytest.mark.parametrize("lead", [Lead(1), Lead(3), Lead(2, (None, 5)), Lead(1, (4,))], ids=str)
def test_leading_dimensions(lead: Lead) -> None:
    spec = QuantizeRows(AVX2, 33, lead=lead)
    shape = tuple(n or 4 for n in lead.shape or (None,) * lead.ndim)
    check_codes(spec, build(quantize, spec), awkward(shape, 33), smooth_of(33), np.array([1], np.float32))


def test_rows_in_parallel_are_the_rows_in_series() -> None:
    """More elements than the parallel threshold, no multiple of a chunk."""
    x = awkward((1, PARALLEL_ELEMENTS // 64 + 29), 64)
    for parallel in (True, False):
        spec = QuantizeRows(AVX2, 64, parallel=parallel, quantizer=Quantizer(rotation=Rotation(64, 64)))
        check_codes(spec, build(quantize, spec), x, smooth_of(64), np.array([1], np.float32))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rotation(48, 48),
        lambda: Rotation(128, 16),
        lambda: Rotation(16, 1),
        lambda: QuantizeRows(AVX2, 0),
        lambda: QuantizeRows(AVX2, 96, quantizer=Quantizer(rotation=Rotation(64, 64))),
        lambda: QuantizeRows(AVX2, 16, act="swish"),
        lambda: Lead(4),
        lambda: Lead(2, (1, 2, 3)),
        lambda: NormQuantize(AVX2, 0, 1e-5),
        lambda: NormQuantize(AVX2, 8, 1e-5, kind="batch"),
        lambda: NormQuantize(AVX2, 8, 1e-5, y_out=False),
        lambda: NormQuantize(AVX2, 24, 1e-5, quantizers=(Quantizer(rotation=Rotation(16, 16)),)),
        lambda: NormQuantize(AVX2, 8, 1e-5, residual=True, lookups=(Lookup(4),)),
        lambda: Softmax(AVX2, 0),
    ],
)
def test_refusals(make: Any) -> None:
    with pytest.raises(LoweringError):
        make()


NORMS = {
    "layer": {},
    "layer-sum": {"residual": True, "sum_out": True},
    "layer-bare": {"gamma": False, "beta": False},
    "layer-beta": {"gamma": False},
    "sum-only": {"residual": True, "sum_out": True, "y_out": False},
    "copy": {"sum_out": True, "kind": "rms", "beta": False},
    "rms": {"kind": "rms", "beta": False, "residual": True},
    "two": {"y_out": False, "residual": True, "quantizers": (Quantizer(True), Quantizer(static=True))},
    "all": {"residual": True, "sum_out": True, "quantizers": (Quantizer(), Quantizer(True))},
}


def run_norm(spec: NormQuantize, lead: tuple[int, ...], seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the kernel and the numpy reference give, in the order of the outputs."""
    rng, width = np.random.default_rng(seed), spec.width
    x, residual = ((rng.standard_normal((*lead, width)) * 3 + 1).astype(np.float32) for _ in range(2))
    gamma, beta, smooth = (rng.uniform(0.3, 2, width).astype(np.float32) for _ in range(3))
    inputs, outputs = [x], []
    inputs += [residual] * spec.residual + [gamma] * spec.gamma + [beta] * spec.beta
    inverse, step = np.array([40], np.float32), np.array([0.025], np.float32)
    h, y = norm.reference(
        spec, x, residual if spec.residual else None, gamma if spec.gamma else None, beta if spec.beta else None
    )
    want = [h] * spec.sum_out + [y] * spec.y_out
    outputs = [((*lead, width), "float32")] * len(want)
    for q in spec.quantizers:
        inputs += [smooth] * q.smooth + [inverse, step] * q.static
        outputs += [((*lead, round_up(width)), spec.isa.codes_dtype), (lead, "float32")]
        want += quantize.reference(spec.isa, q, y, smooth if q.smooth else None, 40.0, 0.025)
    return call(build(norm, spec), inputs, outputs), want


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("width", [1, 7, 100, 384])
def test_norm_bits(kind: str, width: int) -> None:
    """To the bit what numpy computes in the same order, on two instruction sets: nothing is contracted or reordered."""
    lead = (3, 7) if width < 384 else (1, 33)
    for isa in (RUNNABLE[0], RUNNABLE[3]) if width == 100 else (AVX2,):
        got, want = run_norm(NormQuantize(isa, width, 1e-5, **NORMS[kind]), lead)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


def test_norm_of_rotated_codes_and_no_rows() -> None:
    quantizers = (Quantizer(True, Rotation(128, 8)), Quantizer(True, Rotation(64, 64), static=True))
    for lead in ((2, 5), (0, 5)):
        got, want = run_norm(NormQuantize(AVX2, 384, 1e-12, y_out=False, quantizers=quantizers), lead)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("width", [1, 33, 384])
@pytest.mark.parametrize("form", ["sum", "norm", "codes"])
def test_lookups_are_added_in_order_and_clipped(width: int, form: str) -> None:
    """Three tables, one of them with ids of one text, one with int32 ids; ids outside read the first or the last row."""
    rng = np.random.default_rng(width)
    tables = [(rng.standard_normal((n, width)) * 3).astype(np.float32) for n in (50, 2, 40)]
    lookups = (Lookup(50), Lookup(2, dtype="int32"), Lookup(40, shared=True))
    quantizers = (Quantizer(False, Rotation(128, 128) if width == 384 else None),) if form == "codes" else ()
    norm_only = {"gamma": form != "sum", "beta": form != "sum", "y_out": form != "sum", "sum_out": form == "sum"}
    spec = NormQuantize(AVX2, width, 1e-5, quantizers=quantizers, lookups=lookups, **norm_only)
    kernel = build(norm, spec)
    gamma, beta = (rng.uniform(0.3, 2, width).astype(np.float32) for _ in range(2))
    for lead in ((1, 1), (3, 7), (0, 5), (2, 33)):
        ids = [rng.integers(-3, 60, lead), rng.integers(0, 2, lead, np.int32), rng.integers(0, 40, (1, lead[1]))]
        if lead == (3, 7):
            ids[0][0, 0] = 1 << 40
        rows = [t[np.clip(i, 0, len(t) - 1)] for t, i in zip(tables, ids, strict=True)]
        h = (rows[0] + rows[1]) + rows[2]
        want = [h] if form == "sum" else [norm.reference(spec, h, None, gamma, beta)[1]]
        outputs = [((*lead, width), "float32")]
        if quantizers:
            want += quantize.reference(AVX2, quantizers[0], want[0])
            outputs += [((*lead, round_up(width)), "int16"), (lead, "float32")]
        got = call(kernel, [*ids, *tables, *([] if form == "sum" else [gamma, beta])], outputs)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [7, 384, 4096])
def test_norm_against_float64(kind: str, width: int) -> None:
    """Error of y in units of max(|y|, 1).

    Mean, variance and rstd are each good to a few ulp: sums of n terms in 4 x 16 lanes err by about log2 of the tree plus
    n / 64 additions in the worst case, in practice by sqrt(n / 64) halves of an ulp; x - mean loses nothing more since the data's
    mean is of the size of its spread. 8 ulp = 8 * 2**-23 leaves a factor of about 3 over what is measured.
    """
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((1, 40, width)) * 3 + 1).astype(np.float32)
    gamma, beta = (rng.uniform(0.3, 2, width).astype(np.float32) for _ in range(2))
    spec = NormQuantize(AVX2, width, 1e-5, kind=kind, beta=kind == "layer")
    inputs = [x, gamma, beta] if kind == "layer" else [x, gamma]
    (y,) = call(build(norm, spec), inputs, [(x.shape, "float32")])
    wide = torch.from_numpy(x).double()
    scale, shift = torch.from_numpy(gamma).double(), torch.from_numpy(beta).double()
    if kind == "layer":
        want = torch.nn.functional.layer_norm(wide, (width,), scale, shift, 1e-5).numpy()
    else:
        want = (scale * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).numpy()
    assert (np.abs(y - want) / np.maximum(np.abs(want), 1)).max() <= 8 * 2.0**-23


@pytest.mark.parametrize("width", [None, 1, 33, 128])
def test_softmax(width: int | None) -> None:
    """The bits of the numpy form; against float64 within 5e-7 of the largest probability of a row.

    exp errs by 1.7e-7 + |x| 7.4e-8 relative, and |x| e^x <= 0.37: 2e-7 for a term, the same again for their sum, one
    division and one product.
    """
    for isa in (RUNNABLE[0], RUNNABLE[3]):
        kernel = build(softmax, Softmax(isa, width))
        for lead in LEADS:
            for n in (1, 5, 16, 31, 200) if width is None else (width,):
                x = (np.random.default_rng(n).standard_normal((*lead, n)) * 8).astype(np.float32)
                x[..., 1:2] = -np.inf
                if n == 1:
                    x[...] = 3
                (y,) = call(kernel, [x], [(x.shape, "float32")])
                np.testing.assert_array_equal(y, softmax.reference(x))
                want = torch.softmax(torch.from_numpy(x).double(), -1).numpy()
                assert np.abs(y - want).max(initial=0) <= 5e-7


def test_exponential_underflows_to_zero_and_keeps_nan() -> None:
    x = np.array([0, -0.0, -1e-8, -87.3, -87.9, -88.1, -1e30, -np.inf], np.float32)
    got = softmax.exp_nonpositive_reference(x)
    assert (got[:2] == 1).all() and (got[5:] == 0).all() and (got >= 0).all()
    dense = np.linspace(-87, 0, 1 << 16).astype(np.float32)
    error = softmax.exp_nonpositive_reference(dense) / np.exp(dense.astype(np.float64)) - 1
    # The polynomial and its roundings; then the rounding of x * log2(e), 2**-24, and of log2(e) itself, 1.3e-8.
    assert (np.abs(error) <= 1.7e-7 + np.abs(dense) * 7.4e-8).all()
    assert np.isnan(softmax.exp_nonpositive_reference(np.array([np.nan], np.float32))).all()


def test_softmax_of_nan_and_of_nothing_is_nan() -> None:
    x = np.zeros((1, 3, 20), np.float32)
    x[0, 0] = -np.inf
    x[0, 1, 7] = np.nan
    (y,) = call(build(softmax, Softmax(AVX2, 20)), [x], [(x.shape, "float32")])
    assert np.isnan(y[0, :2]).all()
    assert (y[0, 2] == np.float32(0.05)).all()


def assembly(module: Any, spec: Any) -> str:
    """Assembly of the real build, which this machine may not be able to run."""
    lib = tvm.tirx.build(tvm.IRModule({spec.name: module.prim_func(spec)}), target=tvm.target.Target(spec.isa.tvm_target()))
    return str(lib.inspect_source("asm"))


def innermost_loops(text: str) -> list[list[str]]:
    """The instructions of every loop that holds no other."""
    lines = [line for line in text.splitlines() if re.match(r"^(\.LBB|\t[a-z])", line)]
    at: dict[str, int] = {}
    loops = []
    for i, line in enumerate(lines):
        if label := re.match(r"^(\.LBB\w+):", line):
            at[label[1]] = i
        jump = re.match(r"^\tj\w+\t(\.LBB\w+)", line)
        if jump and jump[1] in at:
            body = lines[at[jump[1]] + 1 : i + 1]
            if not any(b.startswith(".LBB") for b in body):
                loops.append(body)
    return loops


@pytest.mark.parametrize("isa", X86_ISAS, ids=lambda i: i.name)
def test_assembly(isa: Isa) -> None:
    """Vector code of the right width, no call and no heap inside a loop, no vector spilled in the rotation or the codes."""
    text = assembly(quantize, QuantizeRows(isa, 1536, act="relu", quantizer=Quantizer(True, Rotation(128, 8))))
    loops = [loop for loop in innermost_loops(text) if any(re.search(r"v(add|cvtps2dq|max)", line) for line in loop)]
    assert len(loops) >= 3
    for loop in loops:
        assert not any("call" in line for line in loop)
        assert not any(re.search(r"\(%rsp\).*%[xyz]mm|%[xyz]mm.*\(%rsp\)", line) for line in loop), loop
    assert any(("%zmm" if isa.vector_bits == 512 else "%ymm") in line for loop in loops for line in loop)
    assert "AllocWorkspace" not in assembly(quantize, QuantizeRows(isa, 1536))
