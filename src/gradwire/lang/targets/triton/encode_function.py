"""Shared by the sweeps of an encoder: reading the gradient, locating the fields of the payload."""

from __future__ import annotations

from gradwire.lang.ir import Field, Node, Program
from gradwire.lang.operators.arithmetic import Text
from gradwire.lang.targets.triton.expressions import Kernel, TritonFunction, num_bytes, storage


class TritonEncodeFunction(TritonFunction):
    """State of one `encode` being emitted.

    Attributes:
        stored: Whether `residual_out` already holds the compensated gradient.
        is_list: Whether the payload holds lists.
    """

    def __init__(self, program: Program, prefix: str = "encode") -> None:
        super().__init__(program, prefix)
        self.stored = False
        self.is_list = program.items is not None

    def read(self, kernel: Kernel) -> None:
        """Set x to the gradient's elements at i."""
        function, third = ("compensated_again", "residual_out") if self.stored else ("compensated", "residual_in")
        kernel.take("grad", "scale", third)
        kernel.lines.add(f"x = {function}(grad, scale, {third}, i, inside)")
        gradient = next((node for node in self.program.encode_nodes() if node.op == "gradient"), None)
        if gradient is not None:
            kernel.known[id(gradient)] = Text("x", True)

    def field_count(self, each: Field) -> str:
        """Number of values of a field."""
        space = each.node.space
        if space.kind == "items":
            return self.count(each.node)
        return f"ceil_div(n, {space.block})" if space.kind == "blocks" else "n"

    def place(self, each: Field) -> None:
        """Set `NAME_out` to the memory of a packed array."""
        name = each.variable
        if self.is_list:
            memory = f"empty({num_bytes(each, self.field_count(each))}, torch.uint8, grad)"
        else:
            memory = f"body[{name}_at : {name}_at + {name}_bytes]"
        kind = storage(each.dtype)
        self.lines.add(f"{name}_out = {memory}" + (f".view(torch.{kind})" if kind != "uint8" else ""))


def load_items(kernel: Kernel, node: Node) -> None:
    """Load the items that a sweep over a list uses."""
    f, source = kernel.f, node.space.source
    assert source is not None
    kernel.is_group = False
    leaf = source
    if source.op not in ("sample", "sort"):
        leaf = next((n for n in f.program.encode_nodes() if n.op == "value" and n.inputs[0] is source), source)
    name = f"{f.names[id(source)]}" if leaf is source else f"{f.names[id(source)]}_value"
    kernel.give(f"{name}_in", name)
    kernel.lines.add(f"v = tl.load({name}_in + i, mask=inside, other=0.0)")
    kernel.known[id(leaf)] = Text("v", True)
