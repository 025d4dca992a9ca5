"""The khtst:: operators in standard ONNX: first as opaque nodes of the domain "khtst", then lowered with the weights at hand.

Integer part, exact on every CPU: codes and weights are stored as uint8 with zero point 128 on both sides. onnxruntime's kernels
for uint8 x int8 add pairs of products in saturating int16 on CPUs without VNNI (wrong sums from codes near +-127 on), and its
int8 x int8 has no fast kernel before AVX-VNNI-INT8 (5 to 15 times slower); uint8 x uint8 is widened first: exact and fast.

QuantizeLinear with scale 1 does "round half to even, add the zero point, narrow" in one pass over the row; the multiplication by
127 / absmax that precedes it is the same single float32 product as in `khtst::quantize_rows`. The codes therefore have the same
bits as long as the row is finite and, if it is rotated, the rotation is exact (see `rotate`). Of a row that holds an infinity the codes
are undefined here (removing them costs 3 to 4 times the quantizer itself), but its dynamic scale is infinite, so nothing finite comes of
it. Of a row that holds NaN the result is undefined: onnxruntime's ReduceMax may pass over it, and looking for it would take another
pass over the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnxscript import opset18
from onnxscript.values import Op, Opset

from khtst_compile.errors import LoweringError
from khtst_compile.lower.onnx_codebook import codebook_lookup, step_lookup
from khtst_compile.lower.onnx_emit import DOMAIN, Emitter, attribute, stored
from khtst_compile.ops.quantize_rows import LEVELS, TINY
from khtst_compile.ops.rotate import LANES, hadamard, stage_strides

ZERO_POINT = 128

_FLOAT, _INT8, _INT32 = "tensor(float)", "tensor(int8)", "tensor(int32)"


def _schema(name: str, inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str]], ints: Sequence[str]) -> Any:
    """An OpSchema of the khtst domain; an input whose name ends in "?" is optional."""
    schema = onnx.defs.OpSchema
    option = schema.FormalParameterOption
    return schema(
        name,
        DOMAIN,
        1,
        inputs=[
            schema.FormalParameter(n.rstrip("?"), t, "", param_option=option.Optional if n.endswith("?") else option.Single)
            for n, t in inputs
        ],
        outputs=[schema.FormalParameter(n, t, "") for n, t in outputs],
        attributes=[schema.Attribute(a, schema.AttrType.INT, "", required=True) for a in ints],
    )


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """khtst:: operator -> function that records it as one opaque node, for torch.onnx.export(custom_translation_table=...)."""
    opset = Opset(DOMAIN, 1)
    quantize = Op(
        opset,
        "QuantizeRows",
        _schema(
            "QuantizeRows",
            [("x", _FLOAT), ("inv_smooth?", _FLOAT), ("static_scale?", _FLOAT)],
            [("codes", _INT8), ("scale", _FLOAT)],
            ["block", "points"],
        ),
    )
    linear = Op(
        opset,
        "W8A8Linear",
        _schema(
            "W8A8Linear",
            [("codes", _INT8), ("scale", _FLOAT), ("weight", _INT8), ("weight_scale", _FLOAT), ("bias?", _FLOAT)],
            [("y", _FLOAT)],
            [],
        ),
    )
    cache = Op(
        opset,
        "QuantizeCache",
        _schema(
            "QuantizeCache",
            [("k", _FLOAT), ("v", _FLOAT)],
            [("codes_k", _INT8), ("codes_v", _INT8), ("scales", _FLOAT)],
            ["kv_heads", "head_dim"],
        ),
    )
    rotate = Op(opset, "Rotate", _schema("Rotate", [("x", _FLOAT)], [("y", _FLOAT)], ["block", "points"]))

    def quantize_rows(x: Any, inv_smooth: Any, static_scale: Any, block: int, points: int) -> Any:
        return quantize(x, inv_smooth, static_scale, block=block, points=points)

    def w8a8_linear(codes: Any, scale: Any, weight: Any, weight_scale: Any, bias: Any) -> Any:
        return linear(codes, scale, weight, weight_scale, bias)

    def quantize_cache(k: Any, v: Any, kv_heads: int, head_dim: int, offsets: Sequence[int]) -> Any:
        if any(offsets):
            raise LoweringError(f"khtst::quantize_cache from columns {list(offsets)}; needed: an unfused program, from 0")
        return cache(k, v, kv_heads=kv_heads, head_dim=head_dim)

    lookup = Op(
        opset,
        "CodebookLookup",
        _schema(
            "CodebookLookup",
            [("z", _FLOAT), ("codes", _FLOAT), ("bias?", _FLOAT), ("table", _FLOAT)],
            [("values", _FLOAT), ("ids", _INT32)],
            ["running"],
        ),
    )
    steps_of = Op(
        opset,
        "StepLookup",
        _schema(
            "StepLookup",
            [("z", _FLOAT), ("thresholds", _FLOAT), ("steps", _FLOAT), ("basis", _INT32)],
            [("values", _FLOAT), ("ids", _INT32)],
            [],
        ),
    )

    def codebook(z: Any, codes: Any, bias: Any, table: Any, running: bool, certified: bool) -> Any:
        return lookup(z, codes, bias, table, running=int(running))

    def steps(z: Any, thresholds: Any, values: Any, basis: Any) -> Any:
        return steps_of(z, thresholds, values, basis)

    def rotation(x: Any, block: int, points: int) -> Any:
        return rotate(x, block=block, points=points)

    ops = torch.ops.khtst
    return {
        torch.ops.aten.sort.stable: _stable_sort,
        ops.quantize_rows.default: quantize_rows,
        ops.w8a8_linear.default: w8a8_linear,
        ops.quantize_cache.default: quantize_cache,
        ops.rotate.default: rotation,
        ops.codebook_lookup.default: codebook,
        ops.step_lookup.default: steps,
    }


def _stable_sort(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """All of an axis by TopK, of which ONNX says that equal elements keep their order; torch.onnx has it under another overload only."""
    size = opset18.Shape(x, start=dim, end=dim + 1 if dim != -1 else None)
    return opset18.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


@dataclass
class Lowered:
    """Nodes of each kind that were lowered."""

    quantizers: int = 0
    linears: int = 0
    rotations: int = 0
    lookups: int = 0


@dataclass(frozen=True)
class _Rows:
    """A lowered quantizer. codes: (..., K) uint8, code + 128; scale: (..., 1) float32, or None where static holds it, (1,) float32."""

    codes: ir.Value
    scale: ir.Value | None
    static: np.ndarray[Any, np.dtype[np.float32]] | None


class KhtstLowering(Emitter):
    """Replaces every node of the khtst domain in a model by standard ONNX (opset 18 or later), in place."""

    def __init__(self, model: ir.Model, rotation: str):
        super().__init__(model.graph)
        self.exact_rotation = rotation == "exact"
        self.done = Lowered()
        self._rows: dict[ir.Value, _Rows] = {}
        self._weights: dict[ir.Value, ir.Value] = {}

    def run(self) -> Lowered:
        """Lower all khtst nodes. Raises LoweringError where a weight is computed rather than stored."""
        handlers = {
            "QuantizeRows": self._quantize_rows,
            "QuantizeCache": self._quantize_cache,
            "W8A8Linear": self._w8a8_linear,
            "Rotate": self._rotate_node,
            "CodebookLookup": self._codebook_lookup,
            "StepLookup": self._step_lookup,
        }
        opaque = [node for node in self.graph if node.domain == DOMAIN]
        for node in opaque:
            self.begin(node)
            handlers[node.op_type](node)
        for node in reversed(opaque):
            self.graph.remove(node, safe=True)
        return self.done

    def _quantize_rows(self, node: ir.Node) -> None:
        x, inv_smooth, static_scale = (*node.inputs, None, None)[:3]
        assert x is not None
        t = x if inv_smooth is None else self.op("Mul", x, inv_smooth)
        t = self._rotate(t, attribute(node, "block"), attribute(node, "points"))
        scale, static = None, None
        if static_scale is None:
            scaled, scale = self._scaled(t)
        else:
            static = stored(static_scale, "static scale").astype(np.float32).reshape(1)
            inv = self.constant("inv", (np.float32(1.0) / static).astype(np.float32))
            scaled = self.op("Clip", self.op("Mul", t, inv), self.float32(-LEVELS), self.float32(LEVELS))
        one = self.float32(1.0)
        codes = self.op("QuantizeLinear", scaled, one, self._zero_point(), name="codes")
        self._rows[node.outputs[0]] = rows = _Rows(codes, scale, static)
        if self._read_elsewhere(node.outputs[0], 0):
            int8 = self.op("QuantizeLinear", scaled, one, self.constant("zero", np.array(0, np.int8)))
            self._replace_but(node.outputs[0], int8, 0)
        if self._read_elsewhere(node.outputs[1], 1):
            self._replace_but(node.outputs[1], self._full_scale(x, rows), 1)
        self.done.quantizers += 1

    def _scaled(self, t: ir.Value) -> tuple[ir.Value, ir.Value]:
        """t: (..., K) -> t * (127 / absmax) to be rounded, and absmax / 127, (..., 1)."""
        absmax = self.op("ReduceMax", self.op("Abs", t), self.ints(-1), keepdims=1)
        a = self.op("Max", absmax, self.float32(TINY))
        # |t| <= a, so the product rounds to at most 127 and needs no clamp.
        return self.op("Mul", t, self.op("Div", self.float32(LEVELS), a)), self.op("Div", a, self.float32(LEVELS))

    def _quantize_cache(self, node: ir.Node) -> None:
        heads, width = attribute(node, "kv_heads"), attribute(node, "head_dim")
        zero, scales = self.constant("zero", np.array(0, np.int8)), []
        for at, t in enumerate(node.inputs):
            assert t is not None
            split = self.op("Reshape", t, self.ints(0, 0, heads, width))
            scaled, scale = self._scaled(self.op("Transpose", split, perm=[1, 0, 2, 3]))
            codes = self.op("QuantizeLinear", scaled, self.float32(1.0), zero)
            self.replace(node.outputs[at], self.op("Reshape", codes, self.ints(0, 0, heads * width)))
            scales.append(self.op("Squeeze", scale, self.ints(-1)))
        self.replace(node.outputs[2], self.op("Concat", *scales, axis=2))

    def _full_scale(self, x: ir.Value, rows: _Rows) -> ir.Value:
        """The scale output of `khtst::quantize_rows` as it is defined: x.shape[:-1]."""
        if rows.scale is not None:
            return self.op("Squeeze", rows.scale, self.ints(-1))
        assert rows.static is not None
        return self.op("Expand", self.constant("scale", rows.static), self.op("Shape", x, start=0, end=-1))

    def _w8a8_linear(self, node: ir.Node) -> None:
        codes, scale, weight, weight_scale, bias = (*node.inputs, None)[:5]
        assert codes is not None and scale is not None and weight is not None and weight_scale is not None
        rows = self._rows.get(codes)
        if rows is not None and not _scale_of(scale, codes):
            rows = _Rows(rows.codes, self.op("Unsqueeze", scale, self.ints(-1)), None)
        if rows is None:
            wide = self.op("Add", self.op("Cast", codes, to=ir.DataType.INT32), self.constant("offset", np.int32(ZERO_POINT)))
            unsigned = self.op("Cast", wide, to=ir.DataType.UINT8)
            rows = _Rows(unsigned, self.op("Unsqueeze", scale, self.ints(-1)), None)
        zero = self._zero_point()
        acc = self.op("MatMulInteger", rows.codes, self._weight(weight), zero, zero, name="acc")
        y = self.op("Cast", acc, to=ir.DataType.FLOAT)
        if rows.scale is not None:
            # Not acc * (scale * weight_scale): onnxruntime (1.32 at least) fuses that form into MatMulIntegerToFloat, which takes the
            # scale of the first row for all rows, silently.
            y = self.op("Mul", self.op("Mul", y, weight_scale), rows.scale)
        else:
            assert rows.static is not None
            factor = rows.static * stored(weight_scale, "weight scale").astype(np.float32)
            y = self.op("Mul", y, self.constant("factor", factor))
        self.replace(node.outputs[0], y if bias is None else self.op("Add", y, bias))
        self.done.linears += 1

    def _codebook_lookup(self, node: ir.Node) -> None:
        codebook_lookup(self, node)
        self.done.lookups += 1

    def _step_lookup(self, node: ir.Node) -> None:
        step_lookup(self, node)
        self.done.lookups += 1

    def _rotate_node(self, node: ir.Node) -> None:
        x = node.inputs[0]
        assert x is not None
        self.replace(node.outputs[0], self._rotate(x, attribute(node, "block"), attribute(node, "points")))

    def _rotate(self, x: ir.Value, block: int, points: int) -> ir.Value:
        if block == 0:
            return x
        self.done.rotations += 1
        shape = self.op("Shape", x)
        t = self._butterflies(x, block, points) if self.exact_rotation else self._kronecker(x, block, points)
        return self.op("Reshape", t, shape)

    def _kronecker(self, x: ir.Value, block: int, points: int) -> ir.Value:
        """The transform as one or two small products: H(block) = H(block / 16) (x) H(16) for the full form, (x) I(16) for the cheap one.

        A product may add in any order, so the result differs from the butterflies in the last bits: see `rotation_slack`.
        """
        groups = block // LANES
        t = self.op("Reshape", x, self.ints(-1, groups, LANES))
        if groups > 1:
            t = self.op("MatMul", self._hadamard(groups), t)
        return self.op("MatMul", t, self._hadamard(LANES)) if points == block else t

    def _butterflies(self, x: ir.Value, block: int, points: int) -> ir.Value:
        """The transform stage by stage, the additions those of `khtst::rotate`: equal to the bit, about three times slower.

        The stages inside a group of 16 run on the transposed array, so that both halves of a pair are contiguous.
        """
        t, across = x, [s for s in stage_strides(block, points) if s >= LANES]
        for stride in across:
            t = self._butterfly(self.op("Reshape", t, self.ints(-1, 2, stride)))
        if points != block:
            return t
        t = self.op("Transpose", self.op("Reshape", t, self.ints(-1, LANES)), perm=[1, 0])
        for stride in stage_strides(block, points)[len(across) :]:
            t = self._butterfly(self.op("Reshape", t, self.ints(LANES // (2 * stride), 2, stride, -1)))
        return self.op("Transpose", self.op("Reshape", t, self.ints(LANES, -1)), perm=[1, 0])

    def _butterfly(self, pairs: ir.Value) -> ir.Value:
        """(n, 2, ...) -> the same shape, [:, 0] the sums and [:, 1] the differences."""
        a, b = self.ops("Split", [pairs], 2, {"axis": 1, "num_outputs": 2})
        return self.op("Concat", self.op("Add", a, b), self.op("Sub", a, b), axis=1)

    def _hadamard(self, points: int) -> ir.Value:
        return self.constant(f"hadamard{points}", hadamard(points, points).to(torch.float32).numpy())

    def _weight(self, weight: ir.Value) -> ir.Value:
        """(N, K) int8 initializer -> (K, N) uint8 initializer holding weight + 128; one per weight, however many linears read it."""
        if weight not in self._weights:
            codes = stored(weight, "weight")
            packed = np.ascontiguousarray((codes.astype(np.int16) + ZERO_POINT).astype(np.uint8).T)
            value = ir.Value(
                name=f"{weight.name}.kn",
                const_value=ir.Tensor(packed),
                type=ir.TensorType(ir.DataType.UINT8),
                shape=ir.Shape(packed.shape),
            )
            self.graph.register_initializer(value)
            self._weights[weight] = value
        return self._weights[weight]

    @staticmethod
    def _reads(node: ir.Node, at: int, index: int | None) -> bool:
        """Whether input `at` of `node` is input `index` of a W8A8Linear."""
        return (node.domain, node.op_type, at) == (DOMAIN, "W8A8Linear", index)

    def _read_elsewhere(self, value: ir.Value, index: int) -> bool:
        """Whether anything but input `index` of a W8A8Linear reads `value`."""
        return value.is_graph_output() or not all(self._reads(node, at, index) for node, at in value.uses())

    def _replace_but(self, old: ir.Value, new: ir.Value, but: int) -> None:
        """`replace`, except that input `but` of W8A8Linear nodes keeps reading `old`, to be lowered later."""
        self.replace(old, new, lambda node, at: self._reads(node, at, but))

    def _zero_point(self) -> ir.Value:
        return self.constant("zero_point", np.array(ZERO_POINT, np.uint8))


def rotation_slack(block: int, points: int) -> float:
    """How far `rotation="matmul"` can move t * (127 / absmax) from its value with exact butterflies, in codes.

    A sum of n terms in any order errs by at most (n - 1) u sum|x|, u = 2**-24 (Higham, Accuracy and Stability, eq. 4.4); here over
    `points` values of x, in log2(points) stages there and in one or two products here. sum|x| <= sqrt(points) |x|_2 and |x|_2 <= absmax,
    because H / sqrt(points) is orthogonal and the largest of `points` values is at least their root mean square. The factor 2: t
    and absmax both move. 4 u more for the roundings of the quotient and of the product. Codes differ by at most one, and only
    where that value is this close to a half: 5e-3 for the full transform of 128.
    """
    if block == 0:
        return 0.0
    terms = (block // LANES - 1) + (LANES - 1 if points == block else 0)
    return LEVELS * 2.0**-24 * (2 * math.sqrt(points) * (terms + math.log2(points)) + 4)


def _scale_of(scale: ir.Value, codes: ir.Value) -> bool:
    """Whether both come from one quantizer."""
    return scale.producer() is not None and scale.producer() is codes.producer()
