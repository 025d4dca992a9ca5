"""A mixture's experts in one kernel: slots sorted by expert, gate and up as one product, activation, codes, second product, weighted sums.

Per block of rows, and each step in parallel:

    sort      slots by expert; what a row has for several experts is copied to each of its places
    first     for panels of the experts in use: h = product of an expert's places, activation(h) to memory
    quantize  row by row, where the products are int8
    second    for panels of the output: y = residual or 0, then, experts ascending, y = fma(weight, f, y)

The first product's panels are shared out so that threads get equal numbers of places, not of experts. Of the second, one task has a
panel of all experts: it adds in their order, without a buffer of what is to be added. A single row walks several panels at once, each
read from its start to its end, since all it does is read weights.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

import numpy.typing as npt
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from khtst_compile.errors import LoweringError
from khtst_compile.layout import Packed
from khtst_compile.ops.moe import ACTIVATIONS, CLAMPED
from khtst_compile.targets.isa import Isa

from .act import activation, sigmoid
from .experts_product import FloatProduct, Int8Product, Product
from .experts_sort import Slots, allocate, for_pieces, sort
from .quantize import Quantizer, RowQuantizer
from .rotation import Rotation
from .rows import LEAD2, Arguments, Lead, Place, Source, each_vector, fixed, for_rows, load, only
from .tiles import ROW_BLOCK, TASKS, opaque, walk_rows
from .vec import LANES, Expr, Floats, at_least, at_most, f32, fma, mul, rounded, small, span, splat, store

PLACES = 8192
"""Places of a block of rows, from which its length follows: what they need in between stays in a large cache."""
_STACK_FLOATS = 255
"""TVM turns a buffer of 1,024 bytes or more into a heap call."""


@dataclass(frozen=True)
class Experts:
    """The kernel experts(x, ids, weights, arrays of `pack`, [residual]) -> y.

    x:         int8: codes (lead.., round_up(features, 16)) as stored, then their scale (lead..) float32; else (lead.., features) float32
    ids:       (lead.., top_k) int32, below 0 for none
    weights:   (lead.., top_k) float32; a row with a NaN comes out as NaN
    residual:  (lead.., outputs) float32, where there is one
    y:         (lead.., outputs) float32

    count experts of features -> inner -> outputs; act, gated, numbers: see `ops.moe.activate`; smooth, rotation: of the inner features
    before they are quantized.
    """

    isa: Isa
    count: int
    features: int
    inner: int
    outputs: int
    top_k: int
    lead: Lead = LEAD2
    act: str = "silu"
    gated: bool = True
    numbers: tuple[float, ...] = ()
    int8: bool = True
    smooth: bool = False
    rotation: Rotation | None = None
    residual: bool = False
    name: str = "experts"

    def __post_init__(self) -> None:
        if min(self.count, self.features, self.inner, self.outputs, self.top_k) < 1:
            raise LoweringError(f"{self.name}: {self}; needed: sizes of at least 1")
        if self.act not in ACTIVATIONS:
            raise LoweringError(f"{self.name}: activation '{self.act}' has no kernel; use one of {', '.join(ACTIVATIONS)}")
        Quantizer(self.smooth, self.rotation).check(self.inner, self.name)

    @cached_property
    def first(self) -> Product:
        """x to the inner features, before the activation."""
        made = Int8Product if self.int8 else FloatProduct
        return made(self.isa, self.count, 2 if self.gated else 1, self.inner, self.features, "up")

    @cached_property
    def second(self) -> Product:
        """Inner features to the output."""
        made = Int8Product if self.int8 else FloatProduct
        return made(self.isa, self.count, 1, self.outputs, self.inner, "down")

    @property
    def parts(self) -> int:
        """Runs that rows are cut into, so that the second product has tasks enough."""
        return -(-TASKS // self.second.panels.count)

    @property
    def block(self) -> int:
        """Rows of a block."""
        return max(1, PLACES // self.top_k)


def pack(
    spec: Experts,
    up: npt.NDArray[Any],
    up_scale: Floats | None,
    up_bias: Floats | None,
    inv_smooth: Floats | None,
    down: npt.NDArray[Any],
    down_scale: Floats | None,
    down_bias: Floats | None,
) -> list[npt.NDArray[Any] | Packed]:
    """The constant arguments, in order.

    up: (E, F, H), of gated experts first all gates; down: (E, N, I); the others as `w8a8_experts` has them. int8,
    or float32 without scales.
    Raises LoweringError for weights that do not fit the kernel, or -128 among them.
    """
    halves = 2 if spec.gated else 1
    needed = ((spec.count, halves * spec.inner, spec.features), (spec.count, spec.outputs, spec.inner))
    if (up.shape, down.shape) != needed:
        raise LoweringError(f"{spec.name}: weights {up.shape} and {down.shape}; needed {needed[0]} and {needed[1]}")

    def split(values: Any) -> Any:
        return None if values is None else values.reshape(spec.count, halves, spec.inner, *values.shape[2:])

    def one(values: Any) -> Any:
        return None if values is None else values[:, None]

    arrays = spec.first.pack(split(up), split(up_scale), split(up_bias))
    if inv_smooth is not None:
        arrays.append(inv_smooth.reshape(-1))
    return arrays + spec.second.pack(one(down), one(down_scale), one(down_bias))


@lru_cache(maxsize=32)  # blocks of one shape share it
def prim_func(spec: Experts) -> tirx.PrimFunc:
    """The TIR of `spec`."""
    first, second = spec.first, spec.second
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(spec.name)
        T.func_attr({"global_symbol": spec.name, "tirx.noalias": True})
        args = Arguments(spec.lead.dims())
        args.rows("x", first.width if spec.int8 else spec.features, first.dtype)
        if spec.int8:
            args.rows("x_scale", None)
        args.rows("ids", spec.top_k, "int32")
        args.rows("weights", spec.top_k)
        first.declare(args)
        if spec.smooth:
            args.vector("inv_smooth", spec.count * spec.inner)
        second.declare(args)
        if spec.residual:
            args.rows("residual", spec.outputs)
        args.rows("y", spec.outputs)
        rows, flat = args.flatten()
        # TVM moves allocations to the top, where only the arguments' dimensions are defined; 0 bytes would fail.
        aligned = max(first.aligned, second.aligned)
        most = T.min(reduce(operator.mul, args.dims), T.int64(spec.block)) + 1
        places = most * spec.top_k + spec.count * spec.parts * (aligned - 1)
        _Emitter(spec, flat, allocate(spec.count, spec.parts, most, places, spec.smooth), places, aligned).all(rows)
    return builder.get()


class _Emitter:
    """Emits the steps. flat: arguments by name; places: their most in a block."""

    def __init__(self, spec: Experts, flat: dict[str, Expr], slots: Slots, places: Expr, aligned: int):
        self.spec, self.flat, self.slots, self.places, self.aligned = spec, flat, slots, places, aligned
        self.pitch = spec.first.panels.padded  # of inner features
        self.x = self._room(spec.first.width, spec.first.dtype)
        self.middle = self._room(self.pitch, "float32")
        self.codes = self._room(spec.second.width, spec.second.dtype) if spec.int8 else self.middle
        self.x_scale, self.scale = (self._room(1, "float32") if spec.int8 else None for _ in range(2))

    def _room(self, width: int, dtype: str) -> Expr:
        return T.alloc_buffer((self.places * width,), dtype, scope="global")

    def all(self, rows: Expr) -> None:
        spec = self.spec
        with T.serial(T.int64(0), T.ceildiv(rows, T.int64(spec.block))) as block:
            start = opaque(block * spec.block)
            count = opaque(T.min(rows - start, T.int64(spec.block)))
            ids, weights = self.flat["ids"], self.flat["weights"]
            cut = (spec.top_k, spec.count, spec.parts, self.aligned, ROW_BLOCK)
            sort(self.slots, ids, weights, *cut, start, count)
            used = opaque(self.slots.number(1))
            self._gather(used)
            self._first(used, count)
            if spec.int8:
                self._quantize(used)
            self._second(used, start, count)

    def _gather(self, used: Expr) -> None:
        """Each place's row of x, one after the other."""
        spec, width = self.spec, self.spec.first.width
        given = width if spec.int8 else spec.features

        def one(place: Place) -> None:
            row = fixed(T.cast(self.slots.row[place.row], "int64"))
            source, at = T.Bind(row * given), T.Bind(place.row * width)
            if spec.int8:
                with T.serial(T.int64(0), T.int64(width // LANES)) as v:
                    store(self.x, self.flat["x"][span(source + v * LANES)], at + v * LANES)
                T.buffer_store(self.x_scale, self.flat["x_scale"][row], [place.row])
            else:
                each_vector(given, lambda off, valid: store(self.x, load(self.flat["x"], source + off, valid), at + off))

        for_rows(used, width, {}, True, [one])

    def _first(self, used: Expr, count: Expr) -> None:
        """activation(product) of every place, to `middle`."""
        spec, product = self.spec, self.spec.first
        x = product.prepare(self.x, used, self.places, product.width)
        group = math.gcd(product.panels.count, max(1, product.streams // product.halves))

        def unit(expert: Expr, start: Expr, places: Expr, number: Expr) -> None:
            def tile(first: Expr, many: int, panels: list[Expr]) -> None:
                scratch = [self._scratch(many, product) for _ in panels] if spec.gated else []
                side = [product.panel(expert, p, half) for p in panels for half in range(product.halves)]
                for place, i, j, value in product.values(self.flat, x, self.x_scale, side, [first] * len(side), many):
                    panel, half = divmod(place, product.halves)
                    if half:
                        self._keep(scratch[panel], product, i, j, value)
                    else:
                        store(self.middle, value, (first + i) * self.pitch + self._column(product, panels[panel], j))
                for number, panel in enumerate(panels):
                    self._activate(scratch[number] if spec.gated else [], panel, first, many)

            def all_rows(panel: Expr) -> None:
                walk_rows(
                    start,
                    opaque(start + places),
                    product.panels.rows,
                    lambda row, many: tile(row, many, [panel]),
                    lambda *_: None,
                )

            panels = [opaque(number * group + g) for g in range(group)]
            if product.streams == 1:
                for panel in panels:
                    all_rows(panel)
                return
            with T.If(places == 1):
                with T.Then():
                    tile(start, 1, panels)
                with T.Else(), T.serial(T.int64(0), T.int64(group)) as g:
                    all_rows(opaque(number * group + g))

        for_pieces(self.slots, product.panels.count // group, spec.count, unit)

    def _column(self, product: Product, panel: Expr, vector: int) -> Expr:
        return panel * product.panels.width + vector * product.panels.lanes

    def _step(self, product: Product) -> int:
        return _STACK_FLOATS // product.panels.width

    def _scratch(self, rows: int, product: Product) -> list[Expr]:
        """Stack buffers for a tile, each of a few whole rows."""
        step, width = self._step(product), product.panels.width
        return [small(min(step, rows - first) * width) for first in range(0, rows, step)]

    def _keep(self, scratch: list[Expr], product: Product, row: int, vector: int, value: Expr) -> None:
        step, panels = self._step(product), product.panels
        store(scratch[row // step], value, row % step * panels.width + vector * panels.lanes)

    def _activate(self, scratch: list[Expr], panel: Expr, first: Expr, rows: int) -> None:
        """middle = act(middle), of gated ones times what is in scratch; for one panel of a tile."""
        spec, panels = self.spec, self.spec.first.panels
        if not spec.gated and spec.act == "none":
            return
        step = self._step(spec.first)
        for index, row in enumerate(range(0, rows, step)):
            with T.serial(T.int64(0), T.int64(min(step, rows - row))) as r, T.serial(T.int64(0), T.int64(panels.vectors)) as v:
                at = T.Bind((first + row + r) * self.pitch + panel * panels.width + v * panels.lanes)
                value = T.Bind(self.middle[span(at, panels.lanes)])
                if spec.gated:
                    value = self._gate(value, T.Bind(scratch[index][span(r * panels.width + v * panels.lanes, panels.lanes)]))
                else:
                    value = activation(spec.act).emit(value)
                store(self.middle, value, at)

    def _gate(self, gate: Expr, up: Expr) -> Expr:
        spec, lanes = self.spec, self.spec.first.panels.lanes
        if spec.act != CLAMPED:
            return mul(T.Bind(activation(spec.act).emit(gate)), up)
        alpha, limit = (f32(v, lanes) for v in spec.numbers)
        low = f32(-spec.numbers[1], lanes)
        gate = T.Bind(at_most(gate, limit))
        up = T.Bind(at_most(T.Bind(at_least(up, low)), limit))
        sloped = T.Bind(mul(gate, T.Bind(sigmoid(T.Bind(mul(gate, alpha))))))
        return mul(T.Bind(rounded(up + f32(1.0, lanes))), sloped)

    def _quantize(self, used: Expr) -> None:
        spec, middle = self.spec, self.middle

        def source(place: Place) -> Source:
            start = T.Bind(place.row * self.pitch)
            smooth = None
            if self.slots.expert is not None:
                smooth = fixed(T.cast(self.slots.expert[place.row], "int64") * spec.inner)

            def values(off: Expr, valid: int, lanes: int) -> Expr:
                value = load(middle, start + off, valid, lanes)
                if smooth is not None:
                    value = mul(T.Bind(value), load(self.flat["inv_smooth"], smooth + off, valid, lanes))
                return only(value, valid)

            return values

        flat = {"codes": self.codes, "scale": self.scale}
        quantizer = RowQuantizer(
            spec.isa, Quantizer(False, spec.rotation), spec.inner, flat, source, "light" if spec.smooth else "read"
        )
        for_rows(used, spec.inner, quantizer.scratch, True, quantizer.phases())

    def _second(self, used: Expr, start: Expr, count: Expr) -> None:
        """y of all rows, panel by panel."""
        spec, product = self.spec, self.spec.second
        codes = product.prepare(self.codes, used, self.places, product.width if spec.int8 else self.pitch)
        active, length, runs = self.slots.number(0), self.slots.number(2), self.slots.number(3)
        panels = product.panels

        def add(scratch: list[Expr], panel: Expr, first: Expr, rows: int) -> None:
            step = self._step(product)
            for index, row in enumerate(range(0, rows, step)):
                with T.serial(T.int64(0), T.int64(min(step, rows - row))) as r:
                    place = opaque(first + row + r)
                    at = opaque(T.cast(self.slots.row[place], "int64") * spec.outputs + panel * panels.width)
                    weight = T.Bind(self.slots.weight[place])

                    def one(off: int, lanes: int, at: Expr = at, weight: Expr = weight, r: Expr = r, index: int = index) -> None:
                        f = scratch[index][span(r * panels.width + off, lanes)]
                        store(self.flat["y"], fma(splat(weight, lanes), f, self.flat["y"][span(at + off, lanes)]), at + off)

                    self._columns(panel, one)

        def tile(side: list[tuple[Expr, Expr, Expr]], many: int) -> None:
            """side: (expert, panel, first place) of tiles side by side."""
            scratch = [self._scratch(many, product) for _ in side]
            numbers = [product.panel(expert, panel, 0) for expert, panel, _ in side]
            for at, i, j, value in product.values(self.flat, codes, self.scale, numbers, [first for *_, first in side], many):
                self._keep(scratch[at], product, i, j, value)
            for buffers, (_, panel, first) in zip(scratch, side, strict=True):
                add(buffers, panel, first, many)

        def bucket(number: Expr) -> tuple[Expr, Expr, Expr]:
            """expert, first place and places of an active bucket."""
            found = opaque(T.cast(self.slots.active[number], "int64"))
            first, places = (opaque(T.cast(b[found], "int64")) for b in (self.slots.first, self.slots.count))
            return opaque(T.truncmod(found, T.int64(spec.count))), first, places

        def many_rows() -> None:
            with T.parallel(T.int64(0), runs * panels.count) as task:
                run = opaque(T.truncdiv(task, T.int64(panels.count)))
                panel = opaque(task - run * panels.count)
                begin = opaque(T.min(run * length, count))
                self._begin(start, begin, opaque(T.min(begin + length, count)), panel)
                with T.serial(T.int64(0), active) as a:
                    found = T.Bind(T.cast(self.slots.active[a], "int64"))
                    with T.If(T.truncdiv(found, T.int64(spec.count)) == run), T.Then():
                        expert, first, places = bucket(a)
                        walk_rows(
                            first,
                            opaque(first + places),
                            panels.rows,
                            lambda row, many: tile([(expert, panel, row)], many),
                            lambda *_: None,
                        )

        def one_row() -> None:
            together = max(n for n in (1, 2, 4) if n <= min(spec.top_k, product.streams))
            group = math.gcd(panels.count, product.streams // together)
            with T.parallel(T.int64(0), T.int64(panels.count // group)) as task:
                mine = [opaque(task + g * (panels.count // group)) for g in range(group)]
                for panel in mine:
                    self._begin(start, T.int64(0), T.int64(1), panel)
                turns = T.Bind(T.truncdiv(active, T.int64(together)))
                with T.serial(T.int64(0), turns) as turn:
                    found = [bucket(turn * together + t) for t in range(together)]
                    tile([(expert, panel, first) for expert, first, _ in found for panel in mine], 1)
                if together > 1:
                    with T.serial(turns * together, active) as a:
                        expert, first, _ = bucket(a)
                        tile([(expert, panel, first) for panel in mine], 1)

        if product.streams == 1:
            many_rows()
            return
        with T.If(count == 1):
            with T.Then():
                one_row()
            with T.Else():
                many_rows()

    def _columns(self, panel: Expr, body: Any) -> None:
        """body(offset, lanes) for the columns of a panel: whole vectors, and one by one in a ragged last panel."""
        panels = self.spec.second.panels

        def full() -> None:
            for j in range(panels.vectors):
                body(j * panels.lanes, panels.lanes)

        if not (ragged := panels.n % panels.width):
            full()
            return
        with T.If(panel == panels.count - 1):
            with T.Then(), T.serial(T.int64(0), T.int64(ragged)) as c:
                body(c, 1)
            with T.Else():
                full()

    def _begin(self, start: Expr, begin: Expr, end: Expr, panel: Expr) -> None:
        """y of rows `begin` to `end` of the block, one panel: the residual or 0, NaN of lost rows."""
        spec, y = self.spec, self.flat["y"]
        with T.serial(begin, end) as row:
            at = opaque((start + row) * spec.outputs + panel * spec.second.panels.width)
            is_lost = T.Bind(self.slots.lost[row] != 0)

            def one(off: Any, lanes: int, at: Expr = at, is_lost: Expr = is_lost) -> None:
                given = self.flat["residual"][span(at + off, lanes)] if spec.residual else f32(0.0, lanes)
                store(y, T.Select(is_lost, f32(float("nan"), lanes), given), at + off)

            self._columns(panel, one)
