"""A lowered program as it is executed: every kernel with its shapes, work, expected and measured time. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from khtst_compile.benchmark import golden_inputs, make_inputs
from khtst_compile.errors import UsageError
from khtst_compile.roofline import Roofline, clock, isa_named, measure
from khtst_compile.runtime import Artifact, Step, load

Array = npt.NDArray[Any]
RUNS = 15
"""Runs whose median counts, with --time."""
_GATHERS = ("take", "gather", "embed")
"""In the names of kernels that read only some rows of a table: of each input they count as reading at most what they write."""


@dataclass(frozen=True)
class Row:
    """One call of a kernel.

    kernel, operator, site: its name, the operator it serves and where that is in the model (empty for what TVM fused itself).
    shapes: of its tensors, results last; outputs: how many results. bytes: read and written, of which weight_bytes are constants.
    macs: multiply-adds; linear: those of linear layers. products: "int8" or "float32". expected_s: least time; bound: what sets it,
    `products` or "memory". measured_s: median time; share: expected_s / measured_s (both None where not measured).
    """

    kernel: str
    operator: str
    site: str
    shapes: tuple[tuple[int, ...], ...]
    outputs: int
    bytes: int
    weight_bytes: int
    macs: int
    linear: int
    products: str
    expected_s: float
    bound: str
    measured_s: float | None
    share: float | None


@dataclass(frozen=True)
class Listing:
    """rows in order of execution, for the first of `parts` of the batch; sizes: of the dynamic axes; peak: what this machine can do;
    run_s: median time of a whole run, with
    --time, which is more than the kernels' by what happens between them."""

    path: str
    sizes: dict[str, int]
    peak: Roofline
    rows: tuple[Row, ...]
    parts: int
    run_s: float | None

    @property
    def totals(self) -> dict[str, float | None]:
        """Sums over the rows and parts (parts are of equal size, or one entry more or less).

        linear_share: linear layers' least time at the peak of their products, over the time of a whole run.
        """
        at_peak = self.parts * sum(r.linear / self.peak.macs(r.products) for r in self.rows)
        kernels_s = self.parts * sum(r.measured_s or 0.0 for r in self.rows) if self.run_s is not None else None
        return {
            "kernels": self.parts * len(self.rows),
            "bytes": self.parts * sum(r.bytes for r in self.rows),
            "macs": self.parts * sum(r.macs for r in self.rows),
            "linear_macs": self.parts * sum(r.linear for r in self.rows),
            "expected_s": self.parts * sum(r.expected_s for r in self.rows),
            "kernels_s": kernels_s,
            "run_s": self.run_s,
            "linear_share": at_peak / self.run_s if self.run_s else None,
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "totals": self.totals}


def list_kernels(
    path: str | Path, *, sizes: Mapping[str, int] | None = None, timed: bool = False, threads: int = 1, runs: int = RUNS
) -> Listing:
    """Run a "library" artifact and list what it did, beside what this machine could do at this moment.

    sizes: axis -> size (default: those of the golden inputs); timed: measure, too.
    Raises UsageError for an axis that is unknown or a size that is not allowed.
    """
    loaded = load(path, threads=threads)
    calls = list(loaded.manifest["program"])
    golden = golden_inputs(loaded.folder)
    used = _sizes(loaded, golden, dict(sizes or {}))
    inputs = make_inputs(loaded.inputs, used, golden)
    steps, parts = loaded.trace(inputs, runs if timed else 1)
    run_s = _time(loaded, inputs, runs) if timed else None
    peak = measure(isa_named(loaded.isa), loaded.threads)
    return Listing(str(loaded.path), used, peak, tuple(_rows(steps, calls, peak, timed)), parts, run_s)


def _sizes(loaded: Artifact, golden: dict[str, Array], asked: dict[str, int]) -> dict[str, int]:
    axes = {name: (int(low), int(high)) for name, (low, high) in loaded.manifest["axes"].items()}
    for name, size in asked.items():
        if name not in axes:
            raise UsageError(f"--shapes: {loaded.path} has no dynamic axis {name!r}; it has {', '.join(axes) or 'none'}")
        low, high = axes[name]
        if not low <= size <= high:
            raise UsageError(f"--shapes: axis {name!r} is {size}; needed: {low}..{high}")
    stored: dict[str, int] = {}
    for spec in loaded.inputs:
        names = ((axis, name) for axis, name in enumerate(spec.shape) if isinstance(name, str))
        stored |= {name: int(golden[spec.name].shape[axis]) for axis, name in names}
    return {**stored, **asked}


def _time(loaded: Artifact, inputs: dict[str, Array], runs: int) -> float:
    now, spent = clock(loaded.threads), []
    for _ in range(runs + 1):
        started = now()
        loaded.run(inputs)
        spent.append(now() - started)
    return statistics.median(spent[1:])


def _rows(steps: list[Step], calls: list[dict[str, Any]], peak: Roofline, timed: bool) -> list[Row]:
    """Steps with what `lower` noted about them: its calls come in the same order, what TVM fused itself stands between them."""
    waiting = iter(calls)
    expected = next(waiting, None)
    matched: list[tuple[Step, dict[str, Any] | None]] = []
    for step in steps:
        call = None
        if expected is not None and expected["kernel"] == step.kernel:
            call, expected = expected, next(waiting, None)
        matched.append((step, call))
    all_weights = sum(_bytes(s, _outputs(s, c))[1] for s, c in matched)
    return [_row(step, call, peak, all_weights, timed) for step, call in matched]


def _row(step: Step, call: dict[str, Any] | None, peak: Roofline, all_weights: int, timed: bool) -> Row:
    """all_weights: bytes of constants the whole program reads, from first to last, before it starts again."""
    outputs = _outputs(step, call)
    products = str(call["products"]) if call else "float32"
    shapes = tuple(o.shape for o in step.operands)
    first, second = [*shapes, (), ()][:2]
    lead = math.prod(first[:-1])
    linear = lead * int(call["macs"]) if call else 0
    # The rows of the second operand are those of all batch entries, whether positions or the batch come first in it.
    pairs = lead * math.prod(second[:-1]) // first[0] * int(call["pair_macs"]) if call and call["pair_macs"] else 0
    nbytes, weights = _bytes(step, outputs)
    values, macs = nbytes - weights, linear + pairs
    computing = macs / peak.macs(products)
    # A kernel finds its inputs where the one before left them, and its weights where the last run did.
    moving = weights / peak.read_rate(all_weights) + values / peak.read_rate(values)
    expected = max(computing, moving)
    return Row(
        step.kernel,
        str(call["operator"]) if call else "",
        str(call["site"]) if call else "",
        shapes,
        outputs,
        nbytes,
        weights,
        macs,
        linear,
        products,
        expected,
        products if computing > moving else "memory",
        step.seconds if timed else None,
        expected / step.seconds if timed and step.seconds else None,
    )


def _outputs(step: Step, call: dict[str, Any] | None) -> int:
    return int(call["outputs"]) if call else min(1, len(step.operands))


def _bytes(step: Step, outputs: int) -> tuple[int, int]:
    """(bytes read and written, those of constants among them)."""
    split = len(step.operands) - outputs
    written = sum(o.bytes for o in step.operands[split:])
    most = written if any(word in step.kernel for word in _GATHERS) else None
    read = [(o.bytes if most is None else min(o.bytes, most), o.weight) for o in step.operands[:split]]
    return written + sum(size for size, _ in read), sum(size for size, weight in read if weight)
