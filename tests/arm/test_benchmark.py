"""What benchmarks/arm.py counts and models: known loops, known instructions, and what its table makes of them."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arm_counts, arm_loops, arm_report, arm_tools
from benchmarks.arm_counts import Block, Library, Mapping
from tests.arm.emulator import ROOT, lacking
from tests.requirements import need

PROGRAM = """
#include <stdlib.h>
int main(int count, char** words) {
  for (int i = 1; i < count; ++i) {
    long n = atol(words[i]);
    __asm__ volatile("hint #120");
    __asm__ volatile(".globl known\\nknown:\\n nop\\n smull v0.8h, v1.8b, v2.8b\\n subs %0, %0, #1\\n b.ne known" : "+r"(n)::"v0", "cc");
    __asm__ volatile("hint #120");
  }
  return 0;
}
"""
SUMMARY = """Iterations:        300
Instructions:      17100
Total Cycles:      9613
Total uOps:        17100

Dispatch Width:    3
uOps Per Cycle:    1.78
IPC:               1.78
Block RThroughput: 32.0
"""
LISTING = """
lib.so:     file format elf64-littleaarch64

0000000000001000 <kernel>:
    1000:\tmov\tx0, #0x0                   \t// #0
    1004:\tldr\tq0, [x1, x0]
    1008:\tcbz\tx3, 1010 <kernel+0x10>
    100c:\tstr\tq0, [sp, #16]
    1010:\tsmull\tv1.8h, v0.8b, v2.8b
    1014:\tsmlal2\tv1.8h, v0.16b, v2.16b
    1018:\tadd\tx0, x0, #0x10
    101c:\tb.ne\t1004 <kernel+0x4>  // b.any
    1020:\tsubs\tx4, x4, #0x1
    1024:\tb.ne\t1000 <kernel>  // b.any
    1028:\tret
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[arm_counts.Counts]]:
    """The program, and its counts for loops of (100, 100) and (100, 1100) turns."""
    need("arm", lacking())
    folder = tmp_path_factory.mktemp("count")
    (folder / "known.c").write_text(PROGRAM, encoding="ascii")
    subprocess.run(["aarch64-linux-gnu-gcc", "-O1", str(folder / "known.c"), "-o", str(folder / "known")], check=True)
    tools = arm_tools.Tools(ROOT, folder, folder, arm_tools.build_plugin(folder), folder, folder, None, {})
    counts = [
        arm_counts.parse(tools.count(arm_tools.CPUS["cortex-a72"], [folder / "known", "100", turns], folder / "counts"))
        for turns in ("100", "1100")
    ]
    return folder / "known", counts


def test_a_known_loop_is_counted_exactly(counted: tuple[Path, list[arm_counts.Counts]]) -> None:
    _, (short, long) = counted
    assert len(short.intervals) == 3
    first, last = arm_counts.of_calls(long.intervals)
    assert arm_counts.of_calls(short.intervals) == [first, first] and last - first == 1000 * 4
    # The first turn is in the block that begins with the mark, so before it; three instructions follow the loop.
    assert first == 99 * 4 + 3 and arm_counts.kinds(long.blocks)["smull"] == 1099


def test_a_loop_is_found_in_a_program_that_ran(counted: tuple[Path, list[arm_counts.Counts]]) -> None:
    file, (_, long) = counted
    library = arm_counts.symbols(file)
    known = next(address for address, name in library.functions if name == "known")
    offset = next(known - address + start for start, address, size in library.parts if address <= known < address + size)
    hot = max(long.blocks, key=lambda b: b.times)
    begin = hot.address - offset
    times = arm_counts.executed(long.blocks, [Mapping(begin, begin + (1 << 20), 0, str(file))], file, library)
    assert arm_counts.by_function(times, library)["known"] >= 4 * 1099
    loop = arm_loops.innermost(arm_loops.instructions(arm_loops.disassemble(file)), times)[0]
    assert loop.address == known and loop.macs == 8 and len(loop.body) == 4 and loop.turns == 1099


def test_a_program_that_fails_is_reported(tmp_path: Path) -> None:
    need("arm", lacking())
    tools = arm_tools.Tools(ROOT, tmp_path, tmp_path, arm_tools.build_plugin(tmp_path), tmp_path, tmp_path, None, {})
    with pytest.raises(RuntimeError, match="nowhere ended with"):
        tools.count(arm_tools.CPUS["cortex-a72"], [tmp_path / "nowhere"], tmp_path / "counts")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sdot v0.4s, v1.16b, v2.16b", "sdot"),
        ("sdot v0.4s, v1.16b, v2.4b[3]", "sdot"),
        ("udot v0.4s, v1.16b, v2.4b[1]", "sdot"),
        ("smmla v0.4s, v1.16b, v2.16b", "smmla"),
        ("ummla v31.4s, v30.16b, v29.16b", "smmla"),
        ("smull v3.8h, v1.8b, v2.8b", "smull"),
        ("umull2 v3.8h, v1.16b, v2.16b", "smull"),
        ("smlal2 v3.8h, v1.16b, v2.16b", "smlal"),
        ("sadalp v4.4s, v3.8h", "sadalp"),
        ("fmla v1.4s, v2.4s, v3.4s", "fmla"),
        ("fmla v1.4s, v2.4s, v3.s[2]", "fmla"),
        ("ldp q0, q1, [x2, #32]!", "memory"),
        ("ld1 {v0.16b}, [x1], x2", "memory"),
        ("str w0, [x1, x2]", "memory"),
        ("add v0.4s, v1.4s, v2.4s", "other"),
        ("mul v0.4s, v1.4s, v2.4s", "other"),
        ("fmls v0.4s, v1.4s, v2.4s", "other"),
        ("b.ne 16", "other"),
    ],
)
def test_kinds_of_instructions(text: str, kind: str, tmp_path: Path) -> None:
    need("arm", lacking())
    made, raw = tmp_path / "one.o", tmp_path / "one.bin"
    source = f".arch armv8.2-a+dotprod+i8mm\n{text}\n"
    subprocess.run(["aarch64-linux-gnu-as", "-o", str(made)], input=source, text=True, check=True)
    subprocess.run(["aarch64-linux-gnu-objcopy", "-O", "binary", "-j", ".text", str(made), str(raw)], check=True)
    assert arm_counts.kind(int.from_bytes(raw.read_bytes(), "little")) == kind


def test_a_count_that_is_none_is_refused() -> None:
    for text, said in (
        ("", "fewer than two marks"),
        ("block 10 1 d503201f\n", "fewer than two marks"),
        ("qemu: oh\n", "'qemu: oh'"),
    ):
        with pytest.raises(ValueError, match=said):
            arm_counts.parse(text)
    with pytest.raises(ValueError, match="2 intervals"):
        arm_counts.of_calls([1, 2])
    with pytest.raises(ValueError, match="5, 1,000, 1,011 instructions"):
        arm_counts.least([5, 1000, 1011])
    assert arm_counts.least([5, 1009, 2000, 1000]) == 1000


def test_blocks_of_other_files_do_not_count(tmp_path: Path) -> None:
    library = Library(((0x1000, "a"), (0x1010, "b")), ((0x0, 0x1000, 0x100),))
    maps = arm_counts.mappings(
        f"5500000000-5500001000 r-xp 00000000 08:01 7    {tmp_path}/mine.so\n"
        f"5600000000-5600001000 r-xp 00000000 08:01 8    {tmp_path}/other.so\n"
        "5700000000-5700001000 rw-p 00000000 00:00 0\n"
    )
    assert [m.file for m in maps] == [f"{tmp_path}/mine.so", f"{tmp_path}/other.so"]
    blocks = [Block(0x550000000C, 5, (1, 2)), Block(0x560000000C, 7, (1, 2)), Block(0x5700000000, 9, (1,))]
    times = arm_counts.executed(blocks, maps, tmp_path / "mine.so", library)
    assert times == Counter({0x100C: 5, 0x1010: 5}) and arm_counts.by_function(times, library) == {"a": 5, "b": 5}


def test_the_innermost_loop_and_what_it_holds() -> None:
    times = Counter({0x101C: 640, 0x1024: 10})
    (loop,) = arm_loops.innermost(arm_loops.instructions(LISTING), times)
    assert (loop.address, len(loop.body), loop.turns, loop.macs, loop.spills) == (0x1004, 7, 640, 16, 1)
    assert loop.instructions == 7 * 640
    assert arm_loops.listing(loop.body).splitlines()[-1] == "b.ne\t.Ltop"


def test_a_model_is_read_from_its_summary() -> None:
    found = arm_loops.parse(SUMMARY)
    assert found.cycles == 9613 / 300 and found.bound == 32.0 and found.share == pytest.approx(32 / (9613 / 300))
    with pytest.raises(ValueError, match="Block RThroughput"):
        arm_loops.parse(SUMMARY.replace("Block", "Blocks"))


def test_models_run_and_refuse() -> None:
    need("arm", lacking())
    body = ["smull\tv1.8h, v0.8b, v2.8b", "subs\tx0, x0, #0x1", "b.ne\t1004 <kernel+0x4>"]
    assert 0.5 < arm_loops.model(body, "cortex-a72").share <= 1
    with pytest.raises(ValueError, match="llvm-mca-19 for cortex-a72"):
        arm_loops.model(["nonsense x0"], "cortex-a72")


def test_the_table_says_what_is_met_and_what_failed() -> None:
    def row(engine: str, cpu: str, **more: Any) -> dict[str, Any]:
        return {"task": "minilm", "cpu": cpu, "engine": engine, "macs": 1, **more}

    loop = {"instructions": 60, "share": 0.9, "macs": 256, "spills": 0}
    loop["models"] = {"cortex-a72": {"cycles": 32.0, "bound": 32.0, "share": 1.0}}
    kernel = {"name": "gemm", "instructions": 7_000_000, "loop": loop}
    unnamed = {**kernel, "name": "__tvm_set_raised_12"}
    rows = [
        row(arm_report.OURS, "cortex-a72", instructions=76, variant="arm-neon", kernels=[kernel, unnamed], error_db=-30.0),
        row(arm_report.ORT, "cortex-a72", instructions=100),
        row(arm_report.OURS, "neoverse-n1", instructions=75, variant="arm-dotprod"),
        row(arm_report.ORT, "neoverse-n1", instructions=100),
        row(arm_report.XNNPACK, "neoverse-n1", failed="no such wheel"),
    ]
    assert arm_report.ratio(rows, "minilm", "cortex-a72", arm_report.OURS, arm_report.ORT) == 0.76
    assert arm_report.ratio(rows, "minilm", "cortex-a72", arm_report.OURS, arm_report.XNNPACK) is None
    text = arm_report.render({"shape": "1x128", "packages": ["onnxruntime==1"], "rows": rows})
    assert "on cortex-a72: instructions over onnxruntime dynamic int8's | ≤ 0.75 | 0.760 | **no** |" in text
    assert "on neoverse-n1: instructions over onnxruntime dynamic int8's | ≤ 0.75 | 0.750 | yes |" in text
    assert "- xnnpack int8 on neoverse-n1: no such wheel" in text
    assert "| arm-neon | minilm: parallel loop | 7.00 | 60 |" in text
    assert "| arm-neon | gemm | 7.00 | 60 | 90% | 256 | 0 | cortex-a72 32.0, 8.0, 100% |" in text


def test_processors_are_what_their_features_say() -> None:
    for cpu in arm_tools.CPUS.values():
        fields = dict(line.split("\t: ") for line in cpu.cpuinfo().strip().splitlines())
        words = fields["Features"].split()
        assert ("asimddp" in words) == (cpu.variant != "arm-neon") and ("i8mm" in words) == (cpu.variant == "arm-i8mm")
        assert fields["CPU part"] == f"0x{cpu.part:03x}"
