"""Float32 products of a tile on 64-bit ARM, four steps over k at a time, as one block of assembly.

Four steps of a row are one load, and `fmla` takes a lane of that register as a factor; reading an element for every step and row takes
four loads. Written out because a tile of 6 rows by 4 registers fills all 32 (24 sums, 6 rows, 2 of columns) and LLVM's scheduler, which
loads the next columns early, then spills. Each sum still adds its products in the order of k.
"""

from __future__ import annotations

from functools import cache

from tvm.tirx.script import builder as T

from khtst_compile.targets.isa import Isa

from .vec import Expr

STEPS = 4
"""Steps over k of one block: float32 lanes of a register."""
_REGISTERS = 32
_FARTHEST = 65520
"""Bytes from a pointer that `ldr` of a register reaches, in steps of 16."""


def serves(isa: Isa, rows: int, vectors: int, pitch: int) -> bool:
    """Whether a tile of so many rows and registers of columns goes this way; pitch: floats from one row to the next."""
    registers = rows * vectors + rows + min(vectors, 2)
    reached = pitch % STEPS == 0 and 4 * pitch * (rows - 1) <= _FARTHEST
    return isa.by_lane and not isa.emulated and registers <= _REGISTERS and reached


def multiply_steps(sums: list[list[Expr]], a: Expr, pitch: int, b: Expr) -> None:
    """Add the products of STEPS steps to a tile: fma(a[i, k], b[k, j], sum[i][j]), k in order.

    sums:  pointer to each float32x4, by rows.
    a:     pointer to the first row's float32 at the first step; row i is i * pitch floats on.
    b:     pointer to the first step's columns; the others follow.
    """
    rows, vectors = len(sums), len(sums[0])
    with T.attr(T.int32(0), "pragma_import_llvm", _source(rows, vectors, pitch)):
        T.evaluate(T.call_extern("int32", _name(rows, vectors, pitch), *(s for row in sums for s in row), a, b))


def _name(rows: int, vectors: int, pitch: int) -> str:
    return f"khtst_fmla_{rows}x{vectors}_{pitch}"


def _lines(rows: int, vectors: int, pitch: int) -> list[str]:
    """Instructions; operands are sums, then scratch for rows and two of columns, then (the sums again) the two pointers."""
    held = rows * vectors
    columns = held + rows
    left = columns + min(vectors, 2) + held
    right = left + 1
    lines = [f"ldr ${{{held + i}:q}}, [${{{left}}}, #{16 * (pitch // STEPS) * i}]" for i in range(rows)]
    for step in range(STEPS):
        for j in range(0, vectors, 2):
            at, side = 16 * (step * vectors + j), range(j, min(j + 2, vectors))
            pair = ", ".join(f"${{{columns + n}:q}}" for n in range(len(side)))
            lines.append(f"{'ldp' if len(side) == 2 else 'ldr'} {pair}, [${{{right}}}, #{at}]")
            lines += [
                f"fmla ${{{i * vectors + n}}}.4s, ${{{columns + n - j}}}.4s, ${{{held + i}}}.s[{step}]"
                for i in range(rows)
                for n in side
            ]
    return lines


@cache
def _source(rows: int, vectors: int, pitch: int) -> str:
    """LLVM IR of the function that `multiply_steps` calls."""
    sums, scratch = rows * vectors, rows + min(vectors, 2)
    text = "\\0A".join(_lines(rows, vectors, pitch))
    constraints = ["=&w"] * (sums + scratch) + [str(i) for i in range(sums)] + ["r", "r", "~{memory}"]
    result = "{ " + ", ".join(["<4 x float>"] * (sums + scratch)) + " }"
    given = ", ".join([*(f"<4 x float> %s{i}" for i in range(sums)), "ptr %a", "ptr %b"])
    body = [f"  %s{i} = load <4 x float>, ptr %p{i}, align 16" for i in range(sums)]
    body += [f'  %r = call {result} asm "{text}", "{",".join(constraints)}"({given})']
    for i in range(sums):
        body += [f"  %n{i} = extractvalue {result} %r, {i}", f"  store <4 x float> %n{i}, ptr %p{i}, align 16"]
    arguments = ", ".join([*(f"ptr %p{i}" for i in range(sums)), "ptr %a", "ptr %b"])
    return "\n".join([f"define i32 @{_name(rows, vectors, pitch)}({arguments}) {{", *body, "  ret i32 0", "}", ""])
