"""Row kernels and attention under emulation: the bits that the same generators give on x86, on rows of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from khtst_compile.targets.isa import AVX2, NEON
from khtst_compile.targets.kernels import argsort, attention, norm, quantize, rotary, softmax, step_lookup
from khtst_compile.targets.kernels.argsort import Argsort
from khtst_compile.targets.kernels.attention import Attention
from khtst_compile.targets.kernels.norm import Lookup, NormQuantize
from khtst_compile.targets.kernels.quantize import Quantizer, QuantizeRows, Rotation
from khtst_compile.targets.kernels.rotary import Rotary
from khtst_compile.targets.kernels.rows import Lead, round_up
from khtst_compile.targets.kernels.softmax import Softmax
from khtst_compile.targets.kernels.step_lookup import StepLookup
from tests.arm.emulator import CPUS, Call, build_kernels, run_kernels, same_numbers
from tests.targets import codebooks, test_attention, test_attention_cached, test_rows
from tests.targets.test_rows import awkward, smooth_of

LEADS = ((0, 3), (1, 1), (1, 7), (3, 11))
CODES = "codes"


@dataclass(frozen=True)
class Case:
    """A kernel and the inputs of its calls. outputs: (last axis or None, dtype) of each; "codes" are int8 however they are stored."""

    module: Any
    spec: Any
    calls: Sequence[Sequence[np.ndarray]]
    outputs: Sequence[tuple[int | None, str]]


def compare(cases: dict[str, Case], folder: Path, runner: Path) -> None:
    """Run all calls of all cases on ARM and here, and require the same bits."""
    on_arm = {name: c.module.prim_func(adapted(c.spec, NEON)) for name, c in cases.items()}
    here = {name: c.module.prim_func(adapted(c.spec, AVX2)).with_attr("global_symbol", name) for name, c in cases.items()}
    x86 = tvm.tirx.build(tvm.IRModule(here), target=tvm.target.Target(AVX2.tvm_target()))
    library = build_kernels(on_arm, NEON, folder / "rows.so")
    calls, wants, widths = [], [], []
    for name, case in cases.items():
        for arrays in case.calls:
            lead = arrays[0].shape[:2]
            calls.append(Call(name, arrays, [shaped(lead, *output, NEON.codes_dtype) for output in case.outputs]))
            rooms = [
                tvm.runtime.tensor(np.full(shape, 77, dtype))
                for shape, dtype in (shaped(lead, *output, AVX2.codes_dtype) for output in case.outputs)
            ]
            x86[name](*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays), *rooms)
            wants.append([room.numpy() for room in rooms])
            widths.append([width if dtype == CODES else None for width, dtype in case.outputs])
    results = run_kernels(library, calls, CPUS["neon"], folder, runner)
    for call, got, want, width in zip(calls, results, wants, widths, strict=True):
        for number, (g, w, codes) in enumerate(zip(got, want, width, strict=True)):
            if codes is not None:
                g, w = g[..., :codes], w[..., :codes].astype(np.int8)
            assert same_numbers(g, w), (call.name, [a.shape for a in call.inputs], number)


def adapted(spec: Any, isa: Any) -> Any:
    return replace(spec, isa=isa) if hasattr(spec, "isa") else spec


def shaped(lead: tuple[int, ...], width: int | None, dtype: str, codes: str) -> tuple[tuple[int, ...], str]:
    if dtype == CODES:
        assert width is not None
        return (*lead, round_up(width)), codes
    return (lead if width is None else (*lead, width)), dtype


def quantizer_case(width: int, quantizer: Quantizer, act: str = "none", gate: bool = False) -> Case:
    step = np.array([0.021], np.float32)
    constants = [smooth_of(width)] * quantizer.smooth + [np.float32(1) / step, step] * quantizer.static
    calls = [[awkward(lead, 2 * width if gate else width), *constants] for lead in LEADS]
    return Case(
        quantize, QuantizeRows(NEON, width, act=act, quantizer=quantizer, gate=gate), calls, [(width, CODES), (None, "float32")]
    )


def test_codes(runner: Path, tmp_path: Path) -> None:
    cases = {f"dynamic{n}": quantizer_case(n, Quantizer(smooth=n % 2 == 0)) for n in (1, 7, 8, 9, 31, 33)}
    cases |= {f"static{n}": quantizer_case(n, Quantizer(smooth=n % 2 == 1, static=True)) for n in (9, 64)}
    rotations = {"whole": Rotation(128, 128), "far": Rotation(128, 8), "short": Rotation(16, 16)}
    cases |= {name: quantizer_case(2 * r.block, Quantizer(True, r, name == "far")) for name, r in rotations.items()}
    cases["gelu"] = quantizer_case(128, Quantizer(True, Rotation(64, 64)), "gelu")
    cases["sigmoid"] = quantizer_case(9, Quantizer(), "sigmoid")  # its tail must not enter the maximum as 0.5
    cases["gate"] = quantizer_case(33, Quantizer(True), "silu", gate=True)
    compare(cases, tmp_path, runner)


def test_norms_and_lookups(runner: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cases = {}
    for kind, options in test_rows.NORMS.items():
        width = 100 if "layer" in kind else 33
        spec = NormQuantize(NEON, width, 1e-5, **options)
        calls = []
        for lead in LEADS:
            gamma, beta, smooth = (rng.uniform(0.3, 2, width).astype(np.float32) for _ in range(3))
            inputs = (
                [awkward(lead, width)] + [awkward(lead, width, 1)] * spec.residual + [gamma] * spec.gamma + [beta] * spec.beta
            )
            for q in spec.quantizers:
                inputs += [smooth] * q.smooth + [np.array([40], np.float32), np.array([0.025], np.float32)] * q.static
            calls.append(inputs)
        outputs: list[tuple[int | None, str]] = [(width, "float32")] * (spec.sum_out + spec.y_out)
        outputs += [(width, CODES), (None, "float32")] * len(spec.quantizers)
        cases[kind.replace("-", "_")] = Case(norm, spec, calls, outputs)
    width, quantizer = 128, Quantizer(False, Rotation(128, 128))
    lookups = (Lookup(50), Lookup(2, dtype="int32"), Lookup(40, shared=True))
    spec = NormQuantize(NEON, width, 1e-5, quantizers=(quantizer,), lookups=lookups)
    tables = [(rng.standard_normal((n, width)) * 3).astype(np.float32) for n in (50, 2, 40)]
    gamma, beta = (rng.uniform(0.3, 2, width).astype(np.float32) for _ in range(2))
    calls = []
    for lead in LEADS:
        ids = [rng.integers(-3, 60, lead), rng.integers(0, 2, lead, np.int32), rng.integers(0, 40, (1, lead[1]))]
        calls.append([*ids, *tables, gamma, beta])
    cases["lookups"] = Case(norm, spec, calls, [(width, "float32"), (width, CODES), (None, "float32")])
    compare(cases, tmp_path, runner)


def test_rotary_and_softmax(runner: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cases = {}
    for head_dim, normed in ((14, False), (64, True)):
        turn = Rotary(3 * head_dim + 5, 2, head_dim, offset=3, norm=normed, eps=1e-6 if normed else 0.0)
        calls = []
        for batch, length in ((1, 1), (2, 7), (3, 33), (0, 5)):
            angles = rng.uniform(-20, 20, (1, length, head_dim))
            x = rng.standard_normal((batch, length, turn.columns)).astype(np.float32)
            gamma = [rng.uniform(0.3, 2, head_dim).astype(np.float32)] * normed
            calls.append([x, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), *gamma])
        cases[f"rotary{head_dim}"] = Case(rotary, turn, calls, [(2 * head_dim, "float32")])
    for width in (1, 33):
        cases[f"softmax{width}"] = Case(
            softmax, Softmax(NEON, width), [[awkward(lead, width)] for lead in LEADS], [(width, "float32")]
        )
    compare(cases, tmp_path, runner)


def test_orders(runner: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cases = {}
    for dtype, descending in (("float32", True), ("float32", False), ("int64", True)):
        values = np.array([-3, 0, 1, 2, 7] + [np.nan, np.inf, -0.0] * (dtype == "float32")).astype(dtype)
        spec = Argsort(dtype, descending, Lead(2), 33)
        calls = [[rng.choice(values, (*lead, 33))] for lead in LEADS]
        cases[f"argsort_{dtype}_{int(descending)}"] = Case(argsort, spec, calls, [(33, "int64")])
    compare(cases, tmp_path, runner)


def test_steps(runner: Path, tmp_path: Path) -> None:
    cases = {}
    for width, count in ((1, 2), (9, 5), (33, 64)):
        made = codebooks.grid(width, count)
        tables = step_lookup.pack(made.thresholds.numpy(), made.steps.numpy(), made.basis.numpy())
        rows = codebooks.step_rows(made, 33).numpy()
        calls = [[rows[: int(np.prod(lead))].reshape(*lead, width), *tables] for lead in LEADS]
        cases[f"steps{width}"] = Case(step_lookup, StepLookup(width, count), calls, [(width, "float32"), (None, "int32")])
    compare(cases, tmp_path, runner)


def attention_case(spec: Attention, calls: list[list[np.ndarray]]) -> Case:
    return Case(attention, spec, calls, [(spec.heads * spec.head_dim, "float32")])


def test_attention_bits(runner: Path, tmp_path: Path) -> None:
    cases = {}
    for name in ("fused-padding", "narrow", "causal-padding"):
        spec, calls = test_attention.CASES[name], []
        for batch, queries, keys in ((0, 4, 4), (1, 1, 1), (2, 13, 17), (1, 8, 300), (1, 33, 31)):
            same = spec.k == spec.v and spec.q.row == spec.k.row
            calls.append(test_attention.inputs(spec, batch, queries, queries if same else keys))
        cases[name.replace("-", "_")] = attention_case(spec, calls)
    cached = test_attention_cached.CASES["odd"]
    sizes = test_attention_cached.SIZES
    cases["cached"] = attention_case(cached, [test_attention_cached.inputs(cached, *s) for s in sizes])
    compare(cases, tmp_path, runner)
