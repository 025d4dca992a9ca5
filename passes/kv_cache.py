"""`kv_cache`: a language model's cache of keys and values to int8 codes, a scale for each position and head.

    past_key_i, past_value_i    (past, batch, kv_heads * head_dim)   float32 -> int8
    past_scale_i                (past, batch, 2 * kv_heads)          new, float32: of the heads of the keys, then of the values

and new_key_i, new_value_i, new_scale_i likewise. New positions are attended to as codes too: a text gives the same result in one call
and in many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from khtst_compile.contract import Outcome
from khtst_compile.errors import PassError
from khtst_compile.program import Program, Rewriter, TensorSpec, arguments, call_nodes, site_of

aten, khtst = torch.ops.aten, torch.ops.khtst


@dataclass(frozen=True)
class KvCache:
    """Without options: int8, one scale for each position and head."""

    name: ClassVar[str] = "kv_cache"

    def check_options(self) -> None:
        pass

    def requires(self, program: Program) -> None:
        cache = program.meta.get("cache")
        if not cache:
            raise PassError(
                f"the program keeps no keys and values (its task is {program.meta.get('task')!r}); needed: a language model of task "
                "text-generation"
            )
        if cache.get("dtype", "float32") != "float32":
            raise PassError(f"the cache is {cache['dtype']} already; give the pass once")

    def run(self, program: Program) -> Outcome:
        rewriter = Rewriter(program)
        places = {s.name: i for i, s in enumerate(program.outputs)}
        inputs, outputs, results = list(program.inputs), list(program.outputs), rewriter.results()
        details: dict[str, Any] = {}
        layers = int(program.meta["cache"]["layers"])
        names = dict(zip((s.name for s in program.inputs), program.user_inputs(), strict=True))
        for layer in range(layers):
            past = [rewriter.node(names[f"past_{what}_{layer}"]) for what in ("key", "value")]
            joined = [_joined(node, layer) for node in past]
            (heads, width), values = ((n.meta["val"].shape[1], n.meta["val"].shape[3]) for n in joined)
            if values != (heads, width):
                raise PassError(
                    f"layer {layer}: keys are {heads} heads of {width} features, values {values[0]} of {values[1]}; needed: as many"
                )
            made = _quantize(rewriter, past, joined, layer)
            for what, node in zip(("key", "value"), made, strict=False):
                results[places[f"new_{what}_{layer}"]] = node
            details[site_of(joined[0])] = {"kv_heads": heads, "head_dim": width, "bytes_per_position": 2 * heads * (width + 4)}
            results.append(made[2])
            for specs, name in ((inputs, "past"), (outputs, "new")):
                axes = next(s.shape[:2] for s in specs if s.name == f"{name}_key_{layer}")
                specs.append(TensorSpec(f"{name}_scale_{layer}", "float32", (*axes, 2 * heads)))
        rewriter.return_instead(results)
        finished = replace(
            rewriter.finish(),
            inputs=tuple(_typed(s, "past_") for s in inputs),
            outputs=tuple(_typed(s, "new_") for s in outputs),
            meta={**program.meta, "cache": _described(program.meta["cache"], layers)},
        )
        return Outcome(finished, layers, details=details)

    def ensures(self, before: Program, after: Program) -> None:
        made = len(list(call_nodes(after.graph, khtst.quantize_cache.default)))
        if made != int(before.meta["cache"]["layers"]):
            raise PassError(f"{before.meta['cache']['layers']} layers keep keys and values, {made} of them as int8")
        nodes = {n.name: n for n in after.graph.nodes if n.op == "placeholder"}
        values = [nodes[n].meta["val"] for n in after.user_inputs()]
        results = [n.meta["val"] for n in Rewriter(after).results()]
        for spec, value in zip((*after.inputs, *after.outputs), (*values, *results), strict=True):
            if str(value.dtype) != f"torch.{spec.dtype}":
                raise PassError(f"{spec.name} is {value.dtype} in the graph, {spec.dtype} by its description")


def _described(cache: dict[str, Any], layers: int) -> dict[str, Any]:
    return {**cache, "dtype": "int8", "new": [*cache["new"], *(f"new_scale_{i}" for i in range(layers))]}


def _typed(spec: TensorSpec, prefix: str) -> TensorSpec:
    kept = spec.name.startswith((f"{prefix}key_", f"{prefix}value_"))
    return replace(spec, dtype="int8") if kept else spec


def _joined(past: fx.Node, layer: int) -> fx.Node:
    """The cat of (past as (batch, heads, past, d), new (batch, heads, seq, d)) along positions. Raises PassError for another form."""
    readers = [u for u in past.users if u.target is not aten.sym_size.int]
    while len(readers) == 1 and readers[0].target in (aten.reshape.default, aten.view.default, aten.permute.default):
        readers = list(readers[0].users)
    if len(readers) != 1 or readers[0].target is not aten.cat.default or arguments(readers[0])[1] != 2:
        found = ", ".join(str(r.target) for r in readers) or "nothing"
        raise PassError(
            f"layer {layer}: {past.name} is read by {found}; needed: joined with the new positions alone, as capture writes it"
        )
    return readers[0]


def _quantize(rw: Rewriter, past: Sequence[fx.Node], joined: Sequence[fx.Node], layer: int) -> list[fx.Node]:
    """Put codes into the place of what a layer keeps; returns new codes of keys and values, and their scales."""
    order = {node: place for place, node in enumerate(rw.graph.nodes)}
    before = max(joined, key=order.__getitem__)
    _, heads, _, width = before.meta["val"].shape
    flat = [_flat(rw, arguments(node)[0][1], before) for node in joined]
    both = rw.call(khtst.quantize_cache.default, *flat, heads, width, [0, 0], before=before)
    made = [rw.getitem(both, i, before) for i in range(3)]
    last = [n for n in rw.graph.nodes if n.op == "placeholder"][-1]
    kept = rw.add_input(f"past_scale_{layer}", (*past[0].meta["val"].shape[:2], 2 * heads), torch.float32, last)
    scales = rw.call(aten.cat.default, [kept, made[2]], 0, before=before)
    for place, (node, old) in enumerate(zip(past, joined, strict=True)):
        rw.retype_input(node, torch.int8)
        codes = rw.call(aten.cat.default, [node, made[place]], 0, before=before)
        wide = rw.call(aten.to.dtype, codes, torch.float32, before=before)
        sizes = [rw.call(aten.sym_size.int, codes, i, before=before) for i in range(2)]
        split = rw.call(aten.reshape.default, wide, [*sizes, heads, width], before=before)
        its = rw.call(aten.slice.Tensor, scales, 2, place * heads, (place + 1) * heads, before=before)
        value = rw.call(aten.mul.Tensor, split, rw.call(aten.unsqueeze.default, its, 3, before=before), before=before)
        old.replace_all_uses_with(rw.call(aten.permute.default, value, [1, 2, 0, 3], before=before, like=old))
    return made


def _flat(rw: Rewriter, new: fx.Node, before: fx.Node) -> fx.Node:
    """(batch, heads, seq, d) -> (batch, seq, heads * d)."""
    _, heads, _, width = new.meta["val"].shape
    moved = rw.call(aten.transpose.int, new, 1, 2, before=before)
    sizes = [rw.call(aten.sym_size.int, new, i, before=before) for i in (0, 2)]
    return rw.call(aten.reshape.default, moved, [*sizes, heads * width], before=before)
