"""Kernels under construction and the torch code around them, for encoders and decoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradwire.lang.bounds import is_finite, overflow_condition
from gradwire.lang.emit import INDENT, GeneratedFunction, Lines, shared_subexpressions
from gradwire.lang.ir import BOOL, Field, Node, Program
from gradwire.lang.operators.arithmetic import Arithmetic, Text
from gradwire.lang.operators.base import Statement, lookup
from gradwire.lang.types import ElementType

STORAGE = {"int8": "int8", "int32": "int32", "uint32": "int32", "float32": "float32", "float16": "float16"}
_WIDTH = 116
# Characters. In an expression of at least `_LONG`, parts longer than `_SHORT` get variables.
_LONG, _SHORT = 56, 24


class TritonFunction(GeneratedFunction):
    """A generated host function with its kernels: names of values, scalars in torch."""

    def __init__(self, program: Program, prefix: str) -> None:
        super().__init__(program)
        self.prefix = prefix
        self.kernels: list[Kernel] = []
        self.stored_blocks: set[int] = set()  # nodes whose block values are in memory

    def kernel(self, title: str, at: str = "i", count: str = "n") -> Kernel:
        """A new kernel. Each program handles the 1,024 elements or items from `start` on.

        Args:
            title: Docstring of the kernel.
            at: Variable of the positions.
            count: Host expression of the number of elements or items.
        """
        made = Kernel(self, f"{self.prefix}_{len(self.kernels)}", title, at)
        self.kernels.append(made)
        made.give("n", count)
        made.lines.add("chunk = tl.program_id(0)", "start = chunk.to(tl.int64) * 1024")
        made.lines.add(f"{at} = start + tl.arange(0, 1024)", f"inside = {at} < n")
        return made

    def source(self, host: str) -> str:
        """The kernels, then the host function."""
        return "\n\n\n".join([*(kernel.source() for kernel in self.kernels), host])

    # -- scalars in torch ------------------------------------------------------------------------------------

    def scalar(self, node: Node) -> str:
        """A scalar as float64: a tensor, or a Python number if it is static."""
        node = self.resolved(node)
        if node.op == "constant":
            return repr(float(node.attrs["value"]))
        return self.static[id(node)] if node.space.kind == "static" else self.names[id(node)]

    def assign(self, node: Node) -> None:
        """Compute a scalar or a list between sweeps."""
        name, operator = self.names[id(node)], lookup(node.op)
        self.lines.say(node.where)
        if node.op == "length":
            self.lines.add(f"{name} = as_scalar(float({self.count(node.inputs[0])}), grad)")
        elif isinstance(operator, Statement):
            self.lines.add(*operator.triton(node, name, [self.argument(each) for each in node.inputs]))
        else:
            assert isinstance(operator, Arithmetic), f"{node!r} has no place between sweeps"
            self.lines.add(f"{name} = {operator.torch(*(self._operand(each, node) for each in node.inputs))}")

    def _operand(self, node: Node, user: Node) -> str:
        is_number = node.space.kind == "static" and user.op == "narrow"
        return f"as_scalar({self.scalar(node)}, grad)" if is_number else self.scalar(node)

    def argument(self, node: Node) -> str:
        """The source of an input of a statement."""
        return self.list_name(node) if node.space.kind == "items" else self.scalar(node)

    def count(self, node: Node) -> str:
        """The variable with the length of a list."""
        assert node.space.source is not None
        return f"{self.names[id(node.space.source)]}_count"

    def decode_scalars(self) -> None:
        """Compute the scalars of the decoder."""
        for node in self.program.decode_nodes():
            if node.space.kind == "scalar" and node.op != "extract":
                self.assign(node)


class Kernel:
    """A kernel under construction: parameters, and lines."""

    def __init__(self, function: TritonFunction, name: str, title: str, at: str) -> None:
        self.f, self.name, self.title, self.at = function, name, title, at
        self.parameters: dict[str, str] = {}  # arguments that the host passes, by name
        self.constants: set[str] = set()
        self.lines = Lines(1)
        self.known: dict[int, Text] = {}  # variables of nodes
        self.of_rank = ""  # offset of a scalar among those of all ranks
        self.is_group = True  # whether a program's 1,024 elements are consecutive

    def take(self, *names: str) -> None:
        """Add parameters for host variables of the same names."""
        for name in names:
            self.give(name, name)

    def give(self, name: str, argument: str, is_constant: bool = False) -> str:
        """Add a parameter with the argument that the host passes."""
        self.parameters.setdefault(name, argument)
        if is_constant:
            self.constants.add(name)
        return name

    # -- expressions -----------------------------------------------------------------------------------------

    def vector(self, node: Node) -> Text:
        """The expression of a node for the current elements."""
        node = self.f.resolved(node)
        if id(node) in self.known:
            return self.known[id(node)]
        if node.op == "constant":
            return Text(literal(node.attrs["value"]), False)
        if node.space.kind == "static":
            return Text(self.give(self.f.names[id(node)], self.f.static[id(node)]), False)
        if node.space.kind == "scalar":
            return self._load_scalar(node)
        if node.op == "random":
            return self._draw(node)
        if node.op == "cast":
            return self._cast(node)
        if node.space.kind == "blocks" and id(node) in self.f.stored_blocks:
            return self._load_block(node)
        operator = lookup(node.op)
        assert isinstance(operator, Arithmetic), f"{node!r} has no place in a sweep"
        args = [self.vector(each) for each in node.inputs]
        if sum(len(arg.source) for arg in args) > _LONG:
            args = [self._unless_short(each, arg) for each, arg in zip(node.inputs, args)]
        text = operator.triton(*(arg.source for arg in args))
        if node.space.kind == "blocks":  # block values are rounded to what a payload can hold
            text = f"finite({text})"
        return Text(text, any(arg.is_vector for arg in args))

    def lanes(self, node: Node) -> str:
        """The expression of a node, broadcast to all lanes if it is a scalar."""
        text = self.vector(node)
        return text.source if text.is_vector else f"spread({text.source}, {self.at})"

    def variable(self, node: Node, name: str) -> str:
        """A variable that holds the vector of a node."""
        node = self.f.resolved(node)
        if id(node) not in self.known:
            self.lines.add(f"{name} = {self.lanes(node)}")
            self.known[id(node)] = Text(name, True)
        return self.known[id(node)].source

    def shared(self, roots: Iterable[Node]) -> None:
        """Set variables for the nodes that the roots use more than once."""
        for node in shared_subexpressions([self.f.resolved(root) for root in roots]):
            if id(node) in self.known or node.op == "extract":
                continue
            text = self.vector(node)
            if text.is_vector:
                self.lines.say(node.where)
                self.lines.add(f"{self.f.names[id(node)]} = {text.source}")
                self.known[id(node)] = Text(self.f.names[id(node)], True)

    def decoded(self, node: Node) -> str:
        """A decoded element, clamped to finite floats if it could overflow."""
        text = self.lanes(node)
        return text if overflow_condition(node, lambda _: None) is None else f"finite({text})"

    def _load_scalar(self, node: Node) -> Text:
        name = self.f.names[id(node)]
        place = f"{self.give(f'{name}_in', name if node.dtype != BOOL else f'{name}.to(torch.int8)')}{self.of_rank}"
        number = f"tl.load({place}) != 0" if node.dtype == BOOL else f"tl.load({place}).to(tl.float32)"
        return self._loaded(node, number, is_vector=False)

    def _load_block(self, node: Node) -> Text:
        name = self.f.names[id(node)]
        self.give(f"{name}_in", name)
        place = self.at if self.at == "b" else f"{self.at} // {node.space.block}"
        return self._loaded(node, f"tl.load({name}_in + {place}, mask=inside, other=0.0)")

    def _draw(self, node: Node) -> Text:
        name, shared, stream = self.f.names[id(node)], node.attrs["shared"], node.attrs["stream"]
        self.give(f"{name}_low", f"*key_words(keys, {shared}, {stream})")
        self.give(f"{name}_high", "")
        self.take("first")
        group = self.give("is_group", "first % 1024 == 0", True) if self.is_group else "False"
        return self._loaded(node, f"uniform(first + i, {name}_low, {name}_high, {group})")

    def _loaded(self, node: Node, value: str, is_vector: bool = True) -> Text:
        name = self.f.names[id(node)]
        self.lines.add(f"{name} = {value}")
        self.known[id(node)] = Text(name, is_vector)
        return self.known[id(node)]

    def _unless_short(self, node: Node, text: Text) -> Text:
        """A variable for a long expression."""
        return text if len(text.source) <= _SHORT else self._loaded(self.f.resolved(node), text.source, text.is_vector)

    def _cast(self, node: Node) -> Text:
        dtype, value = node.attrs["dtype"], self.vector(node.inputs[0])
        if node.inputs[0].dtype == BOOL:
            return Text(f"number({value.source})", value.is_vector)
        if dtype.is_integer:
            return Text(f"clamp({value.source}, {float(dtype.low)!r}, {float(dtype.high)!r})", value.is_vector)
        if dtype.name == "float32":
            return value if is_finite(node.inputs[0]) else Text(f"finite({value.source})", value.is_vector)
        return Text(f"rounded_{dtype.name}(bounded({value.source}, {dtype.largest!r}))", value.is_vector)

    # -- source ----------------------------------------------------------------------------------------------

    def source(self) -> str:
        """The source of the kernel."""
        names = [f"{name}: tl.constexpr" if name in self.constants else name for name in self.parameters]
        head = wrapped(f"def {self.name}(", names, "):", 0)
        return "\n".join(["@triton.jit", *head, f'{INDENT}"""{self.title}"""', str(self.lines)])

    def launch(self, grid: str) -> None:
        """Launch the kernel from the host function."""
        arguments = [argument for argument in self.parameters.values() if argument]
        lines = self.f.lines
        lines.add(*wrapped("launch(", [self.name, f"({grid},)", *arguments], ")", len(INDENT) * lines.indent))


def tidied(source: str) -> str:
    """Remove parentheses around whole arguments and whole right-hand sides."""
    return "\n".join(line if line.lstrip().startswith("#") else _tidied(line) for line in source.split("\n"))


def _tidied(line: str) -> str:
    at = line.find("(")
    while at >= 0:
        closing = _closing(line, at)
        before, after = line[:at], line[closing + 1 : closing + 2]
        alone = (before.endswith((" = ", "return ")) and not after) or (
            before.endswith(("(", ", ")) and after in (",", ")")
        )
        if alone and closing > 0 and not _has_comma(line[at + 1 : closing]):
            line = before + line[at + 1 : closing] + line[closing + 1 :]
        else:
            at += 1
        at = line.find("(", at)
    return line


def _closing(text: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at `opening`, or -1."""
    depth = 0
    for k in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[k], 0)
        if depth == 0:
            return k
    return -1


def _has_comma(text: str) -> bool:
    """Whether the text has a comma outside of parentheses."""
    depths = [text[:k].count("(") - text[:k].count(")") for k in range(len(text)) if text[k] == ","]
    return 0 in depths


def literal(value: float) -> str:
    """A float32 literal."""
    rounded = float(np.float32(value))
    if rounded and abs(rounded) < 2.0**-126:  # Triton would make it a float64
        return f"tl.full([], {rounded!r}, tl.float32)"
    return f"({rounded!r})" if rounded < 0 else repr(rounded)


def wrapped(before: str, items: Sequence[str], after: str, indent: int) -> list[str]:
    """A call or a signature, on several lines if it is too long."""
    line = before + ", ".join(items) + after
    if indent + len(line) <= _WIDTH:
        return [line]
    lines, current = [before], INDENT
    for each in items:
        if indent + len(current) + len(each) + 2 > _WIDTH:
            lines.append(current.rstrip())
            current = INDENT
        current += f"{each}, "
    return [*lines, current.rstrip(), after]


def num_bytes(each: Field, count: str) -> str:
    """Bytes of an array."""
    if each.is_positions:
        return f"positions_bytes(n, {count})"
    if each.dtype.bits >= 8:
        size = each.dtype.storage.itemsize
        return count if size == 1 else f"{size} * {count}"
    return f"ceil_div({count}, {each.dtype.per_byte})"


def storage(dtype: ElementType) -> str:
    """Name of the torch dtype in which a type is stored."""
    return "int16" if dtype.name == "bfloat16" else STORAGE.get(dtype.name, "uint8")


def has_tail(dtype: ElementType) -> bool:
    """Whether a partial chunk is packed separately."""
    return dtype.packing in ("planes", "digits") and dtype.per_byte > 1
