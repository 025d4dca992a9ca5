"""Take every model of the zoo the whole way, and say how far each result is from the float32 model on samples it was not calibrated on.

python scripts/zoo.py [NAME ..] [-o out/zoo] [--x86 TARGET] [--arm TARGET] [--docs FILE]

Prints the table; with --docs writes it between the markers of that file, too. Exits with 1 where a step failed or verify is over budget.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import khtst_compile as kc
from khtst_compile import artifact
from khtst_compile.capture.factory import capture_module
from khtst_compile.capture.wrapper import flatten
from khtst_compile.errors import KhtstError
from khtst_compile.parity import relative_error_db
from khtst_compile.runner import emit
from khtst_compile.samples import Samples
from khtst_compile.zoo.catalog import Entry, catalog

Arrays = dict[str, npt.NDArray[Any]]
COLUMNS = ("export", "ONNX", "x86", "arm")
MARKS = ("<!-- zoo: written by make zoo -->", "<!-- /zoo -->")
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max")
LIMIT_S = 600  # of a run under emulation


@dataclass
class Row:
    """What is known of one model. cells: column -> text; parameters: in total; int8, linears: how many; ok: nothing failed."""

    name: str
    parameters: int = 0
    int8: int = 0
    linears: int = 0
    cells: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ok: bool = True

    def text(self) -> str:
        cells = [self.cells.get(c, "-") for c in COLUMNS]
        return f"| {self.name} | {self.parameters:,} | {' | '.join(cells)} | {self.int8} of {self.linears} |"


def measure(entry: Entry, folder: Path, x86: str = "x86", arm: str | None = "arm") -> Row:
    """Quantize, export, lower and verify one model in `folder`; arm: a target, or None to leave it out. A step that fails is a note."""
    model = entry.build()
    row = Row(entry.name, sum(p.numel() for p in (*model.parameters(), *model.buffers())))
    program = capture_module(model, entry.inputs())
    names, samples = [s.name for s in program.inputs], entry.samples()
    cut = len(samples) * 3 // 4
    judged = _join([dict(zip(names, s, strict=True)) for s in samples[cut:]], "batch" in program.axes)
    with torch.no_grad():
        exact = _stack([{k: v.numpy() for k, v in flatten(model(*x.values())).items()} for x in judged])

    def attempt(column: str, run: Callable[[], tuple[Arrays, bool]]) -> Arrays:
        try:
            found, within = run()
        except (KhtstError, subprocess.TimeoutExpired) as error:
            row.notes.append(f"{column}: {error}")
            row.ok = False
            return {}
        row.cells[column] = _compare(found, exact) + ("" if within else ", **over budget**")
        row.ok &= within
        return found

    def run_quantize() -> tuple[Arrays, bool]:
        calibration = Samples(
            sum(len(s[0]) for s in samples[:cut]), f"zoo: {entry.name}", False,
            lambda: (dict(zip(names, s, strict=True)) for s in samples[:cut]),
        )  # fmt: skip
        made = kc.quantize(program, folder / "q", calib=calibration)
        done = next(p for p in made.manifest["passes"] if p["pass"] == "w8a8")
        row.int8, row.linears = done["changed"], done["changed"] + len(done["skipped"])
        row.notes += [f"`{s['site']}`: {s['reason']}" for s in done["skipped"]]
        captured = [{k: v.numpy() for k, v in program.run(x).items()} for x in judged]
        return _stack(captured), True

    def run_onnx() -> tuple[Arrays, bool]:
        import onnxruntime

        kc.export(folder / "q", folder / "onnx")
        session = onnxruntime.InferenceSession(str(folder / "onnx" / artifact.ONNX_MODEL), providers=["CPUExecutionProvider"])
        results = [session.run(list(exact), {k: v.numpy() for k, v in x.items()}) for x in judged]
        return _stack([dict(zip(exact, r, strict=True)) for r in results]), kc.verify(folder / "onnx").ok

    def run_x86() -> tuple[Arrays, bool]:
        kc.lower(folder / "q", folder / "x86", target=x86)
        loaded = kc.load(folder / "x86", threads=1)
        results = [loaded.run({k: v.numpy() for k, v in x.items()}) for x in judged]
        return _stack(results), kc.verify(folder / "x86", reference=folder / "q").ok

    def run_arm() -> tuple[Arrays, bool]:
        kc.lower(folder / "q", folder / "arm", target=str(arm), emit_runner=True)
        results = [_emulate(folder / "arm", {k: v.numpy() for k, v in x.items()}, folder) for x in judged]
        found = _stack(results)
        differing = [k for k, v in on_x86.items() if v.tobytes() != found[k].tobytes()]
        row.notes += [f"arm: {k} has other bits than on x86" for k in differing]
        return found, not differing

    if not attempt("export", run_quantize):
        return row
    attempt("ONNX", run_onnx)
    on_x86 = attempt("x86", run_x86)
    if arm is not None and shutil.which(QEMU[0]) is None:
        row.notes.append(f"arm: {QEMU[0]} is not on the path; scripts/install-system.sh python3 arm")
    elif arm is not None:
        attempt("arm", run_arm)
    return row


def _join(batches: Sequence[dict[str, torch.Tensor]], whole: bool) -> list[dict[str, torch.Tensor]]:
    """One batch of all of them, where a batch may have any size."""
    return [{k: torch.cat([b[k] for b in batches]) for k in batches[0]}] if whole else list(batches)


def _stack(results: Sequence[Arrays]) -> Arrays:
    return {k: np.concatenate([np.atleast_1d(r[k]) for r in results]) for k in results[0]}


def _compare(found: Arrays, exact: Arrays) -> str:
    """The largest relative error of floating-point results, and the share of integers (codes) that are the same."""
    errors = [relative_error_db(found[k], v) for k, v in exact.items() if v.dtype.kind == "f"]
    same = [float((found[k] == v).mean()) for k, v in exact.items() if v.dtype.kind != "f"]
    worst = max(errors, key=lambda db: (np.isnan(db), db), default=float("-inf"))
    text = "equal" if worst == float("-inf") else f"{worst:.1f}"
    return text + (f" ({100 * min(same):.1f} % of ids)" if same else "")


def _emulate(folder: Path, inputs: Arrays, place: Path) -> Arrays:
    given, found = place / "in.npz", place / "out.npz"
    np.savez(given, **inputs)  # type: ignore[arg-type]
    program = folder / emit.FOLDER / emit.PROGRAM
    command = [*QEMU, str(program), "run", str(folder), str(given), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise KhtstError(f"the runner under qemu ended with {done.returncode}: {done.stderr.strip()}")
    with np.load(found) as arrays:
        return {k: arrays[k] for k in arrays.files}


def render(rows: Sequence[Row]) -> str:
    """The table, and the notes below it."""
    lines = [f"| model | numbers | {' | '.join(COLUMNS)} | linears in int8 |", "|---" * (len(COLUMNS) + 3) + "|"]
    lines += [row.text() for row in rows]
    notes = [f"- {row.name}: {note}" for row in rows for note in row.notes]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def write(file: Path, text: str) -> None:
    """Put `text` between the marks of `file`."""
    before, first, rest = file.read_text(encoding="utf-8").partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not first or not last:
        raise SystemExit(f"{file}: needed: a line {MARKS[0]} and after it a line {MARKS[1]}")
    file.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = catalog()
    parser.add_argument("names", nargs="*", help=f"which (default: all): {', '.join(known)}")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/zoo"), help="a folder for the artifacts")
    parser.add_argument("--x86", default="x86", help="target for x86 (default: all its variants)")
    parser.add_argument("--arm", default="arm", help="target for ARM, or none")
    parser.add_argument("--docs", type=Path, help="a file to write the table to")
    args = parser.parse_args()
    if unknown := [n for n in args.names if n not in known]:
        parser.error(f"no model is called {', '.join(unknown)}; known: {', '.join(known)}")
    if args.docs and args.names:
        parser.error("--docs writes the whole table; leave out the names")
    if args.docs and MARKS[0] not in args.docs.read_text(encoding="utf-8"):
        parser.error(f"{args.docs} has no line {MARKS[0]}")
    rows = []
    for name in args.names or known:
        rows.append(measure(known[name], args.output / name, args.x86, None if args.arm == "none" else args.arm))
        print(rows[-1].text(), file=sys.stderr, flush=True)
    print(render(rows))
    if args.docs:
        write(args.docs, render(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
