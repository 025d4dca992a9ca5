"""Where a program with codebooks is cut: what chooses ids, what is computed from their values, and that nothing else crosses."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from khtst_compile.codebooks.axes import axis_names, taken_apart
from khtst_compile.errors import UnsupportedError, UsageError
from khtst_compile.program import Program, call_nodes, placeholders, source_line

aten, khtst = torch.ops.aten, torch.ops.khtst
LOOKUPS = (khtst.codebook_lookup.default, khtst.step_lookup.default)
MADE_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
)  # of their operand they take the sizes alone
_HANDED_ON = (
    operator.getitem,
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.stack.default,
    aten.cat.default,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.to.dtype,
    aten._to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
)


@dataclass(frozen=True)
class Book:
    """A codebook that the decoder needs. node: its lookup's name; name: that of its ids in both halves; entry: its description; shape:
    of the ids, (..., levels), with an axis of rows taken apart into the model's own axes; dims: public form of the shape."""

    node: str
    name: str
    entry: dict[str, Any]
    shape: tuple[Any, ...]
    dims: tuple[int | str, ...]


@dataclass(frozen=True)
class Cut:
    """books: what the ids of the encoder are; kept: outputs the encoder has besides; decoded: outputs of the decoder; left_out: outputs
    that hold ids and nothing else, which the encoder's own stand for. All by public name, in the program's order."""

    books: tuple[Book, ...]
    kept: tuple[str, ...]
    decoded: tuple[str, ...]
    left_out: tuple[str, ...]


def find_cut(program: Program) -> Cut:
    """Where to cut. Raises UsageError where there is no codebook, UnsupportedError where the decoder would need more than ids, naming
    the node and its line."""
    lookups, entries = _described(program)
    results = dict(zip((s.name for s in program.outputs), _results(program.graph), strict=True))
    behind = _reached(program.graph, lookups)
    alone = {name: _ids_alone(node) for name, node in results.items() if node in behind}
    decoded = [name for name, read in alone.items() if read is None]
    if not decoded:
        raise UnsupportedError(
            "split: no output depends on the values of a codebook, so there is nothing to decode; the artifact is an encoder as it is, for "
            "khtst-compile run --codes"
        )
    needed = _needed(program, [results[name] for name in decoded], behind)
    left_out = [name for name, read in alone.items() if read is not None and read <= needed]
    kept = [name for name in results if name not in decoded and name not in left_out]
    books = _books(program, [n for n in lookups if n in needed], entries)
    return Cut(books, tuple(kept), tuple(decoded), tuple(left_out))


def _described(program: Program) -> tuple[list[fx.Node], dict[str, dict[str, Any]]]:
    """The lookups, and what is known of each by its name."""
    lookups = list(call_nodes(program.graph, *LOOKUPS))
    if not lookups:
        raise UsageError(
            f"split: {program.meta.get('source', 'the program')} has no codebook; needed: one that freeze_codebook froze (what it left "
            "alone and why: khtst-compile inspect)"
        )
    entries = {str(e["node"]): e for e in program.meta.get("codebooks", [])}
    strange = next((n for n in lookups if n.name not in entries), None)
    if strange is not None:
        raise UnsupportedError(
            f"split: lookup {strange.name!r} ({source_line(strange)}) was written by hand and nothing describes it; needed: codebooks "
            "that freeze_codebook froze"
        )
    return lookups, entries


def _results(graph: fx.Graph) -> list[fx.Node]:
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])


def _reached(graph: fx.Graph, origins: Iterable[fx.Node]) -> set[fx.Node]:
    """`origins` and all that is computed from them; of sizes nothing is."""
    reached = set(origins)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not aten.sym_size.int and reached.intersection(node.all_input_nodes):
            reached.add(node)
    return reached


def _ids_alone(node: fx.Node) -> set[fx.Node] | None:
    """The lookups whose ids a node holds, in whatever order and shape; None where it holds anything else."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node) and source.target in LOOKUPS:
            if node.args[1] != 1:
                return None
            found.add(source)
        elif node.target in _HANDED_ON:
            pending += [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        else:
            return None
    return found


def _needed(program: Program, results: Sequence[fx.Node], behind: set[fx.Node]) -> set[fx.Node]:
    """The lookups that `results` are computed from. Raises UnsupportedError where they are computed from anything else of the input."""
    public = set(program.user_inputs())
    inputs = [n for n in placeholders(program.graph) if n.name in public]
    tainted = _reached(program.graph, inputs)
    needed: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending: list[tuple[fx.Node, fx.Node]] = [(node, node) for node in results]
    while pending:
        node, reader = pending.pop()
        if node in seen or node.target is aten.sym_size.int:  # ids have those sizes, too
            continue
        seen.add(node)
        if node.target in LOOKUPS:
            needed.add(node)
        elif node in behind:
            pending += [(n, node) for n in node.all_input_nodes]
        elif node in tainted and node.target not in MADE_LIKE:
            raise UnsupportedError(
                f"split: the decoder would need more than ids: {reader.name!r} ({source_line(reader)}) also reads {node.name!r} "
                f"({source_line(node)}), which is computed from the input without a codebook (a skip connection?); quantize a model whose "
                "decoder reads codes alone, or return this from the model's encoder"
            )
        elif node.target not in MADE_LIKE:
            pending += [(n, node) for n in node.all_input_nodes]
    return needed


def _books(program: Program, lookups: Sequence[fx.Node], entries: dict[str, dict[str, Any]]) -> tuple[Book, ...]:
    names, symbols = axis_names(program), _symbols(program)
    taken = {s.name for s in (*program.inputs, *program.outputs)} | {n.name for n in program.graph.nodes} | {"lost"}
    books = []
    for node in lookups:
        ids = node.meta["val"][1]
        axes = list(ids.shape) if node.target is khtst.step_lookup.default else list(ids.shape[:-1])
        entry = entries[node.name]
        parts = [taken_apart(node, size, names, symbols) for size in axes]
        if sum(len(p) > 1 for p in parts) > 1:
            raise UnsupportedError(
                f"split: codebook {entry['site']!r} has rows of shape {tuple(axes)}; needed: one axis that is a product"
            )
        shape = (*(size for part in parts for size in part), int(entry["levels"]))
        dims = tuple(names.get(str(s), str(s)) if isinstance(s, torch.SymInt) else int(s) for s in shape)
        books.append(Book(node.name, _unused(entry["site"], taken), entry, shape, dims))
    return tuple(books)


def _symbols(program: Program) -> dict[str, Any]:
    """Symbol -> the size it stands for, as inputs have it."""
    public = set(program.user_inputs())
    sizes = [s for n in placeholders(program.graph) if n.name in public for s in n.meta["val"].shape]
    return {str(s): s for s in sizes if isinstance(s, torch.SymInt)}


def _unused(site: str, taken: set[str]) -> str:
    """An identifier after a site that is not taken yet."""
    base = re.sub(r"\W+", "_", site).strip("_") or "ids"
    base = f"ids_{base}" if base[0].isdigit() else base
    name, number = base, 1
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    taken.add(name)
    return name
