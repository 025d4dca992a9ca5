"""Codebooks during calibration: every vector's id by the model's own arithmetic against the frozen lookup's, in a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from khtst_compile.codebooks.found import Codebook, Level, Steps, Vectors
from khtst_compile.ops.codebook import lost_rows, nearest, score_error, step_lookup_reference
from khtst_compile.reservoir import Reservoir

UNIT = 2.0**-24  # half a unit in the last place of 1
STEP_SLACK = (
    2.0**-21
)  # how near, relative to the larger of it and 1, a feature is to a threshold for its digit to be a matter of rounding


@dataclass
class CodebookStats:
    """What calibration saw of one codebook.

    vectors: real (unpadded) ones, lost: those among them that no code can be given to; counts: per level, (K,) int64, how often each code
    was chosen; near_ties: vectors for which the model's own float32 scores and the lookup's decide differently within the rounding error
    of both; differ: those for which that is no explanation, example: the first of them in words. value_ulp: largest distance of a value
    from the model's, in units in the last place. rows: (n, d) float32, a bounded uniform sample of the vectors.
    """

    codebook: Codebook
    counts: list[torch.Tensor]
    vectors: int = 0
    lost: int = 0
    near_ties: int = 0
    differ: int = 0
    example: str = ""
    value_ulp: float = 0.0
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def perplexity(counts: torch.Tensor) -> float:
    """counts: (K,) int64 -> exp of the entropy of the shares of codes: from 1 to the number of codes; 0 where nothing was counted."""
    total = int(counts.sum())
    return float(torch.special.entr(counts.double() / total).sum().exp()) if total else 0.0


class Watch:
    """Judges one codebook batch by batch."""

    def __init__(self, codebook: Codebook, size: int):
        self.codebook = codebook
        features = codebook.steps.shape[0] if isinstance(codebook, Steps) else codebook.levels[0].codes.shape[1]
        self._kept = Reservoir(size, features)
        sizes = [] if isinstance(codebook, Steps) else [len(level.codes) for level in codebook.levels]
        self.stats = CodebookStats(codebook, [torch.zeros(n, dtype=torch.int64) for n in sizes])
        if isinstance(codebook, Steps):
            codes = int((step_counts(codebook) - 1) @ codebook.basis.long()) + 1
            self.stats.counts = [torch.zeros(codes, dtype=torch.int64)] if codes <= MOST_COUNTED else []

    def needs(self) -> set[str]:
        """Names of the nodes whose values `see` wants."""
        last = self.codebook.values[:1] if isinstance(self.codebook, Steps) else self.codebook.levels[-1].values[:1]
        return {self.codebook.z, *self.codebook.anchors, *last}

    def see(self, values: Mapping[str, torch.Tensor], real: torch.Tensor, keys: torch.Tensor) -> None:
        """values: of the nodes in `needs`; real: (n,) bool, rows that are no padding; keys: (n,) float32, random ones for the sample."""
        book, stats = self.codebook, self.stats
        head = book.head if isinstance(book, Vectors) else None
        z = values[book.z]
        ids = [values[name] for name in book.anchors]
        held = book.values if isinstance(book, Steps) else book.levels[-1].values
        value = values[held[0]] if held else None
        if head is not None:
            index, heads = head
            z, ids = z[index], [i.reshape(heads, -1)[index] for i in ids]
            value = None if value is None else value.reshape(heads, -1, value.shape[-1])[index]
        rows = z.detach().reshape(-1, z.shape[-1])
        seen = real.nonzero().flatten()
        rows, keys = rows[seen], keys[seen]
        chosen = [i.reshape(-1)[seen] for i in ids]
        wanted = None if value is None else value.detach().reshape(len(real), -1)[seen]
        lost = rows.isnan().any(-1) if isinstance(book, Steps) else lost_rows(rows)
        self._kept.offer(rows, torch.where(lost, torch.inf, keys))
        stats.vectors += len(rows)
        if isinstance(book, Steps):
            self._judge_steps(book, rows, chosen[0], wanted, lost)
        else:
            self._judge_vectors(book, rows, chosen, wanted, lost)

    def result(self) -> CodebookStats:
        self.stats.rows = self._kept.rows
        return self.stats

    def _judge_vectors(
        self, book: Vectors, rows: torch.Tensor, chosen: list[torch.Tensor], wanted: torch.Tensor | None, lost: torch.Tensor
    ) -> None:
        stats = self.stats
        left, total, same = rows, None, torch.ones(len(rows), dtype=torch.bool)
        for number, level in enumerate(book.levels):
            lost = lost | lost_rows(left)
            left = left.masked_fill(lost[:, None], 0.0)
            ids = nearest(left, level.codes, level.bias).long()
            stats.counts[number] += torch.bincount(ids[~lost], minlength=len(level.codes))
            other = (ids != chosen[number]) & ~lost & same
            if bool(other.any()):
                at = other.nonzero().flatten()
                tie = _near_tie(left[at], ids[at], chosen[number][at], level, book)
                stats.near_ties += int(tie.sum())
                stats.differ += int((~tie).sum())
                if not bool(tie.all()) and not stats.example:
                    row = int(at[~tie][0])
                    where = f"vector {stats.vectors - len(rows) + row}, level {number}"
                    stats.example = f"{where}: the model chooses {int(chosen[number][row])}, the lookup {int(ids[row])}"
                same &= ~other
            value = level.table[ids]
            total = value if total is None else total + value
            if number + 1 < len(book.levels):
                left = left - value if book.running else rows - total
        stats.lost += int(lost.sum())
        if wanted is not None and total is not None:
            self._judge_values(total[same & ~lost], wanted[same & ~lost])

    def _judge_steps(
        self, book: Steps, rows: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor | None, lost: torch.Tensor
    ) -> None:
        stats = self.stats
        values, ids = step_lookup_reference(rows, book.thresholds, book.steps, book.basis)
        if stats.counts:
            stats.counts[0] += torch.bincount(ids[~lost].long(), minlength=len(stats.counts[0]))
        other = (ids.long() != chosen.long()) & ~lost
        if bool(other.any()):
            near = (rows[:, :, None] - book.thresholds).abs() <= STEP_SLACK * book.thresholds.abs().clamp(min=1.0).nan_to_num(
                posinf=1.0
            )
            tie = near.flatten(1).any(-1)[other]
            stats.near_ties += int(tie.sum())
            stats.differ += int((~tie).sum())
            if not bool(tie.all()) and not stats.example:
                row = int(other.nonzero().flatten()[~tie][0])
                where = f"vector {stats.vectors - len(rows) + row}"
                stats.example = f"{where}: the model chooses {int(chosen[row])}, the lookup {int(ids[row])}"
        stats.lost += int(lost.sum())
        if wanted is not None:
            good = ~other & ~lost
            self._judge_values(values[good], wanted[good])

    def _judge_values(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if found.numel():
            self.stats.value_ulp = max(self.stats.value_ulp, float(ulps(found, wanted).max()))


MOST_COUNTED = 1 << 14  # codes of a grid whose use is counted one by one


def step_counts(book: Steps) -> torch.Tensor:
    """(d,) int64: how many steps each feature has."""
    return book.thresholds.isfinite().sum(-1) + 1


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """|found - wanted| in units in the last place of the larger, both float32 of one shape; infinite where only one is a number."""
    size = torch.maximum(found.abs(), wanted.abs()).double().clamp(min=2.0**-126)
    unit = torch.exp2(torch.floor(torch.log2(size)) - 23)
    off = (found.double() - wanted.double()).abs() / unit
    return torch.where(found.isnan() & wanted.isnan(), 0.0, off).nan_to_num(nan=torch.inf)


def _near_tie(z: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, level: Level, book: Vectors) -> torch.Tensor:
    """z: (n, d); ours, theirs: (n,) ids -> (n,) bool: whether the scores of both are within what rounding can do to them.

    The lookup's scores are off by `score_error`; the model's by the same and, where it takes distances, by that of three squares of
    sizes up to (|z| + |c|)^2 / 2, their sum and a root.
    """
    wide, codes = z.double(), level.codes.double()
    first, second = codes[ours], codes[theirs]
    gap = (wide * (first - second)).sum(-1)
    shift = torch.zeros_like(gap)
    if level.bias is not None:
        gap = gap + (level.bias[ours].double() - level.bias[theirs].double())
        shift = torch.maximum(level.bias[ours].abs(), level.bias[theirs].abs()).double()
    length = wide.square().sum(-1).sqrt()
    code = torch.maximum(first.square().sum(-1), second.square().sum(-1)).sqrt()
    relative = score_error(z.shape[1])
    error = length * code * relative + (length * code + shift) * UNIT
    model = error + book.slack
    if book.euclidean:
        model = model + (length + code).square() / 2 * (relative + 8 * UNIT)
    return (gap <= 2 * model) & (gap >= -2 * error)
