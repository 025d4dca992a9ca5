"""Is the lowered program still the same function? Metrics, budgets with their reasons, and the per-layer comparison.

Two questions are kept apart. *Agreement*: does each kernel, on the inputs it really had, give what its operator means? Integers must
be equal; floats have a budget with its reason. *Accuracy*: how far are the outputs from the original fp32 model? That is the recipe's
doing, measured on whole outputs. End-to-end agreement of two correct int8 programs is not small: one float rounded differently before a
quantizer moves a code by one, and the layers after it amplify that like any quantization error. So agreement is judged kernel by kernel.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile.errors import OverBudget

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Row:
    """One comparison. site: where in the model; what: operator and value; metric: unit of `value` and `budget`; reason: of the budget."""

    site: str
    what: str
    metric: str
    value: float
    budget: float
    reason: str

    @property
    def ok(self) -> bool:
        """Is the value within its budget? A value that is no number never is."""
        return bool(self.value <= self.budget)

    def to_json(self) -> dict[str, Any]:
        value = self.value if np.isfinite(self.value) else str(self.value)
        fields = {"site": self.site, "what": self.what, "metric": self.metric, "value": value}
        return {**fields, "budget": self.budget, "ok": self.ok, "reason": self.reason}


@dataclass(frozen=True)
class ParityReport:
    """rows: in execution order; summary: figures of the whole comparison (dB, cosine, counts)."""

    rows: tuple[Row, ...]
    summary: dict[str, float | str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(r.ok for r in self.rows)

    @property
    def first_over(self) -> Row | None:
        """The first comparison, in execution order, that is over its budget."""
        return next((r for r in self.rows if not r.ok), None)

    def require(self, where: str) -> None:
        """Raise OverBudget naming the first layer over budget."""
        row = self.first_over
        if row is not None:
            over = sum(not r.ok for r in self.rows)
            raise OverBudget(
                f"{where}: first over budget is {row.site} ({row.what}): {row.metric} {row.value:.4g}, budget {row.budget:.4g} "
                f"({row.reason}); {over} of {len(self.rows)} comparisons are over"
            )

    def to_json(self) -> dict[str, Any]:
        first = self.first_over
        return {
            "ok": self.ok,
            "summary": self.summary,
            "first_over": first.to_json() if first else None,
            "rows": [r.to_json() for r in self.rows],
        }

    def table(self, limit: int | None = None) -> str:
        """Aligned text, one line a comparison; with `limit`, failures first and then the closest to their budgets."""
        rows = list(self.rows)
        if limit is not None and len(rows) > limit:
            rows = sorted(rows, key=lambda r: (r.ok, r.budget - r.value))[:limit]
            rows.sort(key=self.rows.index)
        cells = [("layer", "value", "metric", "measured", "budget", "")]
        cells += [(r.site, r.what, r.metric, f"{r.value:.4g}", f"{r.budget:.4g}", "ok" if r.ok else "OVER") for r in rows]
        widths = [max(len(c[i]) for c in cells) for i in range(6)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)

    def junit(self) -> str:
        """JUnit XML, one test case a comparison."""
        failures = sum(not r.ok for r in self.rows)
        lines = [f'<testsuite name="khtst-compile verify" tests="{len(self.rows)}" failures="{failures}">']
        for r in self.rows:
            name = html.escape(f"{r.what}: {r.metric}", quote=True)
            head = f'  <testcase classname="{html.escape(r.site, quote=True)}" name="{name}"'
            if r.ok:
                lines.append(head + "/>")
                continue
            message = html.escape(f"{r.value:.6g} over budget {r.budget:.6g} ({r.reason})", quote=True)
            lines += [head + ">", f'    <failure message="{message}"/>', "  </testcase>"]
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + "\n".join([*lines, "</testsuite>"]) + "\n"


def relative_error_db(got: Array, ref: Array) -> float:
    """20 log10(||got - ref|| / ||ref||) over all elements; -inf where equal. NaN anywhere gives NaN, which is over every budget."""
    a, b = got.astype(np.float64).ravel(), ref.astype(np.float64).ravel()
    error, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if error == 0.0:
        return float("-inf")
    return float(20 * np.log10(error / size)) if size else float("inf")


def worst_cosine(got: Array, ref: Array) -> float:
    """Smallest cosine between corresponding rows (last axis); rows where both are zero count as 1."""
    a = got.astype(np.float64).reshape(-1, got.shape[-1] if got.ndim else 1)
    b = ref.astype(np.float64).reshape(-1, ref.shape[-1] if ref.ndim else 1)
    product = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero = (np.abs(a).max(axis=1, initial=0) == 0) & (np.abs(b).max(axis=1, initial=0) == 0)
    cosine = np.where(both_zero, 1.0, (a * b).sum(axis=1) / np.where(product == 0, 1.0, product))
    return float(cosine.min()) if cosine.size else 1.0


def codes_differ(got: Array, ref: Array) -> tuple[float, float]:
    """(largest difference, share of elements that differ) of two int8 arrays."""
    difference = np.abs(got.astype(np.int16) - ref.astype(np.int16))
    return (float(difference.max()), float((difference > 0).mean())) if difference.size else (0.0, 0.0)


def worst_ulp_of_terms(got: Array, ref: Array, terms: Array) -> float:
    """Largest |got - ref| in units of 2**-23 of the sum of magnitudes that made each element (float32 rounding unit of its terms)."""
    if not got.size:
        return 0.0
    unit = np.maximum(terms.astype(np.float64), np.finfo(np.float32).tiny) * 2.0**-23
    return float((np.abs(got.astype(np.float64) - ref.astype(np.float64)) / unit).max())
