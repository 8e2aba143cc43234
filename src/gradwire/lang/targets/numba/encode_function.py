"""Shared by the sweeps of an encoder: reading the gradient, feeding sinks, locating the fields of the payload."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.lang.ir import BOOL, Field, Node, Program
from gradwire.lang.operators.base import Emission, Sink, lookup
from gradwire.lang.targets.numba.expressions import NumbaFunction, num_bytes, scalar_bytes


class NumbaEncodeFunction(NumbaFunction):
    """State of one `encode` being emitted.

    Attributes:
        stored: Whether `residual_out` already holds the compensated gradient.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.stored = False

    def gradient(self) -> Node:
        return next(node for node in self.program.encode_nodes() if node.op == "gradient")

    def read(self) -> None:
        """Set x to the gradient's vector at i."""
        if self.stored:
            self.lines.add(
                "if residual_out is None:",
                "    x = load_f32(grad, i, LANES) * scale",
                "else:",
                "    x = load(residual_out, i, LANES)",
            )  # fmt: skip
        else:
            self.lines.add("x = load_f32(grad, i, LANES) * scale", "if residual_in is not None:")
            self.lines.add("    x = x + load(residual_in, i, LANES)")

    def offset(self, each: Field) -> None:
        """Set `NAME_at` to the beginning of an array in the payload, and `NAME_bytes` to its length."""
        others = self.program.fields[: self.program.fields.index(each)]
        sizes = [*scalar_bytes(self.program), *(f"{f.variable}_bytes" for f in others if f.is_array)]
        self.lines.add(f"{each.variable}_at = {' + '.join(sizes) or '0'}")
        self.lines.add(f"{each.variable}_bytes = {num_bytes(each, self.count(each))}")

    def count(self, each: Field) -> str:
        """Number of values of a field."""
        space = each.node.space
        if space.kind == "items":
            assert space.source is not None
            return f"{self.names[id(space.source)]}_count"
        return f"(n + {space.block - 1}) // {space.block}" if space.kind == "blocks" else "n"

    def sinks(self, nodes: Sequence[Node]) -> list[tuple[Node, Emission]]:
        """The source of each sink."""
        found = []
        for node in nodes:
            operator, name = lookup(node.op), self.names[id(node)]
            assert isinstance(operator, Sink)
            found.append((node, operator.cpu(node, name, f"{name}_in", f"{name}_chosen")))
        return found

    def feed(self, node: Node, emission: Emission) -> None:
        """Let a sink consume the current vector, with the lanes `inside`."""
        lines, name = self.lines, self.names[id(node)]
        lines.say(node.where)
        value = self.vector(node.inputs[0])
        if node.inputs[0].dtype == BOOL:
            mask = value.source
        else:
            lines.add(f"{name}_in = {value.vector}")
            mask = self.vector(node.inputs[1]).source if len(node.inputs) > 1 else ""
        lines.add(f"{name}_chosen = {mask} & inside" if mask else f"{name}_chosen = inside")
        lines.add(*emission.inside)

    def load_items(self, source: Node) -> None:
        """Load the items that a sweep over a list uses."""
        name = self.names[id(source)]
        for node in self.program.encode_nodes():
            if node.op == "value" and node.inputs[0] is source:
                self.lines.add(f"v = load({name}_value, i, LANES)")
                self.known[id(node)] = "v"
