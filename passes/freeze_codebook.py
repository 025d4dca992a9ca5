"""`freeze_codebook`: codebooks of a trained model to constant tables and integer ids.

argmax(scores of z against constant codes), and what is looked up with it -> khtst.codebook_lookup(z, codes, bias, table); functions of
steps -> khtst.step_lookup. Residual stacks become one lookup. What is proved: on all calibration vectors ids are those of the model's own
eval arithmetic, but for ties within float32's rounding, which are counted, and values are the model's to one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from khtst_compile.calibrate import Stats
from khtst_compile.codebooks.emit import emit_steps, emit_vectors, only_handed_out
from khtst_compile.codebooks.find import find_codebooks
from khtst_compile.codebooks.found import Codebook, Found, Level, Steps, Vectors
from khtst_compile.codebooks.frozen import Tables, digest, lookup, narrowed, pruned, retract, stacked
from khtst_compile.codebooks.watch import CodebookStats, perplexity, step_counts
from khtst_compile.contract import Outcome, Skipped
from khtst_compile.errors import PassError, UsageError
from khtst_compile.linears import is_kept
from khtst_compile.program import Program, Rewriter, call_nodes
from khtst_compile.quant.stiefel import DELTA_ORT, delta_ort

khtst = torch.ops.khtst
LOOKUPS = (khtst.codebook_lookup.default, khtst.step_lookup.default)
ORTHONORMAL = ("auto", "require")
VERSION = 1
WORTH_INT8 = 64 * 64  # codes times features from which a product takes longer than narrowing down
WORTH_SHARE = 1 / 16  # of the codes left open, at most, for scoring them again to be cheap


@dataclass(frozen=True)
class FreezeCodebook:
    """retract: replace codes that should be orthonormal and are not by their polar factor (ids and values move); prune_dead: leave out
    codes that no calibration vector chose; certified: let kernels search in int8 first, "auto" where it pays; orthonormal: "require" of
    every codebook, or "auto" of those that claim it; strict: refuse calibration vectors without a code (NaN) instead of counting them;
    keep: ';'-separated globs of codebooks to leave alone."""

    name: ClassVar[str] = "freeze_codebook"

    retract: bool = False
    prune_dead: bool = False
    certified: bool | str = "auto"
    orthonormal: str = "auto"
    strict: bool = False
    keep: str | None = None

    def check_options(self) -> None:
        if self.certified not in (True, False, "auto"):
            raise UsageError(f"certified is {self.certified!r}; known: auto, true, false")
        if self.orthonormal not in ORTHONORMAL:
            raise UsageError(f"orthonormal is {self.orthonormal!r}; known: {', '.join(ORTHONORMAL)}")

    def requires(self, program: Program) -> None:
        """Applies to every program; where there is no codebook nothing changes."""

    def run(self, program: Program) -> Outcome:
        found = find_codebooks(program, self.keep)
        self._check_keep(found)
        if not found.codebooks:
            return Outcome(program, 0, found.skipped)
        skipped, entries = list(found.skipped), []
        rewriter = Rewriter(program)
        names: dict[str, str] = {}
        for group in _groups(found.codebooks):
            seen = [self._seen(program, book) for book in group]
            for book, stats in zip(group, seen, strict=True):
                self._prove(book, stats)
            if isinstance(group[0], Steps):
                node, renamed = emit_steps(rewriter, group[0])
                entries.append(_steps_entry(group[0], seen[0], node))
            else:
                made, renamed = self._freeze(rewriter, program, group, seen, skipped)
                entries += made
            names.update(renamed)
        after = rewriter.finish()
        for entry in entries:
            entry["node"] = entry["node"].name
        meta = {**after.meta, "codebooks": [*after.meta.get("codebooks", []), *entries]}
        stats_after = None if program.stats is None else _renamed(program.stats, names)
        details = {e["site"]: {k: v for k, v in e.items() if k not in ("site", "counts", "version")} for e in entries}
        return Outcome(replace(after, meta=meta, stats=stats_after), len(entries), tuple(skipped), details)

    def ensures(self, before: Program, after: Program) -> None:
        made = list(call_nodes(after.graph, *LOOKUPS))
        described = {entry["node"] for entry in after.meta.get("codebooks", [])}
        if described != {n.name for n in made}:
            raise PassError(f"lookups {sorted(n.name for n in made)} are in the graph and {sorted(described)} are described")
        for old, new, spec in zip(_results(before), _results(after), before.outputs, strict=True):
            was, now = old.meta["val"], new.meta["val"]
            if was.dtype != now.dtype or was.dim() != now.dim():
                raise PassError(f"output {spec.name!r} was {was.dtype} with {was.dim()} axes and is {now.dtype} with {now.dim()}")

    def _check_keep(self, found: Found) -> None:
        """Raise PassError for a glob that no codebook's site fits."""
        sites = [*(book.site for book in found.codebooks), *(s.site for s in found.skipped)]
        for glob in filter(None, (g.strip() for g in (self.keep or "").split(";"))):
            if not any(is_kept(site, glob) for site in sites):
                raise PassError(f"keep={glob} fits no codebook; there are {', '.join(sites) or 'none'}")

    def _seen(self, program: Program, book: Codebook) -> CodebookStats:
        """What calibration saw of a codebook. Raises PassError where it saw nothing, or another codebook."""
        seen = None if program.stats is None else program.stats.codebooks.get(book.site)
        if seen is None or not seen.vectors:
            raise PassError(
                f"codebook {book.site!r}: no calibration vector has reached it, so nothing proves that its ids stay; calibrate the "
                "program, and let freeze_codebook be the first step of the recipe"
            )
        if not _same(seen.codebook, book):
            raise PassError(
                f"codebook {book.site!r}: it is not the one that calibration saw; let freeze_codebook be the first step of the recipe"
            )
        return seen

    def _prove(self, book: Codebook, seen: CodebookStats) -> None:
        if seen.differ:
            raise PassError(
                f"codebook {book.site!r}: {seen.differ} of {seen.vectors} calibration vectors get another id than from the model, more "
                f"than rounding explains ({seen.example}); needed: none; leave it alone with keep={book.site}"
            )
        if seen.value_ulp > 1:
            raise PassError(
                f"codebook {book.site!r}: a value is {seen.value_ulp:g} units in the last place from the model's; needed: 1 or less; leave "
                f"it alone with keep={book.site}"
            )
        if self.strict and seen.lost:
            raise PassError(
                f"codebook {book.site!r}: {seen.lost} of {seen.vectors} calibration vectors have no code (NaN, infinite or above 1e18); "
                "needed: none, as strict asks; clean the samples"
            )

    def _freeze(
        self,
        rewriter: Rewriter,
        program: Program,
        group: Sequence[Codebook],
        seen: Sequence[CodebookStats],
        skipped: list[Skipped],
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """One codebook of vectors, or the heads of one."""
        books = [book for book in group if isinstance(book, Vectors)]
        entries: list[dict[str, Any]] = []
        frozen: list[tuple[Vectors, Tables, bool]] = []
        for book, stats in zip(books, seen, strict=True):
            levels, deltas = self._orthonormal(book)
            book = replace(book, levels=tuple(levels))
            counts, differ = stats.counts, 0
            if levels != list(books[len(frozen)].levels):
                counts, differ = _moved(books[len(frozen)], book, stats)
            old_ids = None
            if self.prune_dead:
                used = [now + before for now, before in zip(counts, stats.counts, strict=True)]
                book, old_ids = self._prune(program, book, used, skipped)
            share, mean = narrowed(book, stats.rows)
            pays = _size(book) >= WORTH_INT8 and mean <= WORTH_SHARE * max(len(level.codes) for level in book.levels)
            tables = stacked(book.levels)
            frozen.append((book, tables, pays if self.certified == "auto" else bool(self.certified)))
            entries.append(
                {
                    **_entry(book, stats, tables),
                    "delta_ort": deltas,
                    "counts": [c.tolist() for c in counts],
                    "perplexity": [round(perplexity(c), 4) for c in counts],
                    "dead": [(c == 0).nonzero().flatten().tolist() for c in counts],
                    "differ": differ,
                    "certified": frozen[-1][2],
                    "rescored": round(share, 6),
                    "candidates": round(mean, 4),
                    "pruned": old_ids,
                }
            )
            if old_ids is not None:
                entries[-1]["counts"] = [c[ids].tolist() for c, ids in zip(counts, map(torch.tensor, old_ids), strict=True)]
                entries[-1]["dead"] = [[i for i, n in enumerate(c) if not n] for c in entries[-1]["counts"]]
        nodes, renamed = emit_vectors(rewriter, frozen)
        for entry, node in zip(entries, nodes, strict=True):
            entry["node"] = node
        return entries, renamed

    def _orthonormal(self, book: Vectors) -> tuple[list[Level], dict[str, list[float]]]:
        """The levels, projected where asked and needed, with how far each is from orthonormal before and after."""
        before = [delta_ort(level.codes) for level in book.levels]
        levels = list(book.levels)
        wanted = book.claims or self.orthonormal == "require"
        for number, off in enumerate(before):
            if not wanted or off <= DELTA_ORT:
                continue
            if not self.retract:
                at = f" of level {number}" if len(before) > 1 else ""
                why = "it is meant to be" if book.claims else "orthonormal=require asks for it"
                raise PassError(
                    f"codebook {book.site!r}: the Gram matrix{at} is {off:.1e} from the identity; needed: {DELTA_ORT:g} or less, as {why}; "
                    f"project it onto orthonormal matrices with retract=true (--retract), or leave it alone with keep={book.site}"
                )
            levels[number] = retract(book.site, levels[number], book.euclidean)
        return levels, {"before": before, "after": [delta_ort(level.codes) for level in levels]}

    def _prune(
        self, program: Program, book: Vectors, counts: Sequence[torch.Tensor], skipped: list[Skipped]
    ) -> tuple[Vectors, list[list[int]] | None]:
        reader = only_handed_out(program.graph, book)
        if all(bool(c.all()) for c in counts):
            return book, None
        if reader is not None or book.head is not None:
            why = f"its ids are read by {reader}" if reader is not None else "its heads share their number of codes"
            skipped.append(Skipped(book.site, f"not pruned: {why}"))
            return book, None
        if not all(bool(c.any()) for c in counts):
            raise PassError(
                f"codebook {book.site!r}: no calibration vector has a code, so none would be left; calibrate on other samples"
            )
        made = [pruned(level, c) for level, c in zip(book.levels, counts, strict=True)]
        return replace(book, levels=tuple(level for level, _ in made)), [ids for _, ids in made]


def _results(program: Program) -> list[fx.Node]:
    return list(next(n for n in reversed(program.graph.nodes) if n.op == "output").args[0])


def _groups(codebooks: Sequence[Codebook]) -> list[list[Codebook]]:
    """Heads of one argmax together, all else alone."""
    groups: dict[tuple[str, ...], list[Codebook]] = {}
    for book in codebooks:
        groups.setdefault(book.anchors, []).append(book)
    return list(groups.values())


def _same(first: Codebook, second: Codebook) -> bool:
    """Whether two descriptions are of one codebook."""
    if isinstance(first, Steps) or isinstance(second, Steps):
        if not (isinstance(first, Steps) and isinstance(second, Steps)) or first.z != second.z:
            return False
        return torch.equal(first.thresholds.nan_to_num(torch.inf), second.thresholds.nan_to_num(torch.inf))
    return (
        first.z == second.z
        and first.anchors == second.anchors
        and all(
            torch.equal(a.codes, b.codes) and torch.equal(a.table, b.table)
            for a, b in zip(first.levels, second.levels, strict=True)
        )
    )


def _moved(old: Vectors, new: Vectors, seen: CodebookStats) -> tuple[list[torch.Tensor], int]:
    """Counts after a projection, and how many of the sampled vectors it gave another id."""
    before, after = lookup(old, seen.rows)[1], lookup(new, seen.rows)[1]
    counts = [torch.bincount(ids, minlength=len(level.codes)) for ids, level in zip(after, new.levels, strict=True)]
    differ = torch.zeros(len(seen.rows), dtype=torch.bool)
    for first, second in zip(before, after, strict=True):
        if len(first) == len(second) == len(differ):
            differ |= first != second
    return counts, int(differ.sum())


def _size(book: Vectors) -> int:
    codes = book.levels[0].codes
    return max(len(level.codes) for level in book.levels) * codes.shape[1]


def _entry(book: Vectors, seen: CodebookStats, tables: Tables) -> dict[str, Any]:
    features = book.levels[0].codes.shape[1]
    return {
        "site": book.site,
        "version": VERSION,
        "kind": "vectors",
        "source": book.source,
        "levels": len(book.levels),
        "codes": [len(level.codes) for level in book.levels],
        "features": features,
        "value_features": book.levels[0].table.shape[1],
        "scores": "euclidean" if book.euclidean else "inner product",
        "orthonormal": all(delta_ort(level.codes) <= DELTA_ORT for level in book.levels),
        "tight_frame": all(len(level.codes) > features and delta_ort(level.codes) <= DELTA_ORT for level in book.levels),
        "vectors": seen.vectors,
        "lost": seen.lost,
        "near_ties": seen.near_ties,
        "value_ulp": seen.value_ulp,
        "sha256": digest([tables.codes, tables.bias, tables.table]),
        "ids": book.ids,
    }


def _steps_entry(book: Steps, seen: CodebookStats, node: fx.Node) -> dict[str, Any]:
    codes = int(step_counts(book).prod())
    return {
        "site": book.site,
        "node": node,
        "version": VERSION,
        "kind": "steps",
        "source": book.source,
        "levels": 1,
        "codes": [codes],
        "features": len(book.basis),
        "value_features": len(book.basis),
        "scores": "steps",
        "orthonormal": False,
        "tight_frame": False,
        "delta_ort": None,
        "vectors": seen.vectors,
        "lost": seen.lost,
        "counts": [c.tolist() for c in seen.counts],
        "perplexity": [round(perplexity(c), 4) for c in seen.counts],
        "dead": [(c == 0).nonzero().flatten().tolist() for c in seen.counts],
        "differ": 0,
        "near_ties": seen.near_ties,
        "value_ulp": seen.value_ulp,
        "certified": False,
        "rescored": None,
        "candidates": None,
        "pruned": None,
        "sha256": digest([book.thresholds, book.steps, book.basis]),
        "ids": book.ids,
    }


def _renamed(stats: Stats, names: dict[str, str]) -> Stats:
    """Statistics by the names of the new graph: what read the model's value now reads the lookup's."""
    seen = {k: v for k, v in stats.activations.items() if k not in names}
    for old, new in names.items():
        if old in stats.activations:
            kept = seen.get(new)
            now = stats.activations[old]
            if kept is not None:
                now = replace(now, grads={**kept.grads, **now.grads}, held_grads={**kept.held_grads, **now.held_grads})
            seen[new] = now
    return replace(stats, activations=seen)
