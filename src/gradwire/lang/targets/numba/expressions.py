"""Expressions and scalar steps of generated Numba code, for encoders and decoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradwire.lang.bounds import is_finite, overflow_condition
from gradwire.lang.emit import GeneratedFunction, shared_subexpressions
from gradwire.lang.interpret import is_stat
from gradwire.lang.ir import BOOL, Field, Node, Program, closure
from gradwire.lang.operators.arithmetic import Arithmetic, Text
from gradwire.lang.operators.base import Statement, lookup
from gradwire.lang.types import ElementType, uint1

STORAGE = {"int8": "i8", "int32": "i32", "uint32": "u32", "float32": "f32", "float16": "i16", "bfloat16": "u16"}


class NumbaFunction(GeneratedFunction):
    """A generated function: its expressions and scalar steps."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.known: dict[int, str] = {}  # variables of nodes in this step
        self.masks: set[int] = set()  # fields of uint1 that also have a mask

    # -- expressions -----------------------------------------------------------------------------------------

    def vector(self, node: Node) -> Text:
        """The expression of a node in a sweep."""
        if id(node) not in self.known:
            node = self.resolved(node)
        if id(node) in self.known:
            return Text(self.known[id(node)], True)
        if node.space.kind in ("static", "scalar", "blocks"):
            return Text(self.scalar32(node), False)
        if node.op == "random":
            return Text(f"uniform({self.names[id(node)]}, i - start)", True)
        if node.op == "cast":
            return Text(self._cast(self.vector(node.inputs[0]), node), True)
        if node.op == "eq" and (mask := self._bit(node)) is not None:
            return Text(mask, True)
        operator = lookup(node.op)
        assert isinstance(operator, Arithmetic), f"{node!r} has no place in a sweep"
        args = [self.vector(each) for each in node.inputs]
        if not any(arg.is_vector for arg in args):
            args[0] = Text(args[0].vector, True)
        return Text(operator.vector(*args), True)

    def _bit(self, node: Node) -> str | None:
        """An existing mask for a comparison of a uint1 with 1, or None."""
        bit, one = self.resolved(node.inputs[0]), node.inputs[1]
        if one.op != "constant" or one.attrs["value"] != 1 or bit.dtype != uint1:
            return None
        if id(bit) in self.masks:
            return f"{self.known[id(bit)]}_mask"
        return self.vector(bit.inputs[0]).source if is_condition(bit) else None

    def overflows(self, output: Node) -> str | None:
        """Set a variable to the condition that a decoded element could overflow; None if none ever can."""
        condition = overflow_condition(self.resolved(output), self._largest)
        if condition in (None, "True"):
            return condition
        self.lines.add(f"may_overflow = {condition}")
        return "may_overflow"

    def _largest(self, node: Node) -> str | None:
        """The largest magnitude of a scalar, or of block values if known."""
        node = self.resolved(node)
        if node.space.kind == "static":
            return f"abs({self.static[id(node)]})"
        if node.space.kind == "blocks":
            return f"{self.names[id(node)]}_largest" if node.op == "extract" else None
        return f"abs({self.scalar64(node)})" if node.op in ("narrow", "extract") else None

    def add_decoded(self, output: Node, overflows: str | None) -> None:
        """Set `decoded` to the vector of a decoded expression, clamped to finite floats if it could overflow."""
        value = self.vector(output).vector
        self.lines.add(f"decoded = finite({value})" if overflows == "True" else f"decoded = {value}")
        if overflows not in (None, "True"):
            self.lines.add(f"if {overflows}:", "    decoded = finite(decoded)")

    def _cast(self, value: Text, node: Node) -> str:
        dtype = node.attrs["dtype"]
        source = f"number({value.vector})" if node.inputs[0].dtype == BOOL else value.vector
        if dtype.is_integer:
            if node.inputs[0].dtype == BOOL:
                return source
            return f"convert({self._integers(source, dtype)}, f32)"
        if dtype.name == "float32":
            return source if is_finite(node.inputs[0]) else f"finite({source})"
        return f"rounded_{dtype.name}(bounded({source}, np.float32({dtype.largest!r})))"

    def _integers(self, source: str, dtype: ElementType) -> str:
        return f"integers({source}, np.float32({dtype.low}), np.float32({dtype.high}))"

    def packed(self, node: Node, name: str) -> tuple[str, str]:
        """The variable of a packed value, which is set here if necessary, and the expression of its int32."""
        if id(node) not in self.known:
            is_clamped = node.op == "cast" and node.attrs["dtype"].is_integer and node.inputs[0].dtype != BOOL
            if is_clamped:
                source = self.vector(node.inputs[0]).vector
                self.lines.add(f"{name}_int = {self._integers(source, node.attrs['dtype'])}")
                self.lines.add(f"{name} = convert({name}_int, f32)")
            else:
                self.lines.add(f"{name} = {self.vector(node).vector}")
            self.known[id(node)] = name
            if is_clamped:
                return name, f"{name}_int"
        return self.known[id(node)], f"convert({self.known[id(node)]}, i32)"

    def scalar32(self, node: Node) -> str:
        """A scalar as float32, for arithmetic with elements."""
        node = self.resolved(node)
        if node.op == "constant":
            return f"np.float32({float(node.attrs['value'])!r})"
        if node.space.kind == "static":
            return f"np.float32({self.static[id(node)]})"
        return self.names[id(node)]

    def scalar64(self, node: Node) -> str:
        """A scalar as float64, for arithmetic with scalars."""
        node = self.resolved(node)
        if node.op == "constant":
            return repr(float(node.attrs["value"]))
        if node.space.kind == "static":
            return self.static[id(node)]
        if node.op in ("narrow", "extract"):
            return f"np.float64({self.names[id(node)]})"
        return self.names[id(node)]

    def shared(self, roots: Sequence[Node]) -> None:
        """Set variables for the nodes that the roots use more than once."""
        roots = [self.resolved(root) for root in roots]
        for node in shared_subexpressions(roots):
            if id(node) in self.known or node.op == "extract":
                continue
            self.lines.say(node.where)
            text = self.vector(node)
            if text.is_vector:
                self.lines.add(f"{self.names[id(node)]} = {text.source}")
                self.known[id(node)] = self.names[id(node)]

    def assign(self, node: Node) -> None:
        """Compute a scalar or a list between sweeps."""
        name, operator = self.names[id(node)], lookup(node.op)
        if node.op in ("extract", "scatter"):
            return
        self.lines.say(node.where)
        if node.op == "length":
            source = node.inputs[0].space.source
            assert source is not None
            self.lines.add(f"{name} = np.float64({self.names[id(source)]}_count)")
        elif isinstance(operator, Statement):
            inputs = [self._argument(each) for each in node.inputs]
            self.lines.add(*operator.cpu(node, name, inputs))
        elif isinstance(operator, Arithmetic):
            args = [self.scalar64(each) for each in node.inputs]
            self.lines.add(f"{name} = {operator.scalar(*args)}")
        else:
            raise AssertionError(f"{node!r} has no place between sweeps")

    def _argument(self, node: Node) -> str:
        if node.space.kind != "items":
            return self.scalar64(node)
        name = self.list_name(node)
        if node.op in ("value", "index"):
            self.lines.add(f"{name}_count = {self.names[id(node.inputs[0])]}_count")
        return name

    def decode_scalars(self) -> None:
        """Compute the scalars of the decoder."""
        for node in self.program.decode_nodes():
            if node.space.kind == "scalar":
                self.assign(node)

    def decode_blocks(self) -> None:
        """Compute the block values of the decoder."""
        for node in self.program.decode_nodes():
            if node.space.kind == "blocks" and node.op != "extract":
                operator = lookup(node.op)
                assert isinstance(operator, Arithmetic)
                text = operator.scalar(*(self.scalar32(each) for each in node.inputs))
                self.lines.add(f"{self.names[id(node)]} = narrow(np.float64({text}))")

    def draws(self, roots: Iterable[Node], start: str, count: str) -> None:
        """Draw the random numbers of a chunk."""
        for node in closure(list(roots)):
            if node.op == "random":
                name, shared = self.names[id(node)], node.attrs["shared"]
                self.lines.say(node.where)
                stream = f"np.int64({int(shared)}), np.int64({node.attrs['stream']})"  # of one type in all programs
                self.lines.add(f"draw(keys, {stream}, first + {start}, {count}, scratch, {name})")

    def buffers(self, roots: Iterable[Node], chunk: int) -> None:
        """Allocate the buffers of random numbers."""
        drawn = [node for node in closure(list(roots)) if node.op == "random"]
        if drawn:
            self.lines.add("scratch = np.empty(CHUNK, np.uint16)")
            self.lines.add(*(f"{self.names[id(node)]} = np.empty({chunk}, np.uint16)" for node in drawn))


def has_levels(dtype: ElementType, in_segments: bool) -> bool:
    """Whether an array is packed from a buffer with one byte per level, because vectors cannot be stored directly."""
    return dtype.packing in ("planes", "digits") or (dtype.packing == "bits" and in_segments)


def is_condition(node: Node) -> bool:
    return node.op == "cast" and node.inputs[0].dtype == BOOL


def scalar_bytes(program: Program) -> list[str]:
    """Bytes of the scalars and the length of lists, as terms. Values of a preliminary round are not sent after it."""
    scalars = [each for each in program.fields if not each.is_array]
    own = sum(is_stat(program, each) for each in scalars)
    plain = len(scalars) - own + (program.items is not None)
    terms = [str(4 * plain)] if plain else []
    return [*terms, f"(0 if stats is not None else {4 * own})"] if own else terms


def num_bytes(each: Field, count: str) -> str:
    if each.is_positions:
        return f"coded_bytes(n, {count})"
    if each.dtype.bits >= 8:
        size = each.dtype.storage.itemsize
        return count if size == 1 else f"{size} * ({count})"
    return f"packed_bytes({count}, {each.dtype.per_byte})"
