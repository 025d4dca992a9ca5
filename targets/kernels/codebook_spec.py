"""What one codebook kernel is: its sizes, its scratch memory, and the numbers it is tuned with."""

from __future__ import annotations

from dataclasses import dataclass

from khtst_compile.errors import LoweringError
from khtst_compile.quant.codebook_int8 import GROUP, STEPS
from khtst_compile.targets.isa import Isa

from .coarse import Coarse
from .rows import LEAD2, Lead, round_up
from .tiles import Panels, panels_of
from .vec import LANES, Expr

BLOCK = 32
"""Rows that go through all levels together: their scores for 1,024 codes take 128 KiB of a 512 KiB L2, the codebook in int8 another 256."""
LOOKED_AT = 64
"""Scores in a turn of the loops that look for the largest and for open ones: bits of a register."""
ASKED_CODES, ASKED_BYTES = 8, 1024
"""Open codes of a row, and bytes of each, that are asked for ahead: what is left of a row is decided after its whole block was narrowed."""
FACTS = 9
"""Numbers of a level: `Int8Codebook.part`; largest |e[i] - e[j]|, |c[i] - c[j]|, |e|, |c - mean|, |c|, |bias|; turns of a block; |mean|."""


@dataclass(frozen=True)
class Codebook:
    """One codebook kernel.

    isa:        instruction set.
    levels:     how many codebooks a row goes through.
    codes:      K, rows of each; features: d of a vector; value_features: of a value.
    lead:       leading dimensions.
    running:    what is left for the next level is (what was left) - value, else z - the sum of values.
    int8:       coarse scores in int8, else in float32.
    values_out, ids_out: what is written.
    name:       of the function.
    """

    isa: Isa
    levels: int
    codes: int
    features: int
    value_features: int
    lead: Lead = LEAD2
    running: bool = True
    int8: bool = True
    values_out: bool = True
    ids_out: bool = True
    name: str = "codebook_lookup"

    def __post_init__(self) -> None:
        if min(self.levels, self.codes, self.features, self.value_features) < 1:
            raise LoweringError(
                f"{self.name}: {self.levels} levels of {self.codes} codes of {self.features} features, values of {self.value_features}; "
                "needed at least 1 of each"
            )
        if self.levels > 1 and self.value_features != self.features:
            raise LoweringError(
                f"{self.name}: values have {self.value_features} features; needed {self.features}, as another level follows"
            )
        if not (self.values_out or self.ids_out):
            raise LoweringError(f"{self.name}: neither values nor ids are written; needed: one of them")

    @property
    def coarse(self) -> Coarse:
        """The int8 scores."""
        return Coarse(self.isa, self.codes, self.features)

    @property
    def panels(self) -> Panels:
        """The cut of the codebook."""
        return self.coarse.panels if self.int8 else panels_of(self.codes, self.isa)

    @property
    def padded(self) -> int:
        """float32 of a row in scratch memory and in the exact codebook; whole parts (`_longest_part`)."""
        return round_up(self.features, GROUP * STEPS if self.int8 and self.coarse.bytes else LANES)

    @property
    def value_padded(self) -> int:
        """float32 of a row of values."""
        return round_up(self.value_features)

    @property
    def scores(self) -> int:
        """Elements of a row of coarse scores."""
        return round_up(self.panels.padded, LOOKED_AT)


@dataclass(frozen=True)
class Parts:
    """What the phases share. flat: arguments by name. Of a block of rows: left, total, scores: float32 matrices; pair, single: bounds;
    scales: of the codes; codes: in int8; lost: int32; found, counts: int32, the open codes of each row and how many they are."""

    flat: dict[str, Expr]
    left: Expr
    total: Expr
    scores: Expr
    pair: Expr
    single: Expr
    scales: Expr
    codes: Expr
    lost: Expr
    found: Expr
    counts: Expr
