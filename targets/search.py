"""Which tile a GEMM kernel is fastest with on this machine: candidates beside the default, in turns, within a time budget.

No candidate changes a result (see Tile), so a choice only has to be fast.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from khtst_compile.errors import LoweringError
from khtst_compile.targets.kernels import gemm_f32, gemm_i8
from khtst_compile.targets.kernels.tiles import Tile
from khtst_compile.targets.rules import GemmSpec
from khtst_compile.targets.single import compile_alone, tensors

NOISE = 0.02
"""Share of time that a choice has to save, and may cost at no number of rows; more where two equal kernels differ by more."""
ROUNDS = 7
TURN_S = 2e-3
"""A turn's least length: the clock and a switch between kernels are then far below NOISE."""
ROWS_TRIED = 8
"""Most rows of a tile tried: every number of rows left over is compiled too."""
MOST_BYTES = 64 << 20
"""Of copies of the weights, so that a kernel finds them where the rest of a program would have left them."""


@dataclass(frozen=True)
class Found:
    """spec: with the tile chosen, or None where the default stays; gain: its time over the default's (1 for the default itself),
    geometric mean over the numbers of rows; tried: candidates measured."""

    spec: GemmSpec
    gain: float
    tried: int


def search(
    spec: GemmSpec, rows: Sequence[int], weight_bytes: int, deadline: float, now: Callable[[], float] = time.monotonic
) -> Found:
    """Look for a tile better than the default at matrices of so many rows, until `deadline` (of `now`).

    weight_bytes: of the program the kernel is part of. Better means: by more than NOISE in the geometric mean, worse by more at no
    number of rows, and again so in a second measurement against the default, since the best of many is partly luck.
    """
    plain = replace(spec, tile=None)
    best, tried, seen = Contender(plain, rows, weight_bytes), 0, {plain.how}
    default, noise = best, max(NOISE, *(abs(math.log(r)) for r in compare(best, best.twin())))
    improved = True
    while improved and now() < deadline:
        improved = False
        for tile in moves(best.spec, rows):
            if now() >= deadline:
                break
            if tile in seen:
                continue
            seen.add(tile)
            try:
                candidate = Contender(replace(plain, tile=tile), rows, weight_bytes)
            except LoweringError:
                continue  # more accumulators than registers, or turns that do not divide
            tried += 1
            if pays(compare(best, candidate), noise):
                best, improved = candidate, True
                break  # the next moves start from here
    if best is default:
        return Found(plain, 1.0, tried)
    # Either may come first: whoever does finds the caches as other work on the machine left them.
    ratios, back = compare(default, best, 2 * ROUNDS), [1 / r for r in compare(best, default, 2 * ROUNDS)]
    return (
        Found(best.spec, _mean([*ratios, *back]), tried)
        if pays(ratios, noise) and pays(back, noise)
        else Found(plain, 1.0, tried)
    )


def pays(ratios: Sequence[float], noise: float = NOISE) -> bool:
    """Whether times over those of what is to be beaten, one a number of rows, are better by more than noise."""
    return _mean(ratios) < 1 - noise and max(ratios) < 1 + noise


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(r) for r in ratios))


def moves(spec: GemmSpec, rows: Sequence[int]) -> Iterator[Tile]:
    """Tiles one step away from that of `spec`, likely ones first; none whose difference these numbers of rows cannot show."""
    how, registers = spec.how, spec.isa.registers
    panel = spec.panels.width * spec.k * (1 if isinstance(spec, gemm_i8.GemmI8) else 4)
    if max(rows) > 1:
        yield from (replace(how, ahead=ahead) for ahead in (0, 1024, 4096, panel))
    if min(rows) < how.rows:
        yield from (replace(how, ahead_few=ahead) for ahead in (0, 512, 1024, 2048))
    yield from (replace(how, unroll=unroll) for unroll in (1, 2, 4))
    for vectors in (1, 2, 3, 4, 6):
        most = min((registers - 2) // vectors, ROWS_TRIED)
        yield from (replace(how, rows=count, vectors=vectors) for count in range(most, max(most - 4, 0), -1))
    row_bytes = spec.k * (np.dtype(spec.isa.codes_dtype).itemsize if isinstance(spec, gemm_i8.GemmI8) else 4)
    if max(rows) * row_bytes > 64 << 10:
        yield from (replace(how, block=kib << 10) for kib in (32, 64, 256, 512))
        yield replace(how, panels_first=not how.panels_first)


class Contender:
    """A compiled kernel with inputs of every number of rows and copies of its weights. Raises LoweringError for a tile that cannot be."""

    def __init__(self, spec: GemmSpec, rows: Sequence[int], weight_bytes: int):
        self.spec, self.rows = spec, tuple(rows)
        rng = np.random.default_rng(0)
        packed: list[Any]
        if isinstance(spec, gemm_i8.GemmI8):
            function = gemm_i8.prim_func(spec)
            weights = rng.integers(-127, 128, (spec.n, spec.k), dtype=np.int8)
            packed = list(gemm_i8.pack(spec, weights, np.full(spec.n, 1e-2, np.float32)))
        else:
            function = gemm_f32.prim_func(spec)
            packed = list(gemm_f32.pack(spec, rng.standard_normal((spec.n, spec.k), np.float32)))
        self._weight_bytes = weight_bytes
        self._call = compile_alone({spec.name: function}, spec.isa)[spec.name]
        self._place(packed)

    def _place(self, packed: list[Any]) -> None:
        """Memory of its own."""
        copies = max(1, min(self._weight_bytes, MOST_BYTES) // packed[0].nbytes)
        self._packed, self._weights, self._next = packed, [tensors(packed) for _ in range(copies)], 0
        self._inputs = {m: self._draw(m, np.random.default_rng(0)) for m in self.rows}

    def twin(self) -> Contender:
        """The same kernel with other memory: what the two differ by is noise."""
        other = copy.copy(self)
        other._place(self._packed)
        return other

    def _draw(self, m: int, rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
        """Arguments before and after the weights."""
        spec, lead = self.spec, self._lead(m)
        arrays: list[Any]
        if isinstance(spec, gemm_i8.GemmI8):
            codes = gemm_i8.store_codes(spec.isa, rng.integers(-127, 128, (*lead, spec.k), dtype=np.int8))
            arrays = [codes, np.full(lead, 1e-2, np.float32)]
        else:
            arrays = [rng.standard_normal((*lead, spec.k), np.float32)]
        after = [np.zeros((*lead, spec.n), np.float32) for _ in range(2 if spec.residual else 1)]
        return tensors(arrays), tensors(after)

    def _lead(self, m: int) -> tuple[int, ...]:
        """Leading sizes whose product is m: the kernel only sees rows."""
        shape = self.spec.lead.shape or (None,) * self.spec.lead.ndim
        free = [i for i, size in enumerate(shape) if size is None]
        sizes = [1 if size is None else size for size in shape]
        if free:
            sizes[free[-1]] = m // math.prod(sizes)
        return tuple(sizes)

    def seconds(self, m: int, least: float) -> float:
        """CPU seconds of one call, over at least `least` seconds."""
        before, after = self._inputs[m]
        count, started = 0, time.thread_time()
        while (spent := time.thread_time() - started) < least or not count:
            self._call(*before, *self._weights[self._next], *after)
            self._next = (self._next + 1) % len(self._weights)
            count += 1
        return spent / count


def compare(first: Contender, second: Contender, rounds: int = ROUNDS) -> list[float]:
    """Time of `second` over that of `first`, one a number of rows: medians over rounds in which they take turns, either first."""
    found: dict[int, list[float]] = {m: [] for m in first.rows}
    for contender in (first, second):
        for m in first.rows:
            contender.seconds(m, 0.0)
    for number in range(rounds):
        pair = (first, second) if number % 2 else (second, first)
        for m, ratios in found.items():
            spent = {id(contender): contender.seconds(m, TURN_S) for contender in pair}
            ratios.append(spent[id(second)] / spent[id(first)])
    return [statistics.median(ratios) for ratios in found.values()]
