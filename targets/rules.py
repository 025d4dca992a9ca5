"""Which kernel serves which operator on a CPU: rules that read a graph node and hand back a kernel call.

Shared by all CPU targets; what differs between instruction sets is in `Isa`. A rule returns None where it does not serve a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from khtst_compile.targets.contract import Constants, KernelCall, KernelRule
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels import attention, gemm_f32, gemm_i8, norm, quantize
from khtst_compile.targets.kernels.rows import Lead, round_up
from khtst_compile.targets.kernels.tiles import Tile

Array = npt.NDArray[Any]


GemmSpec = gemm_i8.GemmI8 | gemm_f32.GemmF32
Tiles = Mapping[tuple[object, ...], Tile]
"""`tile_key` of a GEMM -> its tile; those that are not in it keep their default."""


def cpu_kernels(isa: Isa, tiles: Tiles | None = None) -> dict[str, tuple[KernelRule, ...]]:
    """Operator -> rules, for one instruction set. tiles: choices that were measured."""
    return {
        "khtst.quantize_rows": (partial(quantize_rows, isa),),
        "khtst.act_quantize": (partial(act_quantize, isa),),
        "khtst.norm": (partial(normalize, isa),),
        "khtst.norm_quantize": (partial(norm_quantize, isa),),
        "khtst.w8a8_gemm": (partial(w8a8_gemm, isa, tiles or {}),),
        "khtst.linear": (partial(linear, isa, tiles or {}),),
        "khtst.attention": (partial(attend, isa),),
    }


def quantize_rows(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, inv_smooth, static, block, points = node.args
    return _quantize(isa, x, "none", constants(inv_smooth), constants(static), int(block), int(points))  # type: ignore[arg-type]


def act_quantize(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, act, inv_smooth, static, block, points = node.args
    return _quantize(isa, x, str(act), constants(inv_smooth), constants(static), int(block), int(points))  # type: ignore[arg-type]


def _quantize(isa: Isa, x: Any, act: str, inv_smooth: Array | None, static: Array | None, block: int, points: int) -> KernelCall:
    lead, width = _rows(x)
    quantizer = _quantizer(inv_smooth, static, block, points)
    spec = quantize.QuantizeRows(isa, width, lead, act, quantizer)
    key = f"quantize_{act}_{width}_{_quantizer_key(quantizer)}_{_lead_key(lead)}"
    outputs = ((round_up(width), isa.codes_dtype), (None, "float32"))
    return KernelCall(quantize.prim_func(spec), key, (x, *_quantizer_arrays(inv_smooth, static)), outputs, (0, 1))


def normalize(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, gamma, beta, eps, rms = node.args
    return _norm(isa, x, constants(gamma), constants(beta), float(eps), bool(rms), (), (), True)  # type: ignore[arg-type]


def norm_quantize(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, gamma, beta, eps, rms, inv_smooth, static, block, points = node.args
    smooth, scale = constants(inv_smooth), constants(static)
    quantizer = _quantizer(smooth, scale, int(block), int(points))  # type: ignore[arg-type]
    used = {int(u.args[1]) for u in node.users}  # type: ignore[arg-type]
    arrays = _quantizer_arrays(smooth, scale)
    return _norm(isa, x, constants(gamma), constants(beta), float(eps), bool(rms), (quantizer,), arrays, 0 in used)  # type: ignore[arg-type]


def _norm(
    isa: Isa,
    x: Any,
    gamma: Array | None,
    beta: Array | None,
    eps: float,
    rms: bool,
    quantizers: tuple[quantize.Quantizer, ...],
    arrays: tuple[Array, ...],
    y_out: bool,
) -> KernelCall:
    lead, width = _rows(x)
    kind = "rms" if rms else "layer"
    given = [(name, a) for name, a in (("g", gamma), ("b", beta)) if a is not None]
    spec = norm.NormQuantize(
        isa, width, eps, kind, lead, gamma=gamma is not None, beta=beta is not None, y_out=y_out, quantizers=quantizers
    )
    parts = [kind, str(width), "".join(n for n, _ in given), f"{eps:.0e}".replace("-", "m"), "y" if y_out else ""]
    key = "_".join(["norm", *parts, *map(_quantizer_key, quantizers), _lead_key(lead)])
    outputs = [(width, "float32")] if y_out else []
    slots = [0] if y_out else []
    for _ in quantizers:
        outputs += [(round_up(width), isa.codes_dtype), (None, "float32")]  # type: ignore[list-item]
        slots += [1, 2]
    operands = (x, *(a for _, a in given), *arrays)
    return KernelCall(norm.prim_func(spec), key, operands, tuple(outputs), tuple(slots))


def tile_key(spec: GemmSpec) -> tuple[object, ...]:
    """What a choice of tile holds for: (kernel, instruction set, n, k, activation, residual)."""
    return spec.name, spec.isa.name, spec.n, spec.k, spec.act, spec.residual


def gemm_spec(isa: Isa, node: fx.Node, constants: Constants, tiles: Tiles) -> GemmSpec | None:
    """The GEMM that serves a node; None for another operator."""
    int8 = str(node.target).startswith("khtst.w8a8_gemm")
    if not int8 and not str(node.target).startswith("khtst.linear"):
        return None
    weight, (act, residual) = node.args[2 if int8 else 1], node.args[-2:]
    w, (lead, _) = constants(weight), _rows(node.args[0])
    assert w is not None
    made = gemm_i8.GemmI8 if int8 else gemm_f32.GemmF32
    n, k = w.shape
    spec: GemmSpec = made(isa, n, k, lead, str(act), residual is not None)
    return replace(spec, tile=tiles.get(tile_key(spec)))


def w8a8_gemm(isa: Isa, tiles: Tiles, node: fx.Node, constants: Constants) -> KernelCall | None:
    codes, scale, weight, weight_scale, bias, _, residual = node.args
    spec = gemm_spec(isa, node, constants, tiles)
    wq, ws = constants(weight), constants(weight_scale)
    assert isinstance(spec, gemm_i8.GemmI8) and wq is not None and ws is not None
    packed = gemm_i8.pack(spec, wq, ws, constants(bias))
    operands = (codes, scale, *packed, *([residual] if residual is not None else []))
    outputs = ((spec.n, "float32"),)
    return KernelCall(gemm_i8.prim_func(spec), _gemm_key(spec), operands, outputs, macs=spec.n * spec.k, products="int8")  # type: ignore[arg-type]


def linear(isa: Isa, tiles: Tiles, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, weight, bias, _, residual = node.args
    spec = gemm_spec(isa, node, constants, tiles)
    w = constants(weight)
    assert isinstance(spec, gemm_f32.GemmF32) and w is not None
    packed = gemm_f32.pack(spec, w, constants(bias))
    operands = (x, *packed, *([residual] if residual is not None else []))
    return KernelCall(gemm_f32.prim_func(spec), _gemm_key(spec), operands, ((spec.n, "float32"),), macs=spec.n * spec.k)  # type: ignore[arg-type]


def _gemm_key(spec: GemmSpec) -> str:
    return f"{spec.name}_{spec.n}_{spec.k}_{spec.act}_{'r' if spec.residual else 'n'}_{_lead_key(spec.lead)}"


def attend(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    q, k, v, mask, heads, kv_heads, head_dim, offsets, scale, causal = node.args
    h, g, d = int(heads), int(kv_heads), int(head_dim)  # type: ignore[arg-type]
    widths = [int(t.meta["val"].shape[2]) for t in (q, k, v)]  # type: ignore[union-attr]
    first, second, third = (attention.Operand(w, int(o)) for w, o in zip(widths, offsets, strict=True))  # type: ignore[arg-type]
    seen = _mask(mask)
    spec = attention.Attention(isa, h, d, float(scale), first, second, third, g, seen, bool(causal))  # type: ignore[arg-type]
    places = "_".join(f"{o.row}p{o.offset}" for o in (first, second, third))
    shown = f"{seen.dtype[0]}{int(seen.batch)}{int(seen.head)}{int(seen.query)}" if seen else "n"
    number = f"{float(scale):.7g}".replace(".", "d").replace("-", "m").replace("+", "")  # type: ignore[arg-type]
    key = f"attention_{h}_{g}_{d}_{places}_{shown}{'c' if causal else ''}_{number}"
    operands = (q, k, v, *([mask] if seen else []))
    pair_macs = h * d if causal else 2 * h * d  # half of the pairs lie above the diagonal
    return KernelCall(attention.prim_func(spec), key, operands, ((h * d, "float32"),), pair_macs=pair_macs)  # type: ignore[arg-type]


def _mask(mask: Any) -> attention.Mask | None:
    if not isinstance(mask, fx.Node):
        return None
    value = mask.meta["val"]
    real = [not (isinstance(size, int) and size == 1) for size in value.shape[:3]]
    return attention.Mask("bool" if value.dtype is torch.bool else "float32", *real)


def _rows(value: Any) -> tuple[Lead, int]:
    """Leading dimensions and width of a tensor of the graph; static sizes are kept static."""
    shape = value.meta["val"].shape
    return Lead(len(shape) - 1, tuple(int(s) if isinstance(s, int) else None for s in shape[:-1])), int(shape[-1])


def _lead_key(lead: Lead) -> str:
    return "x".join("d" if n is None else str(n) for n in (lead.shape or (None,) * lead.ndim))


def _quantizer(inv_smooth: Array | None, static: Array | None, block: int, points: int) -> quantize.Quantizer:
    rotation = quantize.Rotation(block, points) if block else None
    return quantize.Quantizer(inv_smooth is not None, rotation, static is not None)


def _quantizer_key(q: quantize.Quantizer) -> str:
    rotation = f"h{q.rotation.block}p{q.rotation.points}" if q.rotation else "h0"
    return f"{'s' if q.smooth else 'n'}{rotation}{'t' if q.static else 'd'}"


def _quantizer_arrays(inv_smooth: Array | None, static: Array | None) -> tuple[Array, ...]:
    """Arguments of a quantizer in the order its kernel declares them."""
    arrays: list[Array] = [] if inv_smooth is None else [inv_smooth.astype(np.float32)]
    if static is not None:
        scale = static.reshape(1).astype(np.float32)
        arrays += [np.float32(1) / scale, scale]
    return tuple(arrays)
