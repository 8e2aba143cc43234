"""The decoders as Triton and torch source: one kernel writes or adds payloads, or sums those of all ranks."""

from __future__ import annotations

from gradwire.lang.interpret import is_stat
from gradwire.lang.ir import Field, Node, Program
from gradwire.lang.operators.arithmetic import Text
from gradwire.lang.operators.base import coding_of
from gradwire.lang.targets.triton.encode import places_of, scalar_size
from gradwire.lang.targets.triton.expressions import Kernel, TritonFunction, storage

_CALLS = """\
def decode(body, out, accumulate, stats, keys, first, static):
    return decode_all([body], out, True if accumulate else None, stats, keys, first, static)


def decode_sum(bodies, out, stats, keys, first, static):
    out.zero_()
    return decode_all(bodies, out, True, stats, keys, first, static)"""


class TritonDecoder(TritonFunction):
    """Emits `decode_all`, and `decode` and `decode_sum`, which call it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, "decode")
        self.is_list = program.output.op == "scatter"

    def decode(self) -> str:
        """The source."""
        lines = self.lines
        lines.add("def decode_all(bodies, out, accumulate, stats, keys, first, static):")
        lines.indent = 1
        lines.add("out = out.view(-1)", "bad, n = flag(out), out.numel()", *scalar_size(self.program))
        if self.static:
            lines.add("static = static.tolist()")
        if self.is_list:
            self._scatter()
        else:
            self._dense()
        lines.add("return not bad.item()")
        return "\n\n\n".join([self.source(str(lines)), _CALLS])

    # -- fields ----------------------------------------------------------------------------------------------

    def _count(self, each: Field) -> str:
        space = each.node.space
        if space.kind == "items":
            return "count"
        return f"ceil_div(n, {space.block})" if space.kind == "blocks" else "n"

    def _read(self) -> None:
        """Set the variables of all fields to those of the payloads `rows`."""
        lines, at = self.lines, 0
        scalars = [each for each in self.program.fields if not each.is_array]
        is_shifted = any(is_stat(self.program, each) for each in scalars)
        if is_shifted:
            lines.add("at = 0")
        for each in scalars:
            name, place = each.variable, "at" if is_shifted else str(at)
            if is_stat(self.program, each):
                position = [id(node) for node in self.program.stats].index(id(each.node.inputs[0]))
                with lines.block("if stats is not None:"):
                    lines.add(f"{name} = stats[{position}].to(torch.float64).repeat(len(rows))")
                    lines.add(f"bad |= (~torch.isfinite({name})).any().to(torch.int32)")
                with lines.block("else:"):
                    lines.add(f"{name} = read_scalar(rows, at, bad)", "at += 4")
            else:
                lines.add(f"{name} = read_scalar(rows, {place}, bad)", *(["at += 4"] if is_shifted else []))
            at += 4
        for each in self.program.fields:
            name = each.variable
            if each.is_positions:
                lines.add(f"{name}_in = unpack_positions(rows[0, {name}_at:], n, count)")
                lines.add(f"if {name}_in is None:", "    return False")
            elif each.is_array:
                place = f"{name}_at, {name}_bytes, torch.{storage(each.dtype)}"
                lines.add(f"{name}_in = read_field(rows, {place})")
        self.decode_scalars()

    def _check_sizes(self) -> None:
        """Reject bodies of the wrong size, after expanding the last field if it has a coding."""
        lines, last, is_wrong = self.lines, self.program.fields[-1], "body.numel() != body_bytes"
        if last.coding is not None:
            lines.say(last.coding.where)
            name, is_wrong = last.variable, "body is None"
            whole = coding_of(last).triton_expand("body", f"{name}_at", f"{name}_bytes")
            lines.add(f"bodies = [{whole} for body in bodies]")
            lines.forget()
        lines.add(f"if any({is_wrong} for body in bodies):", "    return False")

    def _load(self, kernel: Kernel, node: Node) -> None:
        """Load a field for the current elements."""
        each = self.program.field_of(node)
        name, dtype = each.variable, each.dtype
        kernel.give(f"{name}_in", f"{name}_in")
        place, at = f"{name}_in", "i"
        if not self.is_list:
            kernel.give(f"{name}_stride", f"{name}_in.stride(0)")
            place = f"{name}_in + rank * {name}_stride"
        if node.space.kind == "blocks":
            at = f"i // {node.space.block}"
        if dtype.packing == "bits":
            value = f"load_bits({place}, {at}, inside)"
        elif dtype.packing == "digits":
            value = f"load_digits({place}, {at}, n, inside, {self._bad(kernel)})"
        elif dtype.packing == "planes" and dtype.per_byte > 1:
            value = f"load_planes({place}, {at}, n, inside, {int(dtype.bits)})"
        elif dtype.is_integer:
            value = f"tl.load({place} + {at}, mask=inside, other=0).to(tl.float32)"
        else:
            value = f"load_finite({place}, {at}, inside, {self._bad(kernel)})"
        kernel.lines.add(f"{name} = {value}")
        kernel.known[id(node)] = Text(name, True)

    @staticmethod
    def _bad(kernel: Kernel) -> str:
        return kernel.give("bad", "bad")

    def _arrays(self, *kinds: str) -> list[Node]:
        """The `extract` nodes of arrays in these spaces."""
        return [node for node in self.program.decode_nodes() if node.op == "extract" and node.space.kind in kinds]

    # -- dense -----------------------------------------------------------------------------------------------

    def _dense(self) -> None:
        lines, output = self.lines, self.program.output
        arrays = [each for each in self.program.fields if each.is_array]
        lines.add(*places_of(arrays, self._count))
        self._check_sizes()
        lines.add("if not bodies:", "    return True", "rows = stacked(bodies)")
        self._read()
        kernel = self.kernel("Decode, and add up over ranks.")
        kernel.give("num_ranks", "len(bodies)")
        kernel.take("out", "accumulate")
        kernel.of_rank = " + rank"
        body = kernel.lines
        body.add("total = tl.zeros([1024], tl.float32)")
        body.add("if accumulate is not None:", "    total = tl.load(out + i, mask=inside, other=0.0)")
        with body.block("for rank in range(num_ranks):"):
            for node in self._arrays("elements", "blocks"):
                self._load(kernel, node)
            kernel.shared([output])
            body.say(output.where)
            body.add(f"decoded = {kernel.decoded(output)}")
            body.add("if accumulate is not None:", "    total = total + decoded", "else:", "    total = decoded")
        body.add("tl.store(out + i, total, mask=inside)")
        lines.forget()
        kernel.launch("chunks(n)")

    # -- lists -----------------------------------------------------------------------------------------------

    def _scatter(self) -> None:
        """Add the values of lists at their positions, rank by rank."""
        lines, (values, index) = self.lines, self.program.output.inputs
        lines.add("if accumulate is None:", "    out.zero_()")
        arrays = [each for each in self.program.fields if each.is_array]
        with lines.block("for body in bodies:"):
            lines.add("count = read_length(body, scalars_bytes - 4)")
            lines.add("if not 0 <= count <= n:", "    return False")
            lines.add(*places_of(arrays, self._count))
            lines.add("if body.numel() != body_bytes:", "    return False", "rows = stacked([body])")
            self._read()
            kernel = self.kernel("Decode the values of a list.", count="count")
            kernel.give("sent_out", "sent")
            for node in self._arrays("items"):
                if node is not index:
                    self._load(kernel, node)
            kernel.shared([values])
            kernel.lines.say(values.where)
            kernel.lines.add(f"tl.store(sent_out + i, {kernel.decoded(values)}, mask=inside)")
            lines.add("sent = empty(count, torch.float32, out)")
            kernel.launch("chunks(count)")
            name = self.names[id(index)]
            lines.add(f"launch(add_at, (chunks(count),), {name}_in, sent, count, out, n, 1.0, bad)")
