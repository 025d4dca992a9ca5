"""The integer multiply-add instructions GEMM kernels are built on, each beside its executable meaning in plain vectors.

A dot instruction adds, to every int32 lane of an accumulator, the products of a group of consecutive k: 2 (vpmaddwd on
int16 pairs) or 4 (vpdpbusd on unsigned x signed bytes). Neither saturates for codes and weights in [-127, 127].
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import Isa

from .vec import Expr, i32, span, splat


@dataclass(frozen=True)
class Dot:
    """One instruction set's dot product.

    group:       consecutive k one lane takes in, 2 or 4; weights are packed int8 [.., lanes, group].
    lanes:       int32 lanes of an accumulator.
    intrinsic:   LLVM's name.
    baseline:    every machine the project runs on has it (AVX2); it is never emulated.
    """

    group: int
    lanes: int
    intrinsic: str
    baseline: bool = False

    @property
    def bytes(self) -> int:
        """int8 weights of one vector of columns and one group."""
        return self.group * self.lanes

    def codes(self, buffer: Expr, start: Expr) -> Expr:
        """One group of stored codes, from element `start` of the flat buffer, in every lane (the first operand)."""
        group = T.reinterpret("int32", buffer[span(start, self.group)])
        return T.Bind(T.reinterpret(self._operand(signed=False), splat(group, self.lanes)))

    def weights(self, buffer: Expr, start: Expr) -> Expr:
        """A vector of packed weights, from byte `start` of the flat int8 buffer (the second operand)."""
        packed = buffer[span(start, self.bytes)]
        return T.Bind(T.cast(packed, self._operand(signed=True)) if self.group == 2 else packed)

    def _operand(self, signed: bool) -> str:
        if self.group == 2:
            return f"int16x{self.bytes}"
        return f"{'int8' if signed else 'uint8'}x{self.bytes}"

    def accumulate(self, acc: Expr, codes: Expr, weights: Expr, emulated: bool) -> Expr:
        """acc + sum over the group of codes * weights, int32."""
        if emulated and not self.baseline:
            return self._meaning(acc, codes, weights)
        result = f"int32x{self.lanes}"
        if self.group == 2:
            return acc + T.call_llvm_pure_intrin(result, self.intrinsic, codes, weights)
        return T.call_llvm_pure_intrin(result, self.intrinsic, acc, codes, weights)

    def _meaning(self, acc: Expr, codes: Expr, weights: Expr) -> Expr:
        """The same sums from shifts, multiplications and additions of int32 lanes."""
        vector, width = f"int32x{self.lanes}", 32 // self.group
        a, b = T.Bind(T.reinterpret(vector, codes)), T.Bind(T.reinterpret(vector, weights))

        def element(value: Expr, index: int, signed: bool) -> Expr:
            top = T.shift_left(value, i32(32 - width * (index + 1), self.lanes))
            if signed:
                return T.shift_right(top, i32(32 - width, self.lanes))
            return T.bitwise_and(T.shift_right(value, i32(width * index, self.lanes)), i32((1 << width) - 1, self.lanes))

        for index in range(self.group):
            acc = acc + element(a, index, signed=self.group == 2) * element(b, index, signed=True)
        return acc


_DOTS = {
    ("maddwd", 256): Dot(2, 8, "llvm.x86.avx2.pmadd.wd", baseline=True),
    ("maddwd", 512): Dot(2, 16, "llvm.x86.avx512.pmaddw.d.512"),
    ("dpbusd", 256): Dot(4, 8, "llvm.x86.avx512.vpdpbusd.256"),
    ("dpbusd", 512): Dot(4, 16, "llvm.x86.avx512.vpdpbusd.512"),
}


def dot_of(isa: Isa) -> Dot:
    """The dot instruction of an instruction set."""
    return _DOTS[isa.dot, isa.vector_bits]
