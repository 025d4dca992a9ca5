"""The two products of a mixture's experts: panels of all experts' matrices one after the other, and rows sorted by expert.

A matrix of n outputs is cut into panels as that of one layer is; `halves` matrices that are needed together (gate and up) lie panel by
panel side by side. Panel `(expert * count + panel) * halves + half` of the whole is then read like one of a single large layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.layout import Layout, Packed
from khtst_compile.targets.isa import Isa

from . import gemm_i8
from .dot import Codes, dot_of
from .rows import Arguments, Lead, round_up
from .step_order import step_order
from .tiles import Panels, Tile, multiply_add, panels_of
from .vec import Expr, Floats, fma, span, splat, to_float

Value = tuple[int, int, int, Expr]
"""Panel of those side by side, row, vector of columns, and the value there."""


@dataclass(frozen=True)
class Product(ABC):
    """Rows of k features times the matrices (experts, halves, n, k).

    tag: of the names of its arguments.
    """

    isa: Isa
    experts: int
    halves: int
    n: int
    k: int
    tag: str

    @property
    @abstractmethod
    def panels(self) -> Panels:
        """The cut of one half of one expert's outputs."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Elements of a stored row."""

    @property
    @abstractmethod
    def streams(self) -> int:
        """Panels that single rows walk side by side."""

    @property
    @abstractmethod
    def aligned(self) -> int:
        """What the first row of an expert is a multiple of."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Of stored rows."""

    @property
    def count(self) -> int:
        """Panels in all."""
        return self.experts * self.halves * self.panels.count

    def panel(self, expert: Expr, panel: Expr, half: int) -> Expr:
        """The number of a panel in the whole."""
        return T.Bind((expert * self.panels.count + panel) * self.halves + half)

    def in_panels(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(experts, halves, n, ..) -> (count * width of a panel, ..), zeros where there are no columns."""
        panels, extra = self.panels, self.panels.padded - self.n
        padded = np.pad(values, [(0, 0), (0, 0), (0, extra), *((0, 0) for _ in values.shape[3:])])
        cut = padded.reshape(self.experts, self.halves, panels.count, panels.width, *values.shape[3:])
        return np.ascontiguousarray(cut.swapaxes(1, 2)).reshape(-1, *values.shape[3:])

    def layout(self, k: int, blocks: Sequence[int], axes: Sequence[int]) -> Layout:
        """blocks, axes: of a matrix (padded n, k), panels first, vectors second; here of all of them."""
        panels, vectors, *rest = blocks
        assert axes[0] == 0, "panels come first"
        order = [0, 2, 1, *(a + 2 for a in axes[1:])]
        return Layout(
            (self.experts, self.halves, self.panels.padded, k), (self.experts, self.halves, panels, vectors, *rest), tuple(order)
        )

    @abstractmethod
    def declare(self, args: Arguments) -> None:
        """Declare the arrays of `pack`."""

    @abstractmethod
    def pack(self, weights: npt.NDArray[Any], scale: Floats | None, bias: Floats | None) -> list[npt.NDArray[Any] | Packed]:
        """weights: (experts, halves, n, k), scale and bias: (experts, halves, n) -> the constant arguments, in order."""

    @abstractmethod
    def prepare(self, rows: Expr, count: Expr, most: Expr, pitch: int) -> Any:
        """Emit what is to be done to `count` of at most `most` stored rows first; returns what `values` takes as rows.

        rows: flat, with `pitch` elements between their starts: `width` of int8.
        """

    @abstractmethod
    def values(
        self, flat: dict[str, Expr], rows: Any, scales: Expr | None, side: Sequence[Expr], firsts: Sequence[Expr], count: int
    ) -> Iterator[Value]:
        """Emit tiles of `count` rows side by side: of the panels `side`, from row `firsts` each. scales: of rows, flat, or None."""


@dataclass(frozen=True)
class Int8Product(Product):
    """fma(float(acc), row scale * column scale, bias), acc exact."""

    @cached_property
    def _spec(self) -> gemm_i8.GemmI8:
        panels, dot = self.panels, dot_of(self.isa)
        steps_width = panels.vectors * dot.bytes
        ahead = round_up(self.k, gemm_i8.CODES_ALIGNMENT) // dot.group * steps_width if dot.prefetch else 0
        tile = Tile(dot.rows, panels.vectors, dot.unroll, ahead, gemm_i8.AHEAD_FEW if dot.prefetch else 0)
        return gemm_i8.GemmI8(self.isa, self.count * panels.width, self.k, Lead(1), tile=tile, name=f"experts_{self.tag}")

    @cached_property
    def panels(self) -> Panels:
        dot = dot_of(self.isa)
        return panels_of(self.n, self.isa, dot.rows, most=dot.vectors)

    @property
    def width(self) -> int:
        return self._spec.codes_width

    @property
    def streams(self) -> int:
        return dot_of(self.isa).streams

    @property
    def aligned(self) -> int:
        return dot_of(self.isa).aligned

    @property
    def dtype(self) -> str:
        return self.isa.codes_dtype

    def _names(self) -> dict[str, tuple[int, str]]:
        """Argument -> elements and dtype."""
        spec, dot, columns = self._spec, dot_of(self.isa), self.count * self.panels.width
        names = {"weights": (self.count * spec.steps * self.panels.vectors * dot.bytes, "int8")}
        if dot.pairs:
            names["order"] = (self.count * (1 + spec.steps), "int16")
        if spec.needs_compensation:
            names["compensation"] = (columns, "int32")
        return {**names, "w_scale": (columns, "float32"), "bias": (columns, "float32")}

    def declare(self, args: Arguments) -> None:
        for name, (size, dtype) in self._names().items():
            args.vector(f"{self.tag}_{name}", size, dtype)

    def pack(self, weights: npt.NDArray[Any], scale: Floats | None, bias: Floats | None) -> list[npt.NDArray[Any] | Packed]:
        assert scale is not None
        shape = (self.experts, self.halves, self.n)
        if weights.shape != (*shape, self.k) or scale.shape != shape:
            raise LoweringError(f"experts: weights {weights.shape}, scales {scale.shape}; needed {(*shape, self.k)} and {shape}")
        if weights.dtype != np.int8 or weights.min() < -gemm_i8.LIMIT:
            raise LoweringError(f"experts: weights are {weights.dtype}, least {weights.min()}; needed int8 >= -127")
        spec, dot, panels = self._spec, dot_of(self.isa), self.panels
        order = self.layout(spec.steps * dot.group, *dot.order(panels.count, panels.vectors, spec.steps))
        packed: list[npt.NDArray[Any] | Packed] = [Packed(order.apply(weights), weights, order)]
        if dot.pairs or spec.needs_compensation:
            padded = np.zeros((self.count * panels.width, spec.steps * dot.group), np.int8)
            padded[:, : self.k] = self.in_panels(weights)
            if dot.pairs:
                packed.append(step_order(padded, panels.width, dot.group).reshape(-1))
            start = dot.column_start(padded, self.isa.codes_offset)
            if start is not None:
                packed.append(start)
        given = np.zeros(shape, np.float32) if bias is None else bias
        return [*packed, self.in_panels(scale.astype(np.float32)), self.in_panels(given.astype(np.float32))]

    def prepare(self, rows: Expr, count: Expr, most: Expr, pitch: int) -> Codes:
        assert pitch == self.width, "codes lie row by row"
        return dot_of(self.isa).prepare(rows, count, [most], self.width)

    def values(
        self, flat: dict[str, Expr], rows: Any, scales: Expr | None, side: Sequence[Expr], firsts: Sequence[Expr], count: int
    ) -> Iterator[Value]:
        assert scales is not None
        mine = {name: flat[f"{self.tag}_{name}"] for name in self._names()}
        sums = gemm_i8.tile_sums(self._spec, mine, rows, list(side), list(firsts), count)
        lanes = self.panels.lanes
        for place, (panel, first, acc) in enumerate(zip(side, firsts, sums, strict=True)):
            column = T.Bind(panel * self.panels.width)
            for j in range(self.panels.vectors):
                scale = T.Bind(mine["w_scale"][span(column + j * lanes, lanes)])
                bias = T.Bind(mine["bias"][span(column + j * lanes, lanes)])
                for i in range(count):
                    both = T.Bind(splat(scales[first + i], lanes) * scale)
                    yield place, i, j, fma(to_float(acc[i][j]), both, bias)


@dataclass(frozen=True)
class FloatProduct(Product):
    """Sums of fused multiply-adds from the bias, over k in order."""

    @cached_property
    def panels(self) -> Panels:
        return panels_of(self.n, self.isa)

    @property
    def width(self) -> int:
        return round_up(self.k)

    @property
    def streams(self) -> int:
        return 1

    @property
    def aligned(self) -> int:
        return 1

    @property
    def dtype(self) -> str:
        return "float32"

    def declare(self, args: Arguments) -> None:
        columns = self.count * self.panels.width
        args.vector(f"{self.tag}_weights", columns * self.k)
        args.vector(f"{self.tag}_bias", columns)

    def pack(self, weights: npt.NDArray[Any], scale: Floats | None, bias: Floats | None) -> list[npt.NDArray[Any] | Packed]:
        shape = (self.experts, self.halves, self.n)
        if weights.shape != (*shape, self.k):
            raise LoweringError(f"experts: weights {weights.shape}; needed {(*shape, self.k)}")
        panels = self.panels
        order = self.layout(self.k, (panels.count, panels.width, self.k), (0, 2, 1))
        given = np.zeros(shape, np.float32) if bias is None else bias
        return [Packed(order.apply(weights), weights, order), self.in_panels(given.astype(np.float32))]

    def prepare(self, rows: Expr, count: Expr, most: Expr, pitch: int) -> tuple[Expr, int]:
        return rows, pitch

    def values(
        self, flat: dict[str, Expr], rows: Any, scales: Expr | None, side: Sequence[Expr], firsts: Sequence[Expr], count: int
    ) -> Iterator[Value]:
        lanes, width = self.panels.lanes, self.panels.width
        buffer, pitch = rows
        bias, weights = flat[f"{self.tag}_bias"], flat[f"{self.tag}_weights"]
        for place, (panel, first) in enumerate(zip(side, firsts, strict=True)):
            column = T.Bind(panel * width)
            (acc,) = multiply_add(
                self.panels,
                count,
                T.int64(self.k),
                lambda _, j, column=column: bias[span(column + j * lanes, lanes)],  # type: ignore[misc]
                lambda i, k, first=first: buffer[(first + i) * pitch + k],  # type: ignore[misc]
                weights,
                [T.Bind(column * self.k)],
            )
            for i in range(count):
                for j in range(self.panels.vectors):
                    yield place, i, j, acc[i][j][span(0, lanes)]
