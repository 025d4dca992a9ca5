"""Standard ONNX nodes in the place of one of the khtst domain: what the translations of all operators share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from khtst_compile.errors import LoweringError

DOMAIN = "khtst"


class Emitter:
    """Adds nodes before the one that is being replaced, or to the body of a loop."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self.prefix = ""
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._at: ir.Node | None = None
        self._body: list[ir.Node] | None = None
        self._named = 0

    def begin(self, node: ir.Node) -> None:
        """From here on nodes stand in for `node`, and names begin with that of its first output."""
        self._at, self.prefix = node, str(node.outputs[0].name)

    def replace(self, old: ir.Value, new: ir.Value, but: Callable[[ir.Node, int], bool] = lambda node, at: False) -> None:
        """Everybody reads `new`, under the name of `old`, except where `but(node, input)`."""
        new.name, old.name = old.name, f"{old.name}.opaque"
        new.shape, new.type = old.shape, old.type
        for node, at in list(old.uses()):
            if not but(node, at):
                node.replace_input_with(at, new)
        for at, output in enumerate(self.graph.outputs):
            if output is old:
                self.graph.outputs[at] = new

    def float32(self, value: float) -> ir.Value:
        """A float32 scalar."""
        return self.constant("float", np.array(value, np.float32))

    def ints(self, *values: int) -> ir.Value:
        """An int64 vector."""
        return self.constant("ints", np.array(values, np.int64))

    def constant(self, hint: str, array: Any) -> ir.Value:
        """An initializer holding `array`, shared by all who ask for the same one."""
        array = np.asarray(array)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.Tensor(array)
            value = ir.Value(
                name=f"{DOMAIN}.const.{hint}.{len(self._constants)}",
                const_value=tensor,
                type=ir.TensorType(tensor.dtype),
                shape=tensor.shape,
            )
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def op(self, op_type: str, *inputs: ir.Value, name: str = "", **attributes: Any) -> ir.Value:
        """One node of one result. name: what the result is called, after the prefix."""
        return self.ops(op_type, inputs, 1, attributes, name)[0]

    def ops(
        self, op_type: str, inputs: Sequence[ir.Value], outputs: int, attributes: dict[str, Any], name: str = ""
    ) -> Sequence[ir.Value]:
        """One node; its results."""
        assert self._at is not None
        node = ir.node(op_type, list(inputs), attributes, num_outputs=outputs)
        if self._body is None:
            self.graph.insert_before(self._at, node)
        else:
            self._body.append(node)
            for value in node.outputs:  # a body sees its surroundings, and may not use their names again
                value.name = self.inner_name()
        if name:
            node.outputs[0].name = f"{self.prefix}.{name}"
        return node.outputs

    @contextmanager
    def body(self) -> Iterator[list[ir.Node]]:
        """Nodes go into the list that is handed out, which becomes the body of a loop."""
        made: list[ir.Node] = []
        self._body = made
        try:
            yield made
        finally:
            self._body = None

    def inner_name(self) -> str:
        """A name that no other value has."""
        self._named += 1
        return f"{self.prefix}.body{self._named}"


def attribute(node: ir.Node, name: str) -> int:
    """An integer attribute."""
    return int(node.attributes[name].as_int())


def stored(value: ir.Value, what: str) -> np.ndarray[Any, Any]:
    """The array an initializer holds. Raises LoweringError where the value is computed."""
    if value.const_value is None:
        raise LoweringError(f"{what} {value.name!r} is computed by the graph; needed: a stored tensor; quantize the model again")
    return np.asarray(value.const_value.numpy())
