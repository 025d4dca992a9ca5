"""Ids of a step_lookup back to values: a table where the grid is small, else digit by digit."""

from __future__ import annotations

import torch
from torch import fx

from khtst_compile.errors import PassError, UnsupportedError
from khtst_compile.program import Rewriter, site_of

aten = torch.ops.aten
TABLE = 1 << 20  # elements of a table written out; 4 MB


def grid_values(rw: Rewriter, node: fx.Node, ids: fx.Node) -> fx.Node:
    """node: a step_lookup; ids: (...) int32 -> values (..., d) float32, those of its steps.

    Raises UnsupportedError where ids do not tell the steps.
    """
    bound = [rw.value(n) for n in node.args[1:4]]  # type: ignore[arg-type]
    thresholds, steps, basis = (b for b in bound if b is not None)
    counts = thresholds.isfinite().sum(-1) + 1
    _check(node, counts, basis)
    codes, features = int(counts.prod()), len(basis)
    site = site_of(node)
    if codes * features <= TABLE:
        rows = torch.arange(codes)[:, None] // basis.clamp(min=1) % counts
        table = steps.gather(1, rows.T).T.contiguous()
        return rw.call(aten.embedding.default, rw.add_tensor(f"{site}_values", table), ids, before=node)
    most = steps.shape[1]
    wide = rw.call(aten.unsqueeze.default, ids, -1, before=node)
    whole = rw.call(aten.floor_divide.default, wide, rw.add_tensor(f"{site}_basis", basis.clamp(min=1)), before=node)
    digits = rw.call(aten.remainder.Tensor, whole, rw.add_tensor(f"{site}_counts", counts.to(torch.int32)), before=node)
    first = torch.arange(features, dtype=torch.int32) * most
    places = rw.call(aten.add.Tensor, digits, rw.add_tensor(f"{site}_first", first), before=node)
    flat = rw.call(aten.embedding.default, rw.add_tensor(f"{site}_steps", steps.reshape(-1, 1)), places, before=node)
    return rw.call(aten.squeeze.dim, flat, -1, before=node)


def _check(node: fx.Node, counts: torch.Tensor, basis: torch.Tensor) -> None:
    """Raise UnsupportedError where two settings of the steps have one id: each place has to be worth all those below it."""
    worth = 1
    for place, count in sorted((int(b), int(c)) for b, c in zip(basis, counts, strict=True) if int(c) > 1):
        if place != worth:
            raise UnsupportedError(
                f"split: ids of codebook {site_of(node)!r} do not tell its steps: places are worth {basis.tolist()} for "
                f"{counts.tolist()} steps; needed: a mixed radix"
            )
        worth *= count
    if worth >= 2**31:
        raise PassError(f"split: codebook {site_of(node)!r} has {worth} codes; needed: less than 2**31")
