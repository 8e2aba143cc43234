"""The decoders as Numba source: of one payload, written or added, and of the payloads of all ranks in one sweep."""

from __future__ import annotations

from gradwire.lang.cpu.expressions import STORAGE, Function, has_levels, num_bytes
from gradwire.lang.emit import Lines, chunk_of, needs_finite
from gradwire.lang.interpret import is_stat
from gradwire.lang.ir import Field


class Decoder(Function):
    """Emits `decode` and `decode_sum`."""

    def source(self) -> str:
        return "\n\n\n".join([self._single(), self._sum()])

    def _single(self) -> str:
        self.lines = lines = Lines()
        lines.add("@kernel", "def decode(body, out, accumulate, stats, keys, first, static):")
        lines.indent = 1
        lines.add("n = out.size")
        self._open("body", "body.size")
        if self.program.output.op == "scatter":
            lines.add("if accumulate is None:", "    out[:] = 0")
            self._scatter()
            lines.add("return True")
            return str(lines)
        self._make_buffers()
        self.decode_scalars()
        with self._chunks():
            self._unpack_chunk()
            with self._vectors():
                value = self._value()
                lines.add(
                    "if accumulate is None:", f"    store_until(out, i, stop, {value})", "else:",
                    f"    store_until(out, i, stop, load(out, i, LANES) + {value})",
                )  # fmt: skip
                self._advance()
        lines.add("return True")
        return str(lines)

    def _sum(self) -> str:
        self.lines = lines = Lines()
        lines.add("@kernel", "def decode_sum(bodies, sizes, out, stats, keys, first, static):")
        lines.indent = 1
        lines.add("n = out.size")
        if self.program.output.op == "scatter":
            lines.add("out[:] = 0")
            with lines.block("for rank in range(bodies.size):"):
                lines.add("body = array_at(bodies[rank], sizes[rank], u8)")
                self._open("body", "sizes[rank]")
                self._scatter()
            lines.add("return True")
            return str(lines)
        with lines.block("for rank in range(bodies.size):"):
            lines.add("body = array_at(bodies[rank], sizes[rank], u8)")
            self._open("body", "sizes[rank]", check_only=True)
        self._make_buffers()
        lines.add(f"total = np.empty({self.chunk}, np.float32)")
        with lines.block(f"for start in range(0, n, {self.chunk}):"):
            lines.add(f"end = min(n, start + {self.chunk})", "total[: end - start] = 0")
            with lines.block("for rank in range(bodies.size):"):
                lines.add("body = array_at(bodies[rank], sizes[rank], u8)")
                self._open("body", "sizes[rank]", unchecked=True)
                self.decode_scalars()
                self._unpack_chunk()
                with self._vectors():
                    lines.add(
                        f"store_until(total, i - start, stop - start, load(total, i - start, LANES) + {self._value()})"
                    )
                    self._advance()
            with lines.block("for i in range(start, end, LANES):"):
                lines.add("store_until(out, i, end, load(total, i - start, LANES))")
        lines.add("return True")
        return str(lines)

    # -- fields ----------------------------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        return chunk_of(self.program.fields)

    @property
    def _block(self) -> int:
        """Elements a block, where fields of blocks are read element by element; else 0."""
        spaces = (each.node.space for each in self.program.fields)
        return next((space.block for space in spaces if space.kind == "blocks"), 0)

    def _open(self, body: str, size: str, check_only: bool = False, unchecked: bool = False) -> None:
        """Find the fields in a body; the body is invalid if they do not fit or a float is not finite."""
        lines, at = self.lines, ["0"]
        items = [each for each in self.program.fields if each.node.space.kind == "items"]
        if items:
            fixed = 4 * sum(not each.is_array for each in self.program.fields)
            per = " + ".join(f"{num_bytes(each, 'count')}" for each in items)
            lines.add(f"count = list_length({size} - {fixed}, {sum(each.dtype.bits for each in items)!r})")
            lines.add(f"if count < 0 or {fixed} + {per} != {size}:", "    return False")
        lines.add("at = 0")
        for each in self.program.fields:
            name = each.variable
            if not each.is_array:
                self._open_scalar(each, body, unchecked)
                continue
            dtype = STORAGE.get(each.dtype.name, "u8")
            count = self._count(each)
            length = count if each.dtype.packing == "raw" else num_bytes(each, count)
            lines.add(f"{name}_in = array_at(address({body}) + np.uint64(at), {length}, {dtype})")
            lines.add(f"at += {num_bytes(each, count)}")
            if not each.dtype.is_integer and not unchecked:
                lines.add(f"if not all_finite({name}_in):", "    return False")
            if each.dtype.packing == "digits" and each.node.space.kind == "elements" and not unchecked:
                lines.add(f"if not all_digits({name}_in):", "    return False")
            if each.dtype.name == "int8" and not unchecked:
                lines.add(f"if not no_minimum({name}_in):", "    return False")
        del at

    def _open_scalar(self, each: Field, body: str, unchecked: bool) -> None:
        lines, name = self.lines, each.variable
        if is_stat(self.program, each):
            position = [id(node) for node in self.program.stats].index(id(each.node.inputs[0]))
            lines.add("if stats is not None:", f"    {name} = stats[{position}]", "else:")
            lines.add(f"    {name} = read_scalar({body}, at)", "    at += 4")
        else:
            lines.add(f"{name} = read_scalar({body}, at)", "at += 4")
        if not unchecked:
            lines.add(f"if not np.isfinite({name}):", "    return False")

    def _count(self, each: Field) -> str:
        space = each.node.space
        if space.kind == "items":
            return "count"
        return f"((n + {space.block - 1}) // {space.block})" if space.kind == "blocks" else "n"

    # -- dense -----------------------------------------------------------------------------------------------

    def _make_buffers(self) -> None:
        self.buffers([self.program.output], self.chunk)
        for each in self.program.fields:
            if self._has_levels(each):
                self.lines.add(f"{each.variable}_levels = np.empty({self.chunk}, np.uint8)")

    def _has_levels(self, each: Field) -> bool:
        is_dense = each.node.space.kind == "elements"
        return is_dense and has_levels(each.dtype, bool(self._block))

    def _chunks(self) -> _Chunks:
        return _Chunks(self.lines, self.chunk)

    def _unpack_chunk(self) -> None:
        self.draws([self.program.output], "start", "end - start")
        for each in self.program.fields:
            if not self._has_levels(each):
                continue
            name = each.variable
            at = f"start // {each.dtype.per_byte}"
            if each.dtype.packing == "digits":
                call = f"unpack_digits({name}_in, {at}, end - start, {name}_levels)"
            elif each.dtype.packing == "bits":
                call = f"unpack_bits({name}_in, {at}, end - start, {name}_levels)"
            else:
                call = f"unpack_planes({name}_in, {at}, end - start, {int(each.dtype.bits)}, {name}_levels)"
            self.lines.add(call)

    def _vectors(self) -> _Vectors:
        return _Vectors(self)

    def _value(self) -> str:
        """The decoded vector at i."""
        lines = self.lines
        self.known = {}
        for node in self.program.decode_nodes():
            if node.op != "extract":
                continue
            each = self.program.field_of(node)
            if node.space.kind == "elements":
                lines.add(f"{each.variable} = {self._loaded(each)}")
                self.known[id(node)] = each.variable
            elif node.space.kind == "blocks":
                lines.add(f"{each.variable} = {each.variable}_in[i // {node.space.block}]")
        self.decode_blocks()
        self.shared([self.program.output])
        lines.say(self.program.output.where)
        value = self.vector(self.program.output).vector
        lines.add(f"decoded = finite({value})" if needs_finite(self.program.output) else f"decoded = {value}")
        lines.forget()
        return "decoded"

    def _loaded(self, each: Field) -> str:
        name, dtype = each.variable, each.dtype
        if dtype.packing == "digits":
            return f"convert(convert(load({name}_levels, i - start, LANES), i32) - 1, f32)"
        if self._has_levels(each):
            return f"convert(convert(load({name}_levels, i - start, LANES), i32), f32)"
        if dtype.packing == "bits":
            return f"number(bits_mask(from_bytes(load({name}_in, i >> 3, 8))))"
        if dtype.is_integer:
            wide = f"load({name}_in, i, LANES)"
            return f"convert({wide}, f32)" if dtype.bits == 32 else f"convert(convert({wide}, i32), f32)"
        return f"load_f32({name}_in, i, LANES)"

    def _advance(self) -> None:
        if self._block:
            self.lines.add("i = stop")

    # -- lists -----------------------------------------------------------------------------------------------

    def _scatter(self) -> None:
        """Add the values of a list at their positions."""
        lines, output = self.lines, self.program.output
        values, index = output.inputs
        self.decode_scalars()
        lists = [each for each in self.program.fields if each.node.space.kind == "items"]
        chunk = self.chunk
        lines.add(f"sent = np.empty({chunk} + LANES, np.float32)")
        for each in lists:
            if has_levels(each.dtype, True):
                lines.add(f"{each.variable}_levels = np.empty({chunk}, np.uint8)")
        with lines.block(f"for start in range(0, count, {chunk}):"):
            lines.add(f"end = min(count, start + {chunk})")
            for each in lists:
                if has_levels(each.dtype, True):
                    self._unpack_list(each)
            with lines.block("for i in range(start, end, LANES):"):
                self.known = {}
                for node in self.program.decode_nodes():
                    if node.op == "extract" and node.space.kind == "items" and node is not index:
                        each = self.program.field_of(node)
                        lines.add(f"{each.variable} = {self._loaded_item(each)}")
                        self.known[id(node)] = each.variable
                self.shared([values])
                lines.say(values.where)
                sent = self.vector(values).vector
                lines.add(f"store(sent, i - start, {f'finite({sent})' if needs_finite(values) else sent})")
                lines.forget()
            name = self.names[id(index)]
            lines.add(f"if not add_at({name}_in[start:end], sent, np.float32(1), out):", "    return False")
        self.known = {}

    def _unpack_list(self, each: Field) -> None:
        kind = {"digits": "unpack_digits", "bits": "unpack_bits"}.get(each.dtype.packing, "unpack_planes")
        bits = f"{int(each.dtype.bits)}, " if kind == "unpack_planes" else ""
        name, at = each.variable, f"start // {each.dtype.per_byte}"
        self.lines.add(f"{kind}({name}_in, {at}, end - start, {bits}{name}_levels)")

    def _loaded_item(self, each: Field) -> str:
        if has_levels(each.dtype, True):
            less = " - 1" if each.dtype.packing == "digits" else ""
            return f"convert(convert(load({each.variable}_levels, i - start, LANES), i32){less}, f32)"
        return self._loaded(each)


class _Chunks:
    """``for start in ...`` over the chunks of the output."""

    def __init__(self, lines: Lines, chunk: int) -> None:
        self.lines, self.chunk = lines, chunk

    def __enter__(self) -> None:
        self.lines.add(f"for start in range(0, n, {self.chunk}):")
        self.lines.indent += 1
        self.lines.add(f"end = min(n, start + {self.chunk})")

    def __exit__(self, *_: object) -> None:
        self.lines.indent -= 1


class _Vectors:
    """The loop over vectors of a chunk: none of them crosses the end of a block, where there are blocks."""

    def __init__(self, decoder: Decoder) -> None:
        self.lines, self.block = decoder.lines, decoder._block

    def __enter__(self) -> None:
        if self.block:
            self.lines.add("i = start", "while i < end:")
            self.lines.indent += 1
            self.lines.add(f"stop = min(end, min((i // {self.block} + 1) * {self.block}, i + LANES))")
        else:
            self.lines.add("for i in range(start, end, LANES):")
            self.lines.indent += 1
            self.lines.add("stop = end")

    def __exit__(self, *_: object) -> None:
        self.lines.indent -= 1
