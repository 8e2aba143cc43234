"""The encoder as Numba source: sweeps and the scalar steps between them, in scheduled order."""

from __future__ import annotations

from gradwire.lang.interpret import is_stat
from gradwire.lang.ir import ELEMENTS, Node, closure
from gradwire.lang.operators.base import coding_of
from gradwire.lang.passes import Assign, SubtractItems, Sweep, schedule
from gradwire.lang.targets.numba.encode_function import NumbaEncodeFunction
from gradwire.lang.targets.numba.sweep import NumbaElementSweep, NumbaItemSweep


class NumbaEncoder(NumbaEncodeFunction):
    """Emits `encode`."""

    def source(self) -> str:
        program, lines = self.program, self.lines
        lines.add(
            "@kernel", "def encode(grad, scale, residual_in, residual_out, body, stats, keys, first, static, lists):"
        )
        lines.indent = 1
        lines.add("n = grad.size")
        if (
            any(node.op in ("filter", "hash") for node in program.encode_nodes())
            or program.fields[-1].coding is not None
        ):
            lines.add("room = address(lists)")
        for step in schedule(program):
            lines.forget()
            if isinstance(step, Assign):
                self._assign(step.node)
            elif isinstance(step, SubtractItems):
                self._subtract()
            elif step.space == ELEMENTS:
                NumbaElementSweep(self, step).emit()
            else:
                NumbaItemSweep(self, step).emit()
        self._scalars()
        lines.add("return at")
        return str(lines)

    def _assign(self, node: Node) -> None:
        name = self.names[id(node)]
        if node.op == "over_ranks":
            self.lines.say(node.where)
            position = [id(each) for each in self.program.stats].index(id(node))
            own = self.scalar64(node.inputs[0])
            self.lines.add("if stats is None:", f"    {name} = np.float64(narrow({own}))", "else:")
            self.lines.add(f"    {name} = np.float64(stats[{position}])")
            self.lines.add(f"    if not np.isfinite({name}):", "        return -1")
        elif node.op == "sample":
            self._sample(node, name)
        else:
            self.assign(node)

    def _sample(self, node: Node, name: str) -> None:
        lines, count = self.lines, self.scalar64(node.inputs[1])
        lines.say(node.where)
        lines.add(f"{name}_count = min(n, max(np.int64({count}), 1))")
        lines.add(f"{name} = np.empty({name}_count, np.float32)")
        lines.add(f"{name}_places = sample_positions(keys, {name}_count, n)")
        with lines.block(f"for j in range({name}_count):"):
            lines.add(f"i = {name}_places[j]", "start = i")
            self._read_one()
            self.known[id(self.gradient())] = "x"
            lines.add(f"{name}[j] = first_lane({self.vector(node.inputs[0]).vector})")
        self.known = {}

    def _read_one(self) -> None:
        """The gradient's element at i in every lane of x; loading a vector would read memory that is not used."""
        lines = self.lines
        if self.stored:
            lines.add("if residual_out is None:", "    one = first_lane(load_f32(grad, i, 1)) * scale")
            lines.add("else:", "    one = first_lane(load(residual_out, i, 1))")
        else:
            lines.add("one = first_lane(load_f32(grad, i, 1)) * scale", "if residual_in is not None:")
            lines.add("    one = one + first_lane(load(residual_in, i, 1))")
        lines.add("x = splat(one, LANES)")

    def _scalars(self) -> None:
        """Write the scalars, and set `at` to the end of the payload."""
        lines, at, stats_seen = self.lines, 0, False
        lines.add("")
        self._shorten()
        lines.add("at = 0")
        for each in self.program.fields:
            if each.is_array:
                continue
            guard = is_stat(self.program, each)
            stats_seen |= guard
            if guard:
                lines.add("if stats is None:")
                lines.indent += 1
            lines.add(f"write_scalar(body, at, {self.names[id(each.node)]})", "at += 4")
            lines.indent -= guard
            at += 4
        if self.program.items is not None:
            source = self.program.items.source
            lines.add(f"write_length(body, at, {self.names[id(source)]}_count)", "at += 4")
        lines.add(*(f"at += {each.variable}_bytes" for each in self.program.fields if each.is_array))

    def _shorten(self) -> None:
        """Shorten the last field, if it has a coding, into the body."""
        last = self.program.fields[-1]
        if last.coding is not None:
            self.lines.say(last.coding.where)
            name = last.variable
            length = coding_of(last).cpu_shorten(f"{name}_out", f"body[{name}_at : {name}_at + {name}_bytes]")
            self.lines.add(f"{name}_bytes = {length}")

    def _subtract(self) -> None:
        """Subtract the decoded values of a list from the gradient."""
        output, lines = self.program.output, self.lines
        with self.as_receiver():
            values, index = (self.resolved(each) for each in output.inputs)
            self.decode_scalars()
            with lines.block("if residual_out is not None:"):
                lines.say(output.where)
                assert index.space.source is not None
                source = self.names[id(index.space.source)]
                lines.add(f"sent = np.empty({source}_count + LANES, np.float32)")
                overflows = self.overflows(values)
                with lines.block(f"for i in range(0, {source}_count, LANES):"):
                    self.load_items(index.space.source)
                    self.add_decoded(values, overflows)
                    lines.add("store(sent, i, decoded)")
                lines.add(f"add_at({source}_index[:{source}_count], sent, np.float32(-1), residual_out)")
        self.known = {}


class Measurer(NumbaEncoder):
    """Emits `measure`, the encoder up to the values of the preliminary round."""

    def source(self) -> str:
        lines = self.lines
        lines.add("@kernel", "def measure(grad, scale, residual_in, residual_out, keys, first, static, lists, out):")
        lines.indent = 1
        lines.add("n = grad.size")
        if any(node.op in ("filter", "hash") for node in self.program.encode_nodes()):
            lines.add("room = address(lists)")
        needed = {id(node) for node in closure([node.inputs[0] for node in self.program.stats])}
        for step in schedule(self.program):
            if isinstance(step, Assign) and id(step.node) in needed:
                self._assign(step.node)
            elif isinstance(step, Sweep) and (step.compensates or any(id(node) in needed for node in step.sinks)):
                sinks = [node for node in step.sinks if id(node) in needed]
                only = Sweep(step.space, sinks, compensates=step.compensates)
                kind = NumbaElementSweep if step.space == ELEMENTS else NumbaItemSweep
                kind(self, only, failure="return False").emit()
        for position, node in enumerate(self.program.stats):
            lines.add(f"out[{position}] = narrow({self.scalar64(node.inputs[0])})")
        lines.add("return True")
        return str(lines)
