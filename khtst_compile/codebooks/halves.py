"""The encoder and the decoder of a program that is cut at its codebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.axes import Sizes
from khtst_compile.codebooks.cut import LOOKUPS, MADE_LIKE, Book, Cut, find_cut
from khtst_compile.codebooks.grids import grid_values
from khtst_compile.errors import PassError
from khtst_compile.program import Program, Rewriter, TensorSpec, call_nodes, check_program, placeholders
from khtst_compile.sizes import same_shape

aten, khtst = torch.ops.aten, torch.ops.khtst
LOST = "lost"


def split(program: Program) -> tuple[Program, Program, Cut]:
    """A program with codebooks -> encoder, decoder, and where it was cut.

    encoder: the inputs -> for each codebook ids int32 (..., levels); `lost` int32 (codebooks,), how many rows have no code; and the outputs
    that need neither. decoder: the ids -> the outputs computed from codes. Together they are the program, to the bit, but that rows
    without a code have the values of code 0 instead of NaN. Raises what `find_cut` raises.
    """
    where = find_cut(program)
    halves = (_encoder(program, where), _decoder(program, where))
    for half in halves:
        check_program(half)
    return (*halves, where)


def _encoder(program: Program, where: Cut) -> Program:
    rw = Rewriter(program)
    public = set(program.user_inputs())
    inputs = [n for n in placeholders(rw.graph) if n.name in public]
    results = dict(zip((s.name for s in program.outputs), rw.results(), strict=True))
    end = next(n for n in reversed(rw.graph.nodes) if n.op == "output")
    sizes = Sizes(rw, inputs, next(n for n in rw.graph.nodes if n.op == "call_function"))
    ids, lost = [], []
    for book in where.books:
        node = rw.node(book.node)
        found = rw.getitem(node, 1, end)
        if not same_shape(found.meta["val"].shape, book.shape):
            found = rw.call(aten.reshape.default, found, [sizes.of(s, node) for s in book.shape], before=end, like=node)
        ids.append(found)
        lost.append(_count_lost(rw, node, end))
    total = lost[0] if len(lost) == 1 else rw.call(aten.cat.default, lost, 0, before=end)
    rw.return_instead([*ids, total, *(results[name] for name in where.kept)])
    specs = {s.name: s for s in program.outputs}
    name = LOST if LOST not in where.kept else f"{LOST}_rows"
    outputs = (
        *(TensorSpec(book.name, "int32", book.dims) for book in where.books),
        TensorSpec(name, "int32", (len(where.books),)),
        *(specs[kept] for kept in where.kept),
    )
    named = {book.node: {"output": book.name} for book in where.books}
    made = rw.finish()
    left = {n.name for n in call_nodes(made.graph, *LOOKUPS)}
    held = {e["node"]: e for e in program.meta["codebooks"] if e["node"] in left}
    entries = [{**e, "ids": named.get(node, _still(e["ids"], where.kept))} for node, e in held.items()]
    part = {"part": "encoder", "ids": [b.name for b in where.books], "lost": name, "left_out": list(where.left_out)}
    return replace(made, outputs=outputs, stats=None, meta={**program.meta, "codebooks": entries, "split": part})


def _still(ids: dict[str, Any] | None, kept: Sequence[str]) -> dict[str, Any] | None:
    return ids if ids is not None and ids.get("output") in kept else None


def _count_lost(rw: Rewriter, lookup: fx.Node, before: fx.Node) -> fx.Node:
    """How many rows of a lookup have no code, (1,) int32: those whose values are NaN."""
    values = rw.getitem(lookup, 0, before)
    if lookup.target is khtst.codebook_lookup.default:  # all features of a row, or none
        lost = rw.call(aten.isnan.default, rw.call(aten.select.int, values, -1, 0, before=before, like=lookup), before=before)
    else:
        lost = rw.call(aten.any.dim, rw.call(aten.isnan.default, values, before=before, like=lookup), -1, before=before)
    ones = rw.call(aten.to.dtype, lost, torch.int32, before=before, like=lookup)
    axes = list(range(ones.meta["val"].dim()))
    count = rw.call(aten.sum.dim_IntList, ones, axes, True, before=before, like=lookup, kwargs={"dtype": torch.int32})
    return rw.call(aten.reshape.default, count, [1], before=before, like=lookup)


def _decoder(program: Program, where: Cut) -> Program:
    rw = Rewriter(program)
    public = set(program.user_inputs())
    old = [n for n in placeholders(rw.graph) if n.name in public]
    results = dict(zip((s.name for s in program.outputs), rw.results(), strict=True))
    inputs: list[fx.Node] = []
    for book in where.books:
        after = inputs[-1] if inputs else [n for n in rw.graph.nodes if n.op == "placeholder"][-1]
        inputs.append(rw.add_input(book.name, book.shape, torch.int32, after))
        inputs[-1].target = inputs[-1].name
    for book, given in zip(where.books, inputs, strict=True):
        _decode(rw, book, given)
    rw.return_instead([results[name] for name in where.decoded])
    rw.graph.eliminate_dead_code()
    _resize(rw, inputs)
    rw.graph.eliminate_dead_code()
    still = next(((n, user) for n in old for user in n.users), None)
    if still is not None:
        raise PassError(f"split: {still[1].name!r} of the decoder still reads the input {still[0].name!r}; please report it")
    rw.drop_inputs(old)
    specs = {s.name: s for s in program.outputs}
    entries = [{**b.entry, "node": None, "ids": {"input": b.name}} for b in where.books]
    part = {"part": "decoder", "ids": [b.name for b in where.books], "left_out": list(where.left_out)}
    axes = {d for book in where.books for d in book.dims if isinstance(d, str)}
    return replace(
        rw.finish(),
        inputs=tuple(TensorSpec(b.name, "int32", b.dims) for b in where.books),
        outputs=tuple(specs[name] for name in where.decoded),
        axes={k: v for k, v in program.axes.items() if k in axes},
        stats=None,
        meta={**program.meta, "codebooks": entries, "split": part},
    )


def _decode(rw: Rewriter, book: Book, given: fx.Node) -> None:
    """Let what read a lookup read tables instead: the sum of levels in the lookup's own order."""
    node = rw.node(book.node)
    ids = _as_looked_up(rw, given, node)
    value = grid_values(rw, node, ids) if node.target is khtst.step_lookup.default else _levels(rw, node, ids, book)
    for reader in list(node.users):
        rw.replace(reader, value if reader.args[1] == 0 else ids)


def _as_looked_up(rw: Rewriter, given: fx.Node, node: fx.Node) -> fx.Node:
    """The ids in the shape the lookup gave them: axes of rows in one, and of a grid without the axis of levels."""
    wanted, own = node.meta["val"][1].shape, given.meta["val"].shape
    if same_shape(own, wanted):
        return given
    axes = {str(s): i for i, s in enumerate(own) if isinstance(s, torch.SymInt)}
    shape: list[Any] = []
    for size in wanted:
        if not isinstance(size, torch.SymInt):
            shape.append(int(size))
        elif str(size) in axes:
            shape.append(rw.call(aten.sym_size.int, given, axes[str(size)], before=node))
        else:
            shape.append(-1)  # the only one: see find_cut
    return rw.call(aten.reshape.default, given, shape, before=node)


def _levels(rw: Rewriter, node: fx.Node, ids: fx.Node, book: Book) -> fx.Node:
    table = rw.value(node.args[3])  # type: ignore[arg-type]
    if table is None:
        raise PassError(f"split: the table of codebook {book.entry['site']!r} is computed, and no constant; please report it")
    total: fx.Node | None = None
    for level in range(table.shape[0]):
        rows = rw.add_tensor(f"{book.entry['site']}_values_{level}", table[level])
        its = rw.call(aten.select.int, ids, -1, level, before=node)
        value = rw.call(aten.embedding.default, rows, its, before=node)
        total = value if total is None else rw.call(aten.add.Tensor, total, value, before=node)
    assert total is not None
    return total


def _resize(rw: Rewriter, inputs: Sequence[fx.Node]) -> None:
    """Sizes that were read off the encoder's tensors are those of ids; tensors made like one of the encoder's are made from sizes."""
    nodes = [n for n in rw.graph.nodes if n.op == "call_function"]
    sizes = Sizes(rw, inputs, nodes[0])
    for node in nodes:
        if node.target is aten.sym_size.int and node.args[0] not in inputs:
            node.replace_all_uses_with(sizes.of(node.meta["val"], node))
        elif node.target in MADE_LIKE:
            value = node.meta["val"]
            fill = (
                1.0 if node.target is aten.ones_like.default else node.args[1] if node.target is aten.full_like.default else 0.0
            )
            shape = [sizes.of(s, node) for s in value.shape]
            made = rw.call(aten.full.default, shape, fill, before=node, kwargs={"dtype": value.dtype})
            node.replace_all_uses_with(made)
