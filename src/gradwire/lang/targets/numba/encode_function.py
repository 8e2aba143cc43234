"""What the sweeps of an encoder share: how it reads the gradient, and where the fields of its payload begin."""

from __future__ import annotations

from gradwire.lang.ir import Field, Node, Program
from gradwire.lang.targets.numba.expressions import NumbaFunction, num_bytes, scalar_bytes


class NumbaEncodeFunction(NumbaFunction):
    """The state of one emitted `encode`, before its steps.

    Attributes:
        stored: Whether `residual_out` holds the compensated gradient already.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.stored = False

    def gradient(self) -> Node:
        return next(node for node in self.program.encode_nodes() if node.op == "gradient")

    def read(self) -> None:
        """The vector x of the gradient at i."""
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
        """Set the variable `NAME_at` to where an array of the payload begins."""
        others = self.program.fields[: self.program.fields.index(each)]
        sizes = [*scalar_bytes(self.program), *(f"{f.variable}_bytes" for f in others if f.is_array)]
        self.lines.add(f"{each.variable}_at = {' + '.join(sizes) or '0'}")
        self.lines.add(f"{each.variable}_bytes = {num_bytes(each, self.count(each))}")

    def count(self, each: Field) -> str:
        """How many values a field has."""
        space = each.node.space
        if space.kind == "items":
            assert space.source is not None
            return f"{self.names[id(space.source)]}_count"
        return f"(n + {space.block - 1}) // {space.block}" if space.kind == "blocks" else "n"

    def load_items(self, source: Node) -> None:
        """Load what a sweep over a list computes with."""
        name = self.names[id(source)]
        for node in self.program.encode_nodes():
            if node.op == "value" and node.inputs[0] is source:
                self.lines.add(f"v = load({name}_value, i, LANES)")
                self.known[id(node)] = "v"
