"""The decoder of the payloads of all ranks as Numba source: one sweep over the output, with sums in registers."""

from __future__ import annotations

from gradwire.lang.emit import Lines
from gradwire.lang.ir import Field
from gradwire.lang.targets.numba.decode import NumbaDecoder, unpacking

# Vectors that are summed over ranks at a time.
_UNROLLED = 2


class SumDecoder(NumbaDecoder):
    """Emits `decode_sum`."""

    def source(self) -> str:
        self.lines = lines = Lines()
        lines.add("@kernel", "def decode_sum(bodies, sizes, out, stats, keys, first, static, room):")
        lines.indent = 1
        lines.add("n = out.size")
        self._begin_lists()
        if self.program.output.op == "scatter":
            index = self.names[id(self.program.output.inputs[1])]
            lines.add("list_indices, list_values, list_counts = list_room(bodies.size)")
            with lines.block("for rank in range(bodies.size):"):
                lines.add("body = array_at(bodies[rank], sizes[rank], u8)")
                self._open("body", "sizes[rank]")
                self._decode_list()
                lines.add(f"list_indices[rank], list_values[rank] = address({index}_in), address(sent)")
                lines.add("list_counts[rank] = count")
            lines.add("scatter_lists(list_indices, list_values, list_counts, out)")
            lines.add("return True")
            return str(lines)
        self._open_all()
        self._make_all_buffers()
        with self._chunks():
            self._unpack_all()
            if any(self._has_levels(each) for each in self._arrays()) and not self._block:
                self._sum_vectors()
            else:
                self._sum_segments()
        lines.add("return True")
        return str(lines)

    def _sum_segments(self) -> None:
        """Add up one vector at a time, which ends at the end of a block."""
        lines = self.lines
        with self._vectors():
            lines.add("total = splat(np.float32(0), LANES)")
            with lines.block("for rank in range(bodies.size):"):
                self._pick_rank()
                lines.add(f"total = total + {self._value()}")
            lines.add(self._stored("total"))

    def _sum_vectors(self) -> None:
        """Add up two vectors at a time. Measured: this hides the cost of switching ranks; more run out of registers."""
        lines = self.lines
        with lines.block(f"for at in range(start, end, {_UNROLLED} * LANES):"):
            totals = [f"total_{k}" for k in range(_UNROLLED)]
            lines.add(f"{' = '.join(totals)} = splat(np.float32(0), LANES)")
            with lines.block("for rank in range(bodies.size):"):
                self._pick_rank()
                for k, total in enumerate(totals):
                    lines.add(f"i = at + {k} * LANES")
                    lines.add(f"{total} = {total} + {self._value()}")
            lines.add(*(f"store(out, at + {k} * LANES, {total})" for k, total in enumerate(totals)))

    # -- all ranks -------------------------------------------------------------------------------------------

    def _scalars(self) -> list[str]:
        """Variables of a payload's scalars that elements use."""
        nodes = [node for node in self.program.decode_nodes() if node.space.kind == "scalar"]
        return [self.names[id(node)] for node in nodes if node.op in ("extract", "narrow")]

    def _arrays(self) -> list[Field]:
        return [each for each in self.program.fields if each.is_array and each.node.space.kind != "items"]

    def _plain_arrays(self) -> list[Field]:
        """Arrays that are read directly from a body."""
        return [each for each in self._arrays() if each.coding is None]

    def _expanded(self, each: Field) -> str:
        length = self._length(each)
        return f"room[rank * {length} : (rank + 1) * {length}]"

    def _open_all(self) -> None:
        """Check the payloads of all ranks, and store their scalars and the addresses of their arrays."""
        lines = self.lines
        lines.add(*(f"{name}_of = np.empty(bodies.size, np.float32)" for name in self._scalars()))
        lines.add(*(f"{each.variable}_of = np.empty(bodies.size, np.uint64)" for each in self._plain_arrays()))
        lines.add(*(f"{name}_of = np.empty(bodies.size, np.float32)" for name in self._table))
        lines.add("any_overflow = False")
        with lines.block("for rank in range(bodies.size):"):
            lines.add("body = array_at(bodies[rank], sizes[rank], u8)")
            self._open("body", "sizes[rank]")
            self.decode_scalars()
            self.guard = self.overflows(self.program.output)
            if self.guard not in (None, "True"):
                lines.add(f"any_overflow = any_overflow or {self.guard}")
                self.guard = "any_overflow"
            self._tabulate()
            lines.add(*(f"{name}_of[rank] = {name}" for name in self._table))
            lines.forget()
            lines.add(*(f"{name}_of[rank] = {name}" for name in self._scalars()))
            lines.add(*(f"{each.variable}_of[rank] = address({each.variable}_in)" for each in self._plain_arrays()))

    def _pick_rank(self) -> None:
        """Set the variables of a payload to those of this rank."""
        self.lines.add(*(f"{name} = {name}_of[rank]" for name in self._table or self._scalars()))
        for each in self._arrays():
            name = each.variable
            if self._has_levels(each):
                place = f"address({name}_all) + np.uint64(rank * {self.chunk})"
                self.lines.add(f"{name}_levels = array_at({place}, {self.chunk}, u8)")
            else:
                self.lines.add(f"{name}_in = array_at({name}_of[rank], {self._length(each)}, {self._storage(each)})")

    def _make_all_buffers(self) -> None:
        self.buffers([self.program.output], self.chunk)
        for each in self._packed:
            self.lines.add(f"{each.variable}_all = np.empty(bodies.size * {self.chunk}, np.uint8)")

    def _unpack_all(self) -> None:
        """Unpack the chunk of every rank."""
        lines = self.lines
        self.draws([self.program.output], "start", "end - start")
        if not self._packed:
            return
        with lines.block("for rank in range(bodies.size):"):
            for each in self._packed:
                name = each.variable
                place = f"address({name}_all) + np.uint64(rank * {self.chunk})"
                packed = f"array_at({name}_of[rank], {self._length(each)}, u8)"
                lines.add(f"{name}_in = {packed if each.coding is None else self._expanded(each)}")
                lines.add(f"{name}_levels = array_at({place}, {self.chunk}, u8)", *unpacking(each))
