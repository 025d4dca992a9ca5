"""Which module of the model a codebook came from, and what that module claims. Structure finds codebooks; classes only name them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

from khtst_compile.codebooks.evaluate import Evaluator
from khtst_compile.program import WRAPPED

_CODEBOOK = re.compile(
    r"quantiz|codebook|^(Residual|GroupedResidual)?(Sim)?(VQ|FSQ|LFQ)$|VectorQuant|FrozenResidual", re.IGNORECASE
)
_ORTHONORMAL = ("StiefelQuantizer", "FrozenQuantizer")
_PARAMETRIZED = "Orthogonal"
_POLAR_PRODUCTS = 8  # a constant that takes this many matrix products is worked out by an iteration
_PRODUCTS = (torch.ops.aten.matmul.default, torch.ops.aten.mm.default)


def stack_of(node: fx.Node) -> list[tuple[str, str]]:
    """The modules a node lies in, outermost first: (dotted path, class name)."""
    found = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        parts = [p for p in str(path).split(".") if p and p != WRAPPED]
        found.append((".".join(parts), name.rsplit(".", 1)[-1]))
    return found


def shared_stack(nodes: Sequence[fx.Node]) -> list[tuple[str, str]]:
    """The modules that all of `nodes` lie in, outermost first."""
    stacks = [stack_of(n) for n in nodes]
    return [entry for entry in stacks[0] if all(entry in s for s in stacks)]


def is_codebook_class(name: str) -> bool:
    return bool(_CODEBOOK.search(name))


def hinted(node: fx.Node) -> bool:
    """Whether a node lies in a module whose class is called like a quantizer."""
    return any(is_codebook_class(name) for path, name in stack_of(node) if path)


def name_sites(codebooks: Sequence[Sequence[fx.Node]]) -> list[tuple[str, str]]:
    """codebooks: the nodes of each -> (site, class): the outermost quantizer that its nodes lie in and no other codebook's do; where
    several share all of theirs, they are numbered."""
    stacks = [shared_stack(nodes) for nodes in codebooks]
    found: list[tuple[str, str]] = []
    for at, stack in enumerate(stacks):
        others = {path for i, other in enumerate(stacks) if i != at for path, _ in other}
        named = [(path, name) for path, name in stack if is_codebook_class(name)]
        inside = [path for path, _ in stack if path and (not named or path.startswith(named[0][0]))]
        site = next((path for path in inside if path not in others), None)
        if site is None and not inside:
            site = codebooks[at][0].name
        elif site is None:
            same = [i for i, other in enumerate(stacks) if inside[-1] in [p for p, _ in other]]
            site = f"{inside[-1]}[{same.index(at)}]"
        found.append((site, named[0][1] if named else "graph"))
    return found


def claims_orthonormal(ev: Evaluator, anchor: fx.Node, origin: fx.Node) -> bool:
    """Whether a codebook is meant to be orthonormal: by its class, by torch's orthogonal parametrization, or by an iteration that
    works it out."""
    if any(name in _ORTHONORMAL for _, name in stack_of(anchor)):
        return True
    behind: set[fx.Node] = set()
    pending = [origin]
    while pending:
        node = pending.pop()
        if node not in behind:
            behind.add(node)
            pending.extend(node.all_input_nodes)
    if sum(n.target in _PRODUCTS for n in behind) >= _POLAR_PRODUCTS:
        return True
    return any(_PARAMETRIZED in name for n in behind for _, name in stack_of(n))
