"""The innermost work of NEON's int8 products: pairs of steps over k of a whole tile, as one block of assembly.

Written out because LLVM's scheduler moves the products of all columns to the front of the loop, where their registers no longer fit. A sum
is a chain of five instructions: smull, smlal2 (the first step), smlal, smlal2 (the second), sadalp. A processor that runs instructions in
order waits for the one before in a chain, six cycles on a Cortex-A53, so a chain goes on only SPACING instructions later, while others do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

STAGES = (("smull", 0, "8b"), ("smlal2", 0, "16b"), ("smlal", 1, "8b"), ("smlal2", 1, "16b"))
"""Instruction, step of the pair, and which half of the registers; then comes sadalp."""
LENGTH = len(STAGES) + 1
SPACING = LENGTH + 1
"""One more than a chain is long: with a chain begun every LENGTH instructions no two instructions ever meet."""
AHEAD_WEIGHTS, AHEAD_CODES = 4, 8
"""Instructions between reading and using; with more of them the weights would take a register more."""


@dataclass(frozen=True)
class _Op:
    """place: in the order of instructions; chain and stage of a sum, or what is read."""

    place: float
    chain: int = -1
    stage: int = -1
    read: tuple[str, int, int] | None = None


@dataclass(frozen=True)
class _Plan:
    """ops in order; held: ("codes", row, step) or ("weights", column, step) -> its register; registers: how many these are."""

    ops: tuple[_Op, ...]
    held: dict[tuple[str, int, int], int]
    registers: int


@cache
def _plan(rows: int, columns: int, steps: int) -> _Plan:
    """Chains go pair by pair, in each column by column, in each row by row."""
    tile = rows * columns
    places = {(c, s): LENGTH * c + SPACING * s for c in range(steps // 2 * tile) for s in range(LENGTH)}
    ops = [_Op(place, chain=c, stage=s) for (c, s), place in places.items()]
    used: dict[tuple[str, int, int], list[int]] = {}
    for (chain, stage), place in places.items():
        (pair, inside), (step, _) = divmod(chain, tile), divmod(stage, 2)
        if stage < len(STAGES):
            column, row = divmod(inside, rows)
            used.setdefault(("codes", row, 2 * pair + step), []).append(place)
            used.setdefault(("weights", column, 2 * pair + step), []).append(place)
    ops += [
        _Op(min(at) - (AHEAD_CODES + 0.25 if key[0] == "codes" else AHEAD_WEIGHTS + 0.5), read=key) for key, at in used.items()
    ]
    ops.sort(key=lambda op: op.place)
    held: dict[tuple[str, int, int], int] = {}
    for op in ops:
        if op.read is not None:
            busy = {register for key, register in held.items() if max(used[key]) > op.place}
            held[op.read] = next(r for r in range(len(used)) if r not in busy)
    return _Plan(tuple(ops), held, 1 + max(held.values()))


def pair_registers(rows: int, columns: int, steps: int) -> int:
    """Vector registers that `pair_source` takes: sums, chains that run side by side, codes and weights."""
    return rows * columns + LENGTH + _plan(rows, columns, steps).registers


def pair_name(rows: int, columns: int, steps: int) -> str:
    """Of the function that `pair_source` defines."""
    return f"khtst_smull_{rows}x{columns}x{steps}"


@cache
def pair_source(rows: int, columns: int, steps: int) -> str:
    """LLVM IR of a function for tiles of so many rows and columns, and an even number of steps.

    Arguments: a pointer to the int32x4 of each row and column, row by row; a pointer to the codes of each row; the numbers of the steps,
    int64; a pointer to the columns' weights of each. To lane i of a sum it adds, for each pair of steps, the products at 2i, 2i + 1,
    2i + 8 and 2i + 9 of both, summed in int16 before: exact where those sums fit (step_order.py).
    """
    sums, plan = rows * columns, _plan(rows, columns, steps)
    # Operands: results (sums, then scratch for products, codes and weights), then inputs (sums again, rows, steps, pointers).
    product, scratch = sums, LENGTH + plan.registers
    start = sums + scratch + sums
    number = start + rows
    pointer = number + steps

    def held(what: str, which: int, step: int) -> int:
        return product + LENGTH + plan.held[what, which, step]

    def line(op: _Op) -> str:
        if op.read is not None:
            what, which, step = op.read
            at = (
                f"${{{start + which}}}, ${{{number + step}}}, lsl #4"
                if what == "codes"
                else f"${{{pointer + step}}}, #{16 * which}"
            )
            return f"ldr ${{{held(*op.read)}:q}}, [{at}]"
        (pair, inside), own = divmod(op.chain, sums), product + op.chain % LENGTH
        column, row = divmod(inside, rows)
        if op.stage == len(STAGES):
            return f"sadalp ${{{row * columns + column}}}.4s, ${{{own}}}.8h"
        name, second, half = STAGES[op.stage]
        step = 2 * pair + second
        return f"{name} ${{{own}}}.8h, ${{{held('codes', row, step)}}}.{half}, ${{{held('weights', column, step)}}}.{half}"

    text = "\\0A".join(map(line, plan.ops))
    inputs = [*(f"ptr %c{i}" for i in range(rows)), *(f"i64 %k{i}" for i in range(steps)), *(f"ptr %w{i}" for i in range(steps))]
    tied = [str(i) for i in range(sums)]
    constraints = ["=&w"] * (sums + scratch) + tied + ["r"] * len(inputs) + ["~{memory}"]
    result = "{ " + ", ".join(["<4 x i32>"] * sums + ["<16 x i8>"] * scratch) + " }"
    given = ", ".join([*(f"<4 x i32> %a{i}" for i in range(sums)), *inputs])
    body = [f"  %a{i} = load <4 x i32>, ptr %p{i}, align 16" for i in range(sums)]
    body += [f'  %s = call {result} asm "{text}", "{",".join(constraints)}"({given})']
    for i in range(sums):
        body += [f"  %n{i} = extractvalue {result} %s, {i}", f"  store <4 x i32> %n{i}, ptr %p{i}, align 16"]
    arguments = ", ".join([*(f"ptr %p{i}" for i in range(sums)), *inputs])
    return "\n".join([f"define i32 @{pair_name(rows, columns, steps)}({arguments}) {{", *body, "  ret i32 0", "}", ""])
