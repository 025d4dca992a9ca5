"""The innermost loops of a library for ARM, and what LLVM's models of processors say of one. Pure functions but for `disassemble` and
`model`."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MACS = {"sdot": 16, "smmla": 32, "smull": 8, "smull2": 8, "smlal": 8, "smlal2": 8, "fmla": 4}
"""Multiply-adds of an instruction on 128-bit registers of int8 or float32."""
ROUNDS = 300
"""Turns of a loop a model runs: what fills and drains the pipeline then counts little."""


@dataclass(frozen=True)
class Loop:
    """address: of its first instruction; body: its instructions, the jump back last; turns: how often that ran."""

    address: int
    body: tuple[str, ...]
    turns: int = 0

    @property
    def macs(self) -> int:
        """Multiply-adds of a turn."""
        return sum(MACS.get(line.split()[0], 0) for line in self.body)

    @property
    def spills(self) -> int:
        """Instructions that read or write the stack."""
        return sum(1 for line in self.body if re.search(r"\[sp\b", line))

    @property
    def instructions(self) -> int:
        """Executed, all turns together."""
        return self.turns * len(self.body)


@dataclass(frozen=True)
class Model:
    """By one model of a processor. cycles: of a turn; bound: cycles that its busiest unit alone takes for a turn."""

    cycles: float
    bound: float

    @property
    def share(self) -> float:
        """Of the bound that is reached."""
        return self.bound / self.cycles


def disassemble(file: Path) -> str:
    """By objdump."""
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions(text: str) -> dict[int, str]:
    """objdump's text -> instruction at each address."""
    lines = (re.match(r"\s*([0-9a-f]+):\t(.*)", line) for line in text.splitlines())
    return {int(m[1], 16): re.sub(r"\s*//.*", "", m[2]).strip() for m in lines if m}


def innermost(code: dict[int, str], times: Counter[int]) -> list[Loop]:
    """Loops without a loop in them, the one with most executed instructions first. times: address -> how often it ran."""
    addresses, back = sorted(code), list[tuple[int, int]]()
    at = {address: i for i, address in enumerate(addresses)}
    for address in addresses:
        jump = re.match(r"(?:b\.\w+|b|cbn?z|tbn?z)\s+(?:.*,\s*)?([0-9a-f]+) <", code[address])
        if jump and int(jump[1], 16) in at and int(jump[1], 16) <= address:
            back.append((int(jump[1], 16), address))
    loops = []
    for start, end in back:
        if any(start <= s and e <= end and (s, e) != (start, end) for s, e in back):
            continue
        body = [code[addresses[i]] for i in range(at[start], at[end] + 1)]
        loops.append(Loop(start, tuple(body), times[end]))
    return sorted(loops, key=lambda loop: -loop.instructions)


def listing(body: Sequence[str]) -> str:
    """A loop's body as an assembler reads it: jumps back go to a label, other jumps and addresses nowhere."""
    lines = [re.sub(r"[0-9a-f]+ <[^>]*>", ".Ltop", line) for line in body]
    return "\n".join([".Ltop:", *lines, ""])


def model(body: Sequence[str], cpu: str) -> Model:
    """By llvm-mca. cpu: as LLVM calls it. Raises ValueError with its words where it cannot read an instruction."""
    command = ["llvm-mca-19", "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm", f"-iterations={ROUNDS}"]
    done = subprocess.run(command, input=listing(body), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"llvm-mca-19 for {cpu}: {(done.stderr.strip().splitlines() or ['no reason given'])[0]}")
    return parse(done.stdout)


def parse(text: str) -> Model:
    """llvm-mca's summary. Raises ValueError where it is none."""
    found = {}
    for name in ("Iterations", "Total Cycles", "Block RThroughput"):
        line = re.search(rf"^{name}:\s+([\d.]+)$", text, re.MULTILINE)
        if line is None:
            raise ValueError(f"llvm-mca-19 said nothing of {name}; needed: its summary")
        found[name] = float(line[1])
    return Model(found["Total Cycles"] / found["Iterations"], found["Block RThroughput"])
