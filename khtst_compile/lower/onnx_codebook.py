"""khtst::codebook_lookup and khtst::step_lookup in standard ONNX: the ids and the bits of `ops/codebook.py`.

A MatMul scores all codes, in an order of sums that is onnxruntime's own. The best few of a row are scored again in the written order, and
decide where no other code can win: where the next best MatMul score is farther below the best than both sums can be off. The other rows
go through a loop that scores every code in the written order, one row at a time, so that memory stays that of the codebook.

onnxruntime's maximum and TopK may pass over NaN, a sum never does: the sum of squares finds it, and lost rows are zeros from there on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from khtst_compile.errors import LoweringError
from khtst_compile.lower.onnx_emit import Emitter, attribute, stored
from khtst_compile.ops.codebook import LANES, LARGEST, score_error

ROWS, VALUES, IDS = "lookup.rows", "lookup.values", "lookup.ids"
"""What a lookup reads, its values and its ids are called, after the name of its first result and a dot."""
CANDIDATES = 2
"""Codes scored again for every row: of random vectors fewer than one in 10,000 have a third within the error bound."""
U = 2.0**-24

Floats = npt.NDArray[np.float32]


def codebook_lookup(e: Emitter, node: ir.Node) -> None:
    """Replace a CodebookLookup. Raises LoweringError where a table is computed, or holds what sums cannot."""
    z, codes_value, bias_value, table_value = node.inputs
    assert z is not None and codes_value is not None and table_value is not None
    codes, table = _floats(codes_value, "codes"), _floats(table_value, "table")
    bias = None if bias_value is None else _floats(bias_value, "bias")
    levels, _, features = codes.shape
    most = float(np.finfo(np.float32).max) / (LARGEST * 1.01 * features)
    if not np.abs(codes).max(initial=0) <= most:
        raise LoweringError(
            f"onnx: codebook {codes_value.name!r} holds {np.abs(codes).max():.3g}; needed: at most {most:.3g}, so that no score is "
            "infinite; scale the codes down"
        )
    flat = e.op("Reshape", z, e.ints(-1, features), name=ROWS)
    left, total, good, ids = flat, None, None, []
    for level in range(levels):
        peak = e.op("ReduceMax", e.op("Abs", left), e.ints(-1), keepdims=1)
        norm = e.op("ReduceL2", left, e.ints(-1), keepdims=1)
        fine = e.op("And", e.op("LessOrEqual", peak, e.float32(LARGEST)), e.op("Not", e.op("IsNaN", norm)))
        good = fine if good is None else e.op("And", good, fine)
        left = e.op("Where", good, left, e.float32(0.0))
        peak = e.op("Where", good, peak, e.float32(0.0))
        book = _Level(e, codes[level], None if bias is None else bias[level])
        ids.append(e.op("Where", good, book.nearest(left, peak, norm), e.constant("int", np.array(0, np.int64))))
        value = e.op("Gather", e.constant("table", table[level]), e.op("Squeeze", ids[-1], e.ints(1)), axis=0)
        total = value if total is None else e.op("Add", total, value)
        if level + 1 < levels:
            left = e.op("Sub", left, value) if attribute(node, "running") else e.op("Sub", flat, total)
    assert total is not None and good is not None
    values = e.op("Where", good, total, e.float32(float("nan")), name=VALUES)
    stacked = e.op("Concat", *ids, axis=1) if levels > 1 else ids[0]
    narrow = e.op("Cast", stacked, to=ir.DataType.INT32, name=IDS)
    lead = e.op("Shape", z, start=0, end=-1)
    for output, found, last in ((node.outputs[0], values, table.shape[-1]), (node.outputs[1], narrow, levels)):
        shape = e.op("Concat", lead, e.ints(last), axis=0)
        e.replace(output, e.op("Reshape", found, shape, allowzero=1))


class _Level:
    """One codebook: codes (K, d), bias (K,) or None."""

    def __init__(self, e: Emitter, codes: Floats, bias: Floats | None):
        self.e, self.count, self.features = e, *codes.shape
        self.codes = e.constant("codes", codes)
        self.bias = None if bias is None else e.constant("bias", bias)
        self._window = window(codes, bias)
        # What a row of zeros has: all products are zeros, so the bias alone decides.
        self._of_zeros = 0 if bias is None else int(np.argmax(bias))
        self._index = e.constant("index", np.arange(self.count, dtype=np.int64))
        self._none = e.constant("int", np.array(self.count, np.int64))

    def nearest(self, left: ir.Value, peak: ir.Value, norm: ir.Value) -> ir.Value:
        """left: (n, d), finite; peak, norm: (n, 1), its largest magnitudes and its lengths, of lost rows 0 and anything -> ids (n, 1)
        int64."""
        e = self.e
        if self.count <= CANDIDATES + 1:
            return self._first(self._scores(e.op("Mul", e.op("Unsqueeze", left, e.ints(1)), self.codes), self.bias), self._index)
        scores = e.op("MatMul", left, e.op("Transpose", self.codes, perm=[1, 0]))
        if self.bias is not None:
            scores = e.op("Add", scores, self.bias)
        top, at = e.ops("TopK", [scores, e.ints(CANDIDATES + 1)], 2, {"axis": -1, "largest": 1, "sorted": 1})
        parts = e.ints(1, CANDIDATES - 1, 1)
        best, _, next_best = e.ops("Split", [top, parts], 3, {"axis": 1})
        few, _ = e.ops("Split", [at, e.ints(CANDIDATES, 1)], 2, {"axis": 1})
        again = e.op("Mul", e.op("Unsqueeze", left, e.ints(1)), e.op("Gather", self.codes, few, axis=0))
        ids = self._first(self._scores(again, None if self.bias is None else e.op("Gather", self.bias, few, axis=0)), few)
        zeros = e.op("Equal", peak, e.float32(0.0))
        ids = e.op("Where", zeros, e.constant("int", np.array(self._of_zeros, np.int64)), ids)
        slope, offset = self._window
        width = e.op("Add", e.op("Mul", norm, e.float32(slope)), e.float32(offset))
        settled = e.op("Or", e.op("Less", next_best, e.op("Sub", best, width)), zeros)
        open_ = e.op("NonZero", e.op("Squeeze", e.op("Not", settled), e.ints(1)))
        return self._all_codes(left, ids, e.op("Squeeze", open_, e.ints(0)))

    def _all_codes(self, left: ir.Value, ids: ir.Value, rows: ir.Value) -> ir.Value:
        """ids (n, 1), those of `rows` (r,) int64 found anew among all codes, row by row."""
        e = self.e
        number = ir.Value(name=e.inner_name(), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
        going = ir.Value(name=e.inner_name(), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(()))
        with e.body() as nodes:
            row = e.op("Gather", left, e.op("Gather", rows, number, axis=0), axis=0)  # (d,)
            scores = self._scores(e.op("Mul", row, self.codes), self.bias)
            best = e.op("Reshape", self._first(scores, self._index, axis=0), e.ints(1))
            still = e.op("Identity", going)
        for value, kind, shape in ((best, ir.DataType.INT64, (1,)), (still, ir.DataType.BOOL, ())):
            value.type, value.shape = ir.TensorType(kind), ir.Shape(shape)
        body = ir.Graph([number, going], [still, best], nodes=nodes, name="row")
        found = e.op("Loop", e.op("Size", rows), e.constant("true", np.array(True)), body=body)
        return e.op("ScatterElements", ids, e.op("Unsqueeze", rows, e.ints(1)), found, axis=0)

    def _scores(self, products: ir.Value, bias: ir.Value | None) -> ir.Value:
        """products: (.., d), rounded; bias: (..) or None -> `exact_scores` (..)."""
        e, parts = self.e, -(-self.features // LANES)
        if self.features % LANES:
            products = e.op("Pad", products, e.ints(0, parts * LANES - self.features), e.float32(0.0), e.ints(-1))
        split = e.ops("Split", [products], parts, {"axis": -1, "num_outputs": parts}) if parts > 1 else [products]
        total = split[0]
        for part in split[1:]:
            total = e.op("Add", total, part)
        for _ in range(LANES.bit_length() - 1):
            total = e.op("Add", *e.ops("Split", [total], 2, {"axis": -1, "num_outputs": 2}))
        score = e.op("Squeeze", total, e.ints(-1))
        return score if bias is None else e.op("Add", score, bias)

    def _first(self, scores: ir.Value, ids: ir.Value, axis: int = 1) -> ir.Value:
        """The lowest of `ids` whose score is the largest along `axis`, which stays as 1."""
        e = self.e
        best = e.op("ReduceMax", scores, e.ints(axis), keepdims=1)
        return e.op("ReduceMin", e.op("Where", e.op("Equal", scores, best), ids, self._none), e.ints(axis), keepdims=1)


def window(codes: Floats, bias: Floats | None) -> tuple[float, float]:
    """codes: (K, d), bias: (K,) or None -> (slope, offset): a code whose MatMul score is more than |z| slope + offset below another's is
    not the nearest, for a float32 |z|.

    Twice what both scores are off: of the written order `score_error`, of a sum of d + 1 terms in any order (d + 1) u |z| |c| (Higham,
    Accuracy and Stability, 3.5); one rounding more for the bias on each side, and two for the window itself. Products below the
    normal floats are off by 2**-126 at most each, and squares of elements whose norm is lost as well are below 2**-148.
    """
    features = codes.shape[1]
    longest = float(np.sqrt(np.square(codes.astype(np.float64)).sum(-1)).max(initial=0))
    most = 0.0 if bias is None else float(np.abs(bias[np.isfinite(bias)]).max(initial=0))
    slope = 2 * longest * (score_error(features) + (features + 1) * U + 4 * U)
    offset = 8 * U * most + 4 * features * 2.0**-126 + slope * features**0.5 * 2.0**-74
    return 1.02 * slope, 1.02 * offset


def step_lookup(e: Emitter, node: ir.Node) -> None:
    """Replace a StepLookup. Raises LoweringError where a table is computed."""
    z, thresholds, steps, basis = (v for v in node.inputs if v is not None)
    values = _floats(steps, "steps")
    features, count = values.shape
    rows = e.op("Identity", z, name=ROWS)
    passed = e.op(
        "GreaterOrEqual", e.op("Unsqueeze", rows, e.ints(-1)), e.constant("thresholds", _floats(thresholds, "thresholds"))
    )
    digits = e.op("ReduceSum", e.op("Cast", passed, to=ir.DataType.INT64), e.ints(-1), keepdims=0)
    places = e.op("Add", digits, e.constant("first", np.arange(features, dtype=np.int64) * count))
    found = e.op("Gather", e.constant("steps", values.reshape(-1)), places, axis=0)
    known = e.op("Where", e.op("IsNaN", rows), e.float32(float("nan")), found, name=VALUES)
    weighted = e.op("Mul", digits, e.constant("basis", stored(basis, "basis").astype(np.int64)))
    ids = e.op("Cast", e.op("ReduceSum", weighted, e.ints(-1), keepdims=0), to=ir.DataType.INT32, name=IDS)
    # The results take other names, those of the values they replace: the ones above are for whoever looks inside.
    e.replace(node.outputs[0], e.op("Identity", known))
    e.replace(node.outputs[1], e.op("Identity", ids))


def _floats(value: ir.Value, what: str) -> Any:
    return np.ascontiguousarray(stored(value, what), dtype=np.float32)
