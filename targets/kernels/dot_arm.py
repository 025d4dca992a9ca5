"""How ARM sums products of int8: each instruction beside its executable meaning in plain vectors.

smull    acc[n] += 16 products of a row and column n in 4 partial sums: smull and smlal2 leave pairs of products in int16 (codes and
         weights are within +-127, so 2 * 127 * 127 = 32,258 fits), sadalp adds neighboring pairs to int32. Four products fit as well
         where their weights are small enough, as nearly all are once steps over k are paired for it (step_order.py): smlal and
         smlal2 add those of a second step before the one sadalp. A register of partial sums belongs to one row and one column; at
         the end a tree of addp brings four columns into one vector. Every 64-bit ARM.
vmull    two products by the names of 32-bit ARM, whose 16 registers hold the sums of two rows.
sdot     acc[n] += 4 products of a row and of each of 4 columns; a row's 4 codes are one 32-bit lane of a register that holds 16.
smmla    acc[2 x 2] += 8 products of each of 2 rows and 2 columns. Rows are interleaved in pairs before anything else, once for all
         panels, since their 8 codes have to stand side by side in one register.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce

from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError

from .dot_base import Codes, Dot, Sums
from .smull_pair import pair_name, pair_registers, pair_source
from .vec import Expr, i32, keep, lanes_of, shuffle, shuffle2, small, span, store

REGISTER = 16
"""Bytes of a register."""
LANES = 4
"""int32 lanes of a register."""
REGISTERS = 32
"""Vector registers."""


def _even_odd(value: Expr) -> tuple[Expr, Expr]:
    """Lanes 0, 2, 4, .. and lanes 1, 3, 5, .."""
    lanes = lanes_of(value)
    return shuffle(value, range(0, lanes, 2)), shuffle(value, range(1, lanes, 2))


def _add_pairs(value: Expr) -> Expr:
    """Sums of neighboring lanes."""
    even, odd = _even_odd(value)
    return T.Bind(even + odd)


def _products(a: Expr, b: Expr) -> Expr:
    """Products of int8 lanes, as int32."""
    wide = f"int32x{lanes_of(a)}"
    return T.Bind(T.cast(a, wide) * T.cast(b, wide))


def sdot(acc: Expr, a: Expr, b: Expr, emulated: bool = False) -> Expr:
    """acc[i] + sum of a[4i + j] * b[4i + j], j = 0 .. 3: int32x4, int8x16, int8x16 -> int32x4."""
    if emulated:
        return acc + _add_pairs(_add_pairs(_products(a, b)))
    return T.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", acc, a, b)


def smmla(acc: Expr, a: Expr, b: Expr, emulated: bool = False) -> Expr:
    """acc[2i + j] + sum of a[8i + k] * b[8j + k], k = 0 .. 7: int32x4, int8x16, int8x16 -> int32x4."""
    if emulated:
        low, high = range(8), range(8, 16)
        rows, columns = shuffle2(a, a, [*low, *low, *high, *high]), shuffle2(b, b, [*low, *high, *low, *high])
        return acc + _add_pairs(_add_pairs(_add_pairs(_products(rows, columns))))
    return T.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.smmla.v4i32.v16i8", acc, a, b)


def multiply_pairs(acc: Expr, a: Expr, b: Expr, emulated: bool = False) -> Expr:
    """acc[i] + the products at 2i, 2i + 1, 2i + 8 and 2i + 9 of a and b: int32x4, int8x16, int8x16 -> int32x4.

    Exact where no two products that are 8 apart leave int16 together.
    """
    low, high = range(8), range(8, 16)
    if emulated:
        products = _products(a, b)
        return acc + _add_pairs(T.Bind(shuffle(products, low) + shuffle(products, high)))
    first, second = (
        T.call_llvm_pure_intrin("int16x8", "llvm.aarch64.neon.smull.v8i16", shuffle(a, half), shuffle(b, half))
        for half in (low, high)
    )
    return acc + T.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.saddlp.v4i32.v8i16", first + second)


def multiply_pairs_32(acc: Expr, a: Expr, b: Expr, emulated: bool = False) -> Expr:
    """`multiply_pairs` of 32-bit ARM: vmull twice, and vpadal."""
    if emulated:
        return multiply_pairs(acc, a, b, emulated)
    first, second = (
        T.call_llvm_pure_intrin("int16x8", "llvm.arm.neon.vmulls.v8i16", shuffle(a, half), shuffle(b, half))
        for half in (range(8), range(8, 16))
    )
    return T.call_llvm_pure_intrin("int32x4", "llvm.arm.neon.vpadals.v4i32.v8i16", acc, first + second)


def _added_pairs(a: Expr, b: Expr) -> Expr:
    """Sums of neighboring lanes of a, then of b."""
    both = shuffle2(a, b, range(2 * lanes_of(a)))
    even, odd = _even_odd(both)
    return T.Bind(even + odd)


_ONE = {"smull": multiply_pairs, "vmull": multiply_pairs_32, "sdot": sdot, "smmla": smmla}
"""What adds one register of products."""
PARTIAL = ("smull", "vmull")
"""Those that keep four partial sums of one row and one column in a register."""


@dataclass(frozen=True)
class ArmDot(Dot):
    """One way to sum on ARM."""

    @property
    def chain_macs(self) -> int:
        return 32 if self.kind == "smmla" else 16

    def chain(self, old: Expr, weights: Expr, emulated: bool) -> Expr:
        return _ONE[self.kind](old, T.Bind(T.reinterpret("int8x16", old)), T.Bind(weights[span(T.int64(0), REGISTER)]), emulated)

    def registers(self, rows: int, vectors: int) -> int:
        return rows * vectors * (LANES if self.kind in PARTIAL else 1)

    def check_rows(self, rows: int, name: str) -> None:
        super().check_rows(rows, name)
        if self.kind == "smmla" and rows % 2:
            raise LoweringError(f"{name}: tiles of {rows} rows; smmla takes rows in pairs; needed an even number")

    def prepare(self, codes: Expr, rows: Expr, dims: list[Expr], width: int) -> Codes:
        """For "smmla", rows in pairs: [row / 2][k / 8][2][8]; a last row without a partner stands in for it."""
        if self.kind != "smmla":
            return Codes(codes, width)
        # TVM moves the allocation to the top, where only the arguments' dimensions are defined.
        paired = T.alloc_buffer(((reduce(operator.mul, dims) + 1) * width,), "int8", scope="global")
        low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
        with T.serial(T.int64(0), T.truncdiv(rows + 1, T.int64(2))) as pair:
            first = T.Bind(pair * 2 * width)
            second = T.Bind(T.min(pair * 2 + 1, rows - 1) * width)
            with T.serial(T.int64(0), T.int64(width // REGISTER)) as v:
                a, b = (T.Bind(codes[span(start + v * REGISTER, REGISTER)]) for start in (first, second))
                for i, half in enumerate((low, high)):
                    store(paired, shuffle2(a, b, half), first + v * (2 * REGISTER) + i * REGISTER)
        return Codes(paired, width)

    def begin(self, codes: Codes, first: Expr, count: int, starts: list[Expr | None], emulated: bool) -> Sums:
        assert all(s is None for s in starts), "codes have no offset, so sums start at zero"
        given = (self, codes, first, count, len(starts), emulated)
        if self.kind in PARTIAL:
            return _Smull(*given)
        return _Sdot(*given) if self.kind == "sdot" else _Smmla(*given)


class _ArmSums(Sums):
    """acc: registers of partial sums, as many down and across as `blocks` says."""

    def __init__(self, dot: ArmDot, codes: Codes, first: Expr, count: int, vectors: int, emulated: bool):
        self.dot, self.codes, self.first, self.count, self.vectors, self.emulated = dot, codes, first, count, vectors, emulated
        rows, columns = self.blocks()
        self.acc = [[small(LANES, "int32") for _ in range(columns)] for _ in range(rows)]
        for row in self.acc:
            for a in row:
                store(a, i32(0, LANES), 0)

    @abstractmethod
    def blocks(self) -> tuple[int, int]:
        """Registers down and across a tile."""

    def add(self, i: int, j: int, a: Expr, b: Expr) -> None:
        """One instruction's products of a row's codes and weights."""
        one = _ONE[self.dot.kind]
        store(self.acc[i][j], one(self.acc[i][j][span(0, LANES)], a, b, self.emulated), 0)

    def value(self, i: int, j: int) -> Expr:
        """The partial sums in one register."""
        return T.Bind(self.acc[i][j][span(0, LANES)])

    def register(self, buffer: Expr, at: Expr) -> Expr:
        """16 bytes."""
        return T.Bind(buffer[span(at, REGISTER)])


class _Smull(_ArmSums):
    def blocks(self) -> tuple[int, int]:
        return self.count, self.vectors * LANES

    def step(self, turn: Expr, place: int, unroll: int, weights: Expr, at: Expr) -> None:
        k = (turn * unroll + place) * self.dot.group
        rows = [self.register(self.codes.buffer, (self.first + i) * self.codes.width + k) for i in range(self.count)]
        for j in range(self.vectors * LANES):
            column = self.register(weights, at + j * REGISTER)
            for i, row in enumerate(rows):
                self.add(i, j, row, column)

    def together(self) -> tuple[int, ...]:
        # Two pairs in a turn, for it takes a while until chains of both fill the registers; then the pair left over, if there is one.
        return tuple(steps for steps in (4, 2) if pair_registers(*self.blocks(), steps) <= REGISTERS)

    def pairs(self, steps: list[Expr], weights: Expr, at: list[Expr]) -> None:
        if self.emulated:
            for step, start in zip(steps, at, strict=True):
                self.step(step, 0, 1, weights, start)
            return
        size = (*self.blocks(), len(steps))
        sums = [T.address_of(a[0]) for row in self.acc for a in row]
        rows = [T.address_of(self.codes.buffer[(self.first + i) * self.codes.width]) for i in range(self.count)]
        with T.attr(T.int32(0), "pragma_import_llvm", pair_source(*size)):
            T.evaluate(
                T.call_extern("int32", pair_name(*size), *sums, *rows, *steps, *(T.address_of(weights[start]) for start in at))
            )

    def result(self) -> list[list[Expr]]:
        def vector(i: int, j: int) -> Expr:
            a, b, c, d = (self.value(i, LANES * j + n) for n in range(LANES))
            return keep(_added_pairs(_added_pairs(a, b), _added_pairs(c, d)))

        return [[vector(i, j) for j in range(self.vectors)] for i in range(self.count)]


class _Sdot(_ArmSums):
    _rows: list[Expr]

    def blocks(self) -> tuple[int, int]:
        return self.count, self.vectors

    def step(self, turn: Expr, place: int, unroll: int, weights: Expr, at: Expr) -> None:
        whole = unroll % LANES == 0  # turns of 16 codes, which one register holds
        columns = [self.register(weights, at + j * self.dot.bytes) for j in range(self.vectors)]
        if whole and place % LANES == 0:
            k = turn * (unroll * self.dot.group) + place * self.dot.group
            self._rows = [self.register(self.codes.buffer, (self.first + i) * self.codes.width + k) for i in range(self.count)]
        for i in range(self.count):
            if whole:
                codes = shuffle(T.reinterpret("int32x4", self._rows[i]), [place % LANES] * LANES)
            else:
                start = (self.first + i) * self.codes.width + (turn * unroll + place) * self.dot.group
                codes = T.broadcast(T.reinterpret("int32", self.codes.buffer[span(start, self.dot.group)]), LANES)
            codes = T.Bind(T.reinterpret("int8x16", codes))
            for j, column in enumerate(columns):
                self.add(i, j, column, codes)

    def result(self) -> list[list[Expr]]:
        return [[self.value(i, j) for j in range(self.vectors)] for i in range(self.count)]


class _Smmla(_ArmSums):
    def blocks(self) -> tuple[int, int]:
        return -(-self.count // 2), 2 * self.vectors

    def step(self, turn: Expr, place: int, unroll: int, weights: Expr, at: Expr) -> None:
        k = (turn * unroll + place) * REGISTER
        pairs, across = self.blocks()
        rows = [self.register(self.codes.buffer, (self.first + 2 * i) * self.codes.width + k) for i in range(pairs)]
        for j in range(across):
            column = self.register(weights, at + j * REGISTER)
            for i, row in enumerate(rows):
                self.add(i, j, row, column)

    def result(self) -> list[list[Expr]]:
        def vector(i: int, j: int) -> Expr:
            halves = self.value(i // 2, 2 * j), self.value(i // 2, 2 * j + 1)
            return keep(shuffle2(*halves, [0, 1, 4, 5] if i % 2 == 0 else [2, 3, 6, 7]))

        return [[vector(i, j) for j in range(self.vectors)] for i in range(self.count)]


DOTS = {
    ("vmull", 128): ArmDot("vmull", LANES, 16, 2, vectors=1, whole_rows=True),
    ("smull", 128): ArmDot("smull", LANES, 16, 4, vectors=1, whole_rows=True, pairs=True),
    ("sdot", 128): ArmDot("sdot", LANES, 4, 8, unroll=4, vectors=2, whole_rows=True),
    ("smmla", 128): ArmDot("smmla", LANES, 8, 8, unroll=2, vectors=2, whole_rows=True, aligned=2),
}
