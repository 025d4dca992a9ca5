"""How x86 sums products of int8: each instruction beside its executable meaning in plain vectors.

dpbusd   acc += sum of 4 products of an unsigned and a signed byte (vpdpbusd). Codes are stored + 128, so the sums
         start at -128 * (sum of the column's weights).
maddwd   acc += sum of 2 products of int16 (vpmaddwd, vpaddd).
pairs    Winograd's inner product ("A new algorithm for inner product", 1968): with u = (x0 + y2, x1 + y3) and
         v = (x2 + y0, x3 + y1), u . v = x . y + (x0 x2 + x1 x3) + (y0 y2 + y1 y3). One vpmaddwd does four products;
         the other three operations are additions, which more ports execute, so it is 14 % above "maddwd" on Zen 3.
         The terms of a row and of a column are subtracted where the sums start.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
from tvm.tirx.script import builder as T

from .dot_base import Codes, Dot, Sums
from .vec import Expr, i32, lane, shuffle, small, span, splat, store


@dataclass(frozen=True)
class X86Dot(Dot):
    """One way to sum on x86.

    intrinsic: LLVM's name.
    parts:     vectors of weights of one step: 1, or 2 for "pairs" (k 0, 1 and k 2, 3).
    baseline:  every machine the project runs on has it (AVX2); it is never emulated.
    """

    intrinsic: str = ""
    parts: int = 1
    baseline: bool = False

    @property
    def _taken(self) -> int:
        return self.group // self.parts

    def _parts(self, dtype: str) -> str:
        return f"{dtype}x{self.lanes * self._taken}"

    @property
    def _codes_dtype(self) -> str:
        return "uint8" if self.kind == "dpbusd" else "int16"

    def codes(self, buffer: Expr, start: Expr) -> list[Expr]:
        """One step's stored codes from element `start` of the flat buffer, in every lane."""
        groups = [T.reinterpret("int32", buffer[span(start + p * self._taken, self._taken)]) for p in range(self.parts)]
        return [T.Bind(T.reinterpret(self._parts(self._codes_dtype), splat(group, self.lanes))) for group in groups]

    def weights(self, buffer: Expr, start: Expr) -> list[Expr]:
        """One step's packed weights of one vector of columns, from byte `start` of the flat int8 buffer."""
        size = self.bytes // self.parts
        packed = [buffer[span(start + p * size, size)] for p in range(self.parts)]
        return [T.Bind(p if self.kind == "dpbusd" else T.cast(p, self._parts("int16"))) for p in packed]

    @property
    def chain_macs(self) -> int:
        return self.lanes * self.group

    def chain(self, old: Expr, weights: Expr, emulated: bool) -> Expr:
        given = T.reinterpret(self._parts(self._codes_dtype), old)
        return self.accumulate([old], [given] * self.parts, [self.weights(weights, T.int64(0))], emulated)[0]

    def begin(self, codes: Codes, first: Expr, count: int, starts: list[Expr | None], emulated: bool) -> Sums:
        return _X86Sums(self, codes, first, count, starts, emulated)

    def accumulate(self, acc: list[Expr], codes: list[Expr], weights: list[list[Expr]], emulated: bool) -> list[Expr]:
        """acc + one row's products with each vector of columns, int32; one entry of `acc` and `weights` a vector."""
        if self.kind == "pairs":
            # All the sums first: every product is then ready to start.
            left, right = ([T.Bind(codes[p] + w[1 - p]) for w in weights] for p in (0, 1))
        else:
            left, right = [codes[0] for _ in weights], [w[0] for w in weights]
        if emulated and not self.baseline:
            return [self._meaning(*each) for each in zip(acc, left, right, strict=True)]
        result = f"int32x{self.lanes}"
        if self.kind == "dpbusd":
            return [T.call_llvm_pure_intrin(result, self.intrinsic, *each) for each in zip(acc, left, right, strict=True)]
        products = [T.call_llvm_pure_intrin(result, self.intrinsic, *each) for each in zip(left, right, strict=True)]
        return [a + p for a, p in zip(acc, products, strict=True)]

    def _meaning(self, acc: Expr, left: Expr, right: Expr) -> Expr:
        """The instruction from shifts, multiplications and additions of int32 lanes."""
        vector, width = f"int32x{self.lanes}", 32 // self._taken
        a, b = T.Bind(T.reinterpret(vector, left)), T.Bind(T.reinterpret(vector, right))

        def element(value: Expr, index: int, signed: bool) -> Expr:
            if signed:
                top = T.shift_left(value, i32(32 - width * (index + 1), self.lanes))
                return T.shift_right(top, i32(32 - width, self.lanes))
            low = T.shift_right(value, i32(width * index, self.lanes))
            return T.bitwise_and(low, i32((1 << width) - 1, self.lanes))

        for index in range(self._taken):
            acc = acc + element(a, index, signed=self.kind != "dpbusd") * element(b, index, signed=True)
        return acc

    def prepare(self, codes: Expr, rows: Expr, dims: list[Expr], width: int) -> Codes:
        """For "pairs", emit x0 x2 + x1 x3 of every row, summed over its groups: the terms of a row."""
        if self.kind != "pairs":
            return Codes(codes, width)
        # TVM moves the allocation to the top, where only the arguments' dimensions are defined; 0 bytes would fail.
        terms = T.alloc_buffer((reduce(operator.mul, dims) + 1,), "int32", scope="global")
        swapped = [i ^ 1 for i in range(self.lanes)]
        with T.serial(T.int64(0), rows) as row:
            acc = small(self.lanes, "int32")
            store(acc, i32(0, self.lanes), 0)
            with T.serial(T.int64(0), T.int64(width // (2 * self.lanes))) as v:
                x = T.Bind(codes[span(row * width + v * (2 * self.lanes), 2 * self.lanes)])
                across = shuffle(T.reinterpret(f"int32x{self.lanes}", x), swapped)
                y = T.reinterpret(self._parts("int16"), across)
                products = T.call_llvm_pure_intrin(f"int32x{self.lanes}", self.intrinsic, x, y)
                store(acc, acc[span(0, self.lanes)] + products, 0)
            # Odd lanes repeat the even ones, so distance 1 stays out of the sum.
            total = T.Bind(acc[span(0, self.lanes)])
            for distance in (4, 2):
                total = T.Bind(total + shuffle(total, [i ^ distance for i in range(self.lanes)]))
            T.buffer_store(terms, lane(total), [row])
        return Codes(codes, width, terms)

    def order(self, panels: int, vectors: int, steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks of the padded (n, k) weights, and the order of these axes in which `weights` reads them."""
        return (panels, vectors, self.lanes, steps, self.parts, self._taken), (0, 3, 1, 4, 2, 5)

    def column_start(self, weights: npt.NDArray[np.int8], offset: int) -> npt.NDArray[np.int32] | None:
        if self.kind == "pairs":
            y = weights.astype(np.int32).reshape(len(weights), -1, 2, 2)
            products = y[:, :, 0] * y[:, :, 1]
            return np.asarray(-products.sum(axis=(1, 2)), np.int32)
        return super().column_start(weights, offset)


class _X86Sums(Sums):
    def __init__(self, dot: X86Dot, codes: Codes, first: Expr, count: int, starts: list[Expr | None], emulated: bool):
        self._dot, self._codes, self._first, self._emulated = dot, codes, first, emulated
        self._acc = [[small(dot.lanes, "int32") for _ in starts] for _ in range(count)]
        for j, start in enumerate(starts):
            value = i32(0, dot.lanes) if start is None else start
            for i, row in enumerate(self._acc):
                store(row[j], value if codes.terms is None else value - splat(codes.terms[first + i], dot.lanes), 0)

    def step(self, turn: Expr, place: int, unroll: int, weights: Expr, at: Expr) -> None:
        dot, codes = self._dot, self._codes
        columns = [dot.weights(weights, at + j * dot.bytes) for j in range(len(self._acc[0]))]
        for i, row in enumerate(self._acc):
            given = dot.codes(codes.buffer, (self._first + i) * codes.width + (turn * unroll + place) * dot.group)
            sums = dot.accumulate([a[span(0, dot.lanes)] for a in row], given, columns, self._emulated)
            for a, value in zip(row, sums, strict=True):
                store(a, value, 0)

    def result(self) -> list[list[Expr]]:
        return [[a[span(0, self._dot.lanes)] for a in row] for row in self._acc]


# All a single row does is read weights. Hardware prefetching gets 1.2 to 1.25 times the bytes from four places that it gets from one; six
# are no faster.
_STREAMS = 4

DOTS = {
    ("pairs", 256): X86Dot(
        "pairs",
        8,
        4,
        4,
        unroll=2,
        intrinsic="llvm.x86.avx2.pmadd.wd",
        prefetch=True,
        whole_rows=True,
        streams=_STREAMS,
        parts=2,
        baseline=True,
    ),
    ("maddwd", 512): X86Dot("maddwd", 16, 2, 6, intrinsic="llvm.x86.avx512.pmaddw.d.512", streams=_STREAMS),
    ("dpbusd", 256): X86Dot("dpbusd", 8, 4, 6, intrinsic="llvm.x86.avx512.vpdpbusd.256", streams=_STREAMS),
    ("dpbusd", 512): X86Dot("dpbusd", 16, 4, 6, intrinsic="llvm.x86.avx512.vpdpbusd.512", streams=_STREAMS),
}
