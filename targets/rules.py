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

from khtst_compile.layout import Packed
from khtst_compile.targets.contract import Constants, KernelCall, KernelRule
from khtst_compile.targets.isa import Isa
from khtst_compile.targets.kernels import (
    attention,
    codebook,
    gemm_f32,
    gemm_i8,
    norm,
    quantize,
    quantize_cache,
    rotary,
    step_lookup,
)
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
        "khtst.gate_quantize": (partial(act_quantize, isa, gate=True),),
        "khtst.norm": (partial(normalize, isa),),
        "khtst.norm_quantize": (partial(norm_quantize, isa),),
        "khtst.rotary": (partial(turn, isa),),
        "khtst.embed": (partial(embed, isa),),
        "khtst.embed_norm": (partial(embed_norm, isa),),
        "khtst.embed_norm_quantize": (partial(embed_norm_quantize, isa),),
        "khtst.w8a8_gemm": (partial(w8a8_gemm, isa, tiles or {}),),
        "khtst.linear": (partial(linear, isa, tiles or {}),),
        "khtst.attention": (partial(attend, isa),),
        "khtst.attention_cached": (partial(attend_cached, isa),),
        "khtst.attention_int8": (partial(attend_int8, isa),),
        "khtst.quantize_cache": (keep,),
        "khtst.codebook_lookup": (partial(look_up, isa),),
        "khtst.step_lookup": (steps,),
    }


def quantize_rows(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, inv_smooth, static, block, points = node.args
    return _quantize(isa, x, "none", constants(inv_smooth), constants(static), int(block), int(points))  # type: ignore[arg-type]


def act_quantize(isa: Isa, node: fx.Node, constants: Constants, gate: bool = False) -> KernelCall | None:
    x, act, inv_smooth, static, block, points = node.args
    return _quantize(isa, x, str(act), constants(inv_smooth), constants(static), int(block), int(points), gate)  # type: ignore[arg-type]


def _quantize(
    isa: Isa, x: Any, act: str, inv_smooth: Array | None, static: Array | None, block: int, points: int, gate: bool = False
) -> KernelCall:
    lead, width = _rows(x)
    width = width // 2 if gate else width
    quantizer = _quantizer(inv_smooth, static, block, points)
    spec = quantize.QuantizeRows(isa, width, lead, act, quantizer, gate)
    key = f"{'gate' if gate else 'quantize'}_{act}_{width}_{_quantizer_key(quantizer)}_{_lead_key(lead)}"
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
    embedded: tuple[Lead, list[Any], list[Array], tuple[norm.Lookup, ...]] | None = None,
) -> KernelCall:
    """embedded: (lead, ids, tables, lookups) where the rows are sums of table rows and not x."""
    lead, width = _rows(x) if embedded is None else (embedded[0], int(embedded[2][0].shape[1]))
    lookups = () if embedded is None else embedded[3]
    kind = "rms" if rms else "layer"
    given = [(name, a) for name, a in (("g", gamma), ("b", beta)) if a is not None]
    spec = norm.NormQuantize(
        isa,
        width,
        eps,
        kind,
        lead,
        gamma=gamma is not None,
        beta=beta is not None,
        y_out=y_out,
        quantizers=quantizers,
        lookups=lookups,
    )
    parts = [kind, str(width), "".join(n for n, _ in given), _number(eps), "y" if y_out else ""]
    first = f"embed_{_lookup_key(list(lookups))}" if lookups else "norm"
    key = "_".join([first, *parts, *map(_quantizer_key, quantizers), _lead_key(lead)])
    outputs = [(width, "float32")] if y_out else []
    slots = [0] if y_out else []
    for _ in quantizers:
        outputs += [(round_up(width), isa.codes_dtype), (None, "float32")]  # type: ignore[list-item]
        slots += [1, 2]
    read = [x] if embedded is None else [*embedded[1], *embedded[2]]
    operands = (*read, *(a for _, a in given), *arrays)
    return KernelCall(norm.prim_func(spec), key, operands, tuple(outputs), tuple(slots))


def turn(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, cos, sin, gamma, eps, heads, head_dim, offsets = node.args
    lead, columns = _rows(x)
    h, d, weight = int(heads), int(head_dim), constants(gamma)  # type: ignore[arg-type]
    shared = isinstance(cos.meta["val"].shape[0], int) and int(cos.meta["val"].shape[0]) == 1  # type: ignore[union-attr]
    spec = rotary.Rotary(columns, h, d, int(offsets[0]), shared, weight is not None, float(eps), lead)  # type: ignore[arg-type, index]
    norm = f"_g{_number(spec.eps)}" if spec.norm else ""
    key = f"rotary_{h}_{d}_{columns}p{spec.offset}{'' if shared else '_each'}{norm}_{_lead_key(lead)}"
    operands: tuple[Any, ...] = (x, cos, sin, *([] if weight is None else [weight]))
    return KernelCall(rotary.prim_func(spec), key, operands, ((h * d, "float32"),))


def embed(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    return _embed(isa, node, constants)


def embed_norm(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    return _embed(isa, node, constants, node.args[6:10])


def embed_norm_quantize(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    return _embed(isa, node, constants, node.args[6:10], node.args[10:])


def _embed(isa: Isa, node: fx.Node, constants: Constants, norm_args: Any = None, quantize_args: Any = None) -> KernelCall:
    """Arguments of the node: ids, table, three times, those of the norm and those of the quantizer, if any."""
    pairs = [(i, constants(t)) for i, t in zip(node.args[:6:2], node.args[1:6:2], strict=True) if i is not None]
    lookups = [_lookup(i, table) for i, table in pairs]
    shape = pairs[0][0].meta["val"].shape  # type: ignore[union-attr]
    lead = Lead(len(shape), tuple(int(s) if isinstance(s, int) else None for s in shape))
    tables = [table for _, table in pairs if table is not None]
    front = [i for i, _ in pairs], tables, tuple(lookups)
    width = int(tables[0].shape[1])
    if norm_args is None:
        spec = norm.NormQuantize(isa, width, 0.0, lead=lead, y_out=False, sum_out=True, gamma=False, beta=False, lookups=front[2])
        operands: tuple[Any, ...] = (*front[0], *tables)
        return KernelCall(
            norm.prim_func(spec), f"embed_{width}_{_lookup_key(lookups)}_{_lead_key(lead)}", operands, ((width, "float32"),)
        )
    gamma, beta, eps, rms = norm_args
    quantizers: tuple[quantize.Quantizer, ...] = ()
    arrays: tuple[Array, ...] = ()
    y_out = True
    if quantize_args is not None:
        smooth, static = constants(quantize_args[0]), constants(quantize_args[1])
        quantizers = (_quantizer(smooth, static, int(quantize_args[2]), int(quantize_args[3])),)
        arrays = _quantizer_arrays(smooth, static)
        y_out = 0 in {int(u.args[1]) for u in node.users}  # type: ignore[arg-type]
    return _norm(isa, None, constants(gamma), constants(beta), float(eps), bool(rms), quantizers, arrays, y_out, (lead, *front))


def _lookup(ids: Any, table: Array | None) -> norm.Lookup:
    assert table is not None
    value = ids.meta["val"]
    shared = isinstance(value.shape[0], int) and int(value.shape[0]) == 1
    return norm.Lookup(int(table.shape[0]), shared, str(value.dtype).removeprefix("torch."))


def _lookup_key(lookups: list[norm.Lookup]) -> str:
    return "_".join(f"{n.rows}{'s' if n.shared else ''}{'i' if n.dtype == 'int32' else ''}" for n in lookups)


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
    first, *packed = gemm_i8.pack(spec, wq, ws, constants(bias))
    operands = (codes, scale, Packed(first, wq, gemm_i8.layout(spec)), *packed, *([residual] if residual is not None else []))
    outputs = ((spec.n, "float32"),)
    return KernelCall(gemm_i8.prim_func(spec), _gemm_key(spec), operands, outputs, macs=spec.n * spec.k, products="int8")  # type: ignore[arg-type]


def linear(isa: Isa, tiles: Tiles, node: fx.Node, constants: Constants) -> KernelCall | None:
    x, weight, bias, _, residual = node.args
    spec = gemm_spec(isa, node, constants, tiles)
    w = constants(weight)
    assert isinstance(spec, gemm_f32.GemmF32) and w is not None
    first, start = gemm_f32.pack(spec, w, constants(bias))
    operands = (x, Packed(first, w, gemm_f32.layout(spec)), start, *([residual] if residual is not None else []))
    return KernelCall(gemm_f32.prim_func(spec), _gemm_key(spec), operands, ((spec.n, "float32"),), macs=spec.n * spec.k)  # type: ignore[arg-type]


def _gemm_key(spec: GemmSpec) -> str:
    return f"{spec.name}_{spec.n}_{spec.k}_{spec.act}_{'r' if spec.residual else 'n'}_{_lead_key(spec.lead)}"


def attend(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    q, k, v, mask, heads, kv_heads, head_dim, offsets, scale, causal = node.args
    return _attention(isa, (q, k, v), (), mask, (heads, kv_heads, head_dim), offsets, scale, bool(causal))


def attend_cached(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    q, k, v, past_k, past_v, mask, heads, kv_heads, head_dim, scale, offsets = node.args
    return _attention(isa, (q, k, v), (past_k, past_v), mask, (heads, kv_heads, head_dim), offsets, scale, True)


def attend_int8(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    q, k, v, scales, past_k, past_v, past_scales, heads, kv_heads, head_dim, scale, offsets = node.args
    cache, places = (scales, past_k, past_v, past_scales), (*offsets, 0, 0)  # type: ignore[misc]
    return _attention(isa, (q, k, v), cache, None, (heads, kv_heads, head_dim), places, scale, True, codes=True)


def keep(node: fx.Node, constants: Constants) -> KernelCall | None:
    k, v, kv_heads, head_dim, offsets = node.args
    values = [t.meta["val"] for t in (k, v)]  # type: ignore[union-attr]
    places = [attention.Operand(int(t.shape[2]), int(o)) for t, o in zip(values, offsets, strict=True)]  # type: ignore[arg-type]
    batch = values[0].shape[0] if isinstance(values[0].shape[0], int) else None
    spec = quantize_cache.QuantizeCache(places[0], places[1], int(kv_heads), int(head_dim), batch)  # type: ignore[arg-type]
    shown = "_".join(f"{o.row}p{o.offset}" for o in places)
    key = f"quantize_cache_{spec.kv_heads}_{spec.head_dim}_{shown}_{'d' if spec.batch is None else spec.batch}"
    outputs = ((spec.width, "int8"), (spec.width, "int8"), (2 * spec.kv_heads, "float32"))
    return KernelCall(quantize_cache.prim_func(spec), key, (k, v), outputs, (0, 1, 2), swapped=True)  # type: ignore[arg-type]


def look_up(isa: Isa, node: fx.Node, constants: Constants) -> KernelCall | None:
    z, codes, bias, table, running, certified = node.args
    lead, _ = _rows(z)
    rows, values = constants(codes), constants(table)
    assert rows is not None and values is not None
    levels, count, features = rows.shape
    used = {int(u.args[1]) for u in node.users}  # type: ignore[arg-type]
    slots = tuple(i for i in (0, 1) if i in used) or (1,)
    width = values.shape[-1]
    spec = codebook.Codebook(
        isa, levels, count, features, width, lead, bool(running), bool(certified), values_out=0 in slots, ids_out=1 in slots
    )
    form = (
        f"{'i' if spec.int8 else 'f'}{'r' if spec.running else 't'}{'v' if spec.values_out else ''}{'n' if spec.ids_out else ''}"
    )
    key = f"codebook_{levels}_{count}_{features}_{width}_{form}_{_lead_key(lead)}"
    outputs = tuple(((width, "float32"), (levels, "int32"))[slot] for slot in slots)
    operands: tuple[Any, ...] = (z, *codebook.pack(spec, rows, constants(bias), values))
    products = "int8" if spec.int8 else "float32"
    return KernelCall(codebook.prim_func(spec), key, operands, outputs, slots, levels * count * features, products=products)


def steps(node: fx.Node, constants: Constants) -> KernelCall | None:
    x, *tables = node.args
    thresholds, values, basis = (constants(t) for t in tables)
    assert thresholds is not None and values is not None and basis is not None
    lead, width = _rows(x)
    spec = step_lookup.StepLookup(width, int(values.shape[1]), lead)
    key = f"step_lookup_{width}_{spec.count}_{_lead_key(lead)}"
    operands = (x, *step_lookup.pack(thresholds, values, basis))
    outputs = ((width, "float32"), (None, "int32"))
    return KernelCall(step_lookup.prim_func(spec), key, operands, outputs, (0, 1))  # type: ignore[arg-type]


def _attention(
    isa: Isa,
    qkv: tuple[Any, ...],
    cache: tuple[Any, ...],
    mask: Any,
    sizes: tuple[Any, ...],
    offsets: Any,
    scale: Any,
    causal: bool,
    codes: bool = False,
) -> KernelCall:
    h, g, d = (int(n) for n in sizes)
    q, k, v = (attention.Operand(int(t.meta["val"].shape[2]), int(o)) for t, o in zip(qkv, offsets, strict=True))
    seen = _mask(mask)
    spec = attention.Attention(isa, h, d, float(scale), q, k, v, g, seen, causal, bool(cache), codes)
    places = "_".join(f"{o.row}p{o.offset}" for o in (q, k, v))
    shown = f"{seen.dtype[0]}{int(seen.batch)}{int(seen.head)}{int(seen.query)}" if seen else "n"
    number = f"{spec.scale:.7g}".replace(".", "d").replace("-", "m").replace("+", "")
    form = "_int8" if codes else "_cached" if cache else ""
    key = f"attention{form}_{h}_{g}_{d}_{places}_{shown}{'c' if causal else ''}_{number}"
    operands = (*qkv, *cache, *([mask] if seen else []))
    pair_macs = h * d if causal else 2 * h * d  # half of the pairs lie above the diagonal
    return KernelCall(attention.prim_func(spec), key, operands, ((h * d, "float32"),), pair_macs=pair_macs)


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


def _number(value: float) -> str:
    """A float as part of a function's name: 1e-12 -> 1em12."""
    return f"{value:.7g}".replace(".", "d").replace("-", "m").replace("+", "")


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
