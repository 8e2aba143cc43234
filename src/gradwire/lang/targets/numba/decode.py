"""The decoder of one payload as Numba source. It writes to the output or adds to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from gradwire.kernels.layout import SUM_LANES as LANES
from gradwire.lang.emit import Lines, chunk_of
from gradwire.lang.interpret import is_stat
from gradwire.lang.ir import ELEMENTS, Field, Node
from gradwire.lang.operators.base import coding_of
from gradwire.lang.targets.numba.expressions import STORAGE, NumbaFunction, has_levels, num_bytes, scalar_bytes

# Up to this many levels, choosing among results is faster than computing with levels.
_MOST_LEVELS = 4


class NumbaDecoder(NumbaFunction):
    """Emits `decode`."""

    guard: str | None = None  # the condition that an element could overflow

    def source(self) -> str:
        self.lines = lines = Lines()
        lines.add("@kernel", "def decode(body, out, accumulate, stats, keys, first, static, room):")
        lines.indent = 1
        lines.add("n = out.size")
        self._begin_lists()
        self._open("body", "body.size")
        if self.program.output.op == "scatter":
            self._decode_list()
            index = self.names[id(self.program.output.inputs[1])]
            lines.add("if accumulate is not None:", f"    return add_at({index}_in, sent, np.float32(1), out)")
            lines.add("list_indices, list_values, list_counts = list_room(1)")
            lines.add(f"list_indices[0], list_values[0] = address({index}_in), address(sent)")
            lines.add("list_counts[0] = count")
            lines.add("scatter_lists(list_indices, list_values, list_counts, out)")
            lines.add("return True")
            return str(lines)
        self._make_buffers()
        self.decode_scalars()
        self.guard = self.overflows(self.program.output)
        self._tabulate()
        with self._chunks():
            self._unpack_chunk()
            with self._vectors():
                value = self._value()
                lines.add(
                    "if accumulate is None:", f"    {self._stored(value)}", "else:",
                    f"    {self._stored(f'load(out, i, LANES) + {value}')}",
                )  # fmt: skip
        lines.add("return True")
        return str(lines)

    # -- fields ----------------------------------------------------------------------------------------------

    @property
    def chunk(self) -> int:
        return chunk_of(self.program.fields)

    @property
    def _block(self) -> int:
        """Elements per block if blocks may end within a vector, else 0."""
        spaces = (each.node.space for each in self.program.fields)
        block = next((space.block for space in spaces if space.kind == "blocks"), 0)
        return block if block % LANES else 0

    def _open(self, body: str, size: str) -> None:
        """Locate the fields in a body. It is invalid if they do not fill it or a float is not finite."""
        lines, arrays = self.lines, [each for each in self.program.fields if each.is_array]
        if self.program.has_fixed_size:
            lines.add(f"if {size} != {self._bytes(arrays)}:", "    return False")
        if self.program.fields[-1].coding is not None:
            lines.add(f"if {size} < {self._bytes(arrays[:-1])}:", "    return False")
        if self.program.items is not None:
            lines.add(f"if {size} < {' + '.join(scalar_bytes(self.program))}:", "    return False")
        lines.add("at = 0")
        for each in self.program.fields:
            if not each.is_array:
                self._open_scalar(each, body)
        if self.program.items is not None:
            taken = " + ".join(num_bytes(each, self._count(each)) for each in arrays)
            lines.add(f"count = read_length({body}, at)", "at += 4")
            lines.add(f"if count > n or at + {taken} != {size}:", "    return False")
        for each in arrays:
            name = each.variable
            if each.coding is not None:
                self._expand(each, body, size)
                continue
            if each.is_positions:
                self._open_positions(each, body)
                continue
            place = f"address({body}) + np.uint64(at)"
            lines.add(f"{name}_in = array_at({place}, {self._length(each)}, {self._storage(each)})")
            lines.add(f"at += {num_bytes(each, self._count(each))}")
            if each.node.space.kind == "blocks":
                lines.add(f"{name}_largest = largest_of({name}_in)", f"if not {name}_largest <= LARGEST:")
                lines.add("    return False")
                continue
            if not each.dtype.is_integer:  # every byte of integers is valid; digits are checked when they are unpacked
                lines.add(f"if not all_finite({name}_in):", "    return False")

    def _begin_lists(self) -> None:
        """Begin the scratch memory for lists, which `traced.TracedCompressor` allocates."""
        if self.program.items is not None:
            self.lines.add("room_at = address(room)")

    def _open_positions(self, each: Field, body: str) -> None:
        """Unpack the positions of a list; they must be ascending and inside the tensor."""
        lines, name = self.lines, each.variable
        lines.add(f"{name}_in = array_at(room_at, count, u32)", "room_at += np.uint64(4 * count)")
        coded = f"array_at(address({body}) + np.uint64(at), {num_bytes(each, 'count')}, u8)"
        lines.add(f"if not read_positions({coded}, n, {name}_in):", "    return False")

    def _open_scalar(self, each: Field, body: str) -> None:
        lines, name = self.lines, each.variable
        if is_stat(self.program, each):
            position = [id(node) for node in self.program.stats].index(id(each.node.inputs[0]))
            lines.add("if stats is not None:", f"    {name} = stats[{position}]", "else:")
            lines.add(f"    {name} = read_scalar({body}, at)", "    at += 4")
        else:
            lines.add(f"{name} = read_scalar({body}, at)", "at += 4")
        lines.add(f"if not np.isfinite({name}):", "    return False")

    def _bytes(self, arrays: Sequence[Field]) -> str:
        """Bytes of the scalars and of these arrays."""
        sizes = [num_bytes(each, self._count(each)) for each in arrays]
        return " + ".join([*scalar_bytes(self.program), *sizes]) or "0"

    def _expand(self, each: Field, body: str, size: str) -> None:
        """Undo what shortened the last field."""
        lines, name = self.lines, each.variable
        assert each.coding is not None
        lines.say(each.coding.where)
        coded = f"array_at(address({body}) + np.uint64(at), {size} - at, u8)"
        lines.add(f"{name}_in = {self._expanded(each)}")
        lines.add(f"if {coding_of(each).cpu_expand(coded, f'{name}_in')} < 0:", "    return False")
        lines.forget()

    def _expanded(self, each: Field) -> str:
        """Packed bytes of the last field."""
        return f"room[: {self._length(each)}]"

    def _storage(self, each: Field) -> str:
        return STORAGE.get(each.dtype.name, "u8")

    def _length(self, each: Field) -> str:
        """Stored elements of an array: bytes if it is packed, else elements."""
        count = self._count(each)
        return count if each.dtype.packing == "raw" else num_bytes(each, count)

    def _count(self, each: Field) -> str:
        space = each.node.space
        if space.kind == "items":
            return "count"
        return f"((n + {space.block - 1}) // {space.block})" if space.kind == "blocks" else "n"

    # -- dense -----------------------------------------------------------------------------------------------

    def _make_buffers(self) -> None:
        self.buffers([self.program.output], self.chunk)
        for each in self._packed:
            self.lines.add(f"{each.variable}_levels = np.empty({self.chunk}, np.uint8)")

    def _has_levels(self, each: Field) -> bool:
        is_dense = each.node.space.kind == "elements"
        return is_dense and has_levels(each.dtype, bool(self._block))

    @contextlib.contextmanager
    def _chunks(self) -> Iterator[None]:
        """The loop over chunks of the output."""
        with self.lines.block(f"for start in range(0, n, {self.chunk}):"):
            self.lines.add(f"end = min(n, start + {self.chunk})")
            yield

    def _unpack_chunk(self) -> None:
        self.draws([self.program.output], "start", "end - start")
        for each in self._packed:
            self.lines.add(*unpacking(each))

    @property
    def _packed(self) -> list[Field]:
        """Fields that are unpacked chunk by chunk."""
        return [each for each in self.program.fields if self._has_levels(each)]

    @contextlib.contextmanager
    def _vectors(self) -> Iterator[None]:
        """The loop over vectors of a chunk. Vectors end at the end of a block."""
        lines, block = self.lines, self._block
        if not block:
            with lines.block("for i in range(start, end, LANES):"):
                lines.add("stop = end")
                yield
            return
        lines.add("i = start")
        with lines.block("while i < end:"):
            lines.add(f"stop = min(end, min((i // {block} + 1) * {block}, i + LANES))")
            yield
            lines.add("i = stop")

    def _value(self) -> str:
        """The decoded vector at i."""
        lines = self.lines
        self.known = {}
        if self._table:
            lines.add(f"decoded = {self._looked_up()}")
            return "decoded"
        for node in self.program.decode_nodes():
            if node.op != "extract":
                continue
            each = self.program.field_of(node)
            if node.space.kind == "elements":
                self._load(each, node)
                self.known[id(node)] = each.variable
            elif node.space.kind == "blocks":
                lines.add(f"{each.variable} = {each.variable}_in[i // {node.space.block}]")
        self.decode_blocks()
        self.shared([self.program.output])
        lines.say(self.program.output.where)
        self.add_decoded(self.program.output, self.guard)
        lines.forget()
        return "decoded"

    # -- few levels ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _tabulated(self) -> Field | None:
        """The one field that determines an element, if it has at most four levels."""
        varying = [
            node for node in self.program.decode_nodes()
            if node.op == "random" or (node.op == "extract" and node.space.kind in ("elements", "blocks"))
        ]  # fmt: skip
        if len(varying) != 1 or varying[0].op == "random":
            return None
        each = self.program.field_of(varying[0])
        is_few = each.dtype.is_integer and each.dtype.high - each.dtype.low <= _MOST_LEVELS - 1
        return each if is_few else None

    @property
    def _table(self) -> list[str]:
        """Variables with the decoded value of each level."""
        each = self._tabulated
        return [] if each is None else [f"decoded_{k}" for k in range(each.dtype.high - each.dtype.low + 1)]

    def _tabulate(self) -> None:
        """Decode each level once. Elements then choose among the results."""
        each = self._tabulated
        if each is None:
            return
        node = next(node for node in self.program.decode_nodes() if node.op == "extract" and node.space == ELEMENTS)
        self.lines.add("# What each level decodes to.")
        for k, name in enumerate(self._table):
            self.known = {id(node): each.variable}
            self.lines.add(f"{each.variable} = splat(np.float32({each.dtype.low + k}), LANES)")
            self.shared([self.program.output])
            self.add_decoded(self.program.output, self.guard)
            self.lines.add(f"{name} = first_lane(decoded)")
        self.known = {}

    def _looked_up(self) -> str:
        """The choice among the decoded levels."""
        each = self._tabulated
        assert each is not None
        name, results = each.variable, [f"splat({name}, LANES)" for name in self._table]
        if each.dtype.packing == "bits":
            return f"select(bits_mask(from_bytes(load({name}_in, i >> 3, 8))), {results[1]}, {results[0]})"
        self.lines.add(f"levels = load({name}_levels, i - start, LANES)")
        choice = results[-1]
        for k in reversed(range(len(results) - 1)):
            choice = f"select(levels == {k}, {results[k]}, {choice})"
        return choice

    def _load(self, each: Field, node: Node) -> None:
        name = each.variable
        if each.dtype.packing == "bits" and not self._has_levels(each):
            self.lines.add(f"{name}_mask = bits_mask(from_bytes(load({name}_in, i >> 3, 8)))")
            self.lines.add(f"{name} = number({name}_mask)")
            self.masks.add(id(node))
        else:
            self.lines.add(f"{name} = {self._loaded(each)}")

    def _loaded(self, each: Field) -> str:
        name, dtype = each.variable, each.dtype
        if dtype.packing == "digits":
            return f"convert(convert(load({name}_levels, i - start, LANES), i32) - 1, f32)"
        if self._has_levels(each):
            return f"convert(convert(load({name}_levels, i - start, LANES), i32), f32)"
        if dtype.is_integer:
            wide = f"load({name}_in, i, LANES)"
            return f"convert({wide}, f32)" if dtype.bits == 32 else f"convert(convert({wide}, i32), f32)"
        return f"load_f32({name}_in, i, LANES)"

    def _stored(self, value: str) -> str:
        return f"store_until(out, i, stop, {value})" if self._block else f"store(out, i, {value})"

    # -- lists -----------------------------------------------------------------------------------------------

    def _decode_list(self) -> None:
        """Decode the items of a list to `sent`."""
        lines = self.lines
        values, index = self.program.output.inputs
        self.decode_scalars()
        overflows = self.overflows(values)
        lists = [each for each in self.program.fields if each.node.space.kind == "items" and not each.is_positions]
        chunk = self.chunk
        lines.add("sent = array_at(room_at, count, f32)", "room_at += np.uint64(4 * count)")
        for each in lists:
            if has_levels(each.dtype, True):
                lines.add(f"{each.variable}_levels = np.empty({chunk}, np.uint8)")
        with lines.block(f"for start in range(0, count, {chunk}):"):
            lines.add(f"end = min(count, start + {chunk})")
            for each in lists:
                if has_levels(each.dtype, True):
                    lines.add(*unpacking(each))
            with lines.block("for i in range(start, end, LANES):"):
                self.known = {}
                for node in self.program.decode_nodes():
                    if node.op == "extract" and node.space.kind == "items" and node is not index:
                        each = self.program.field_of(node)
                        lines.add(f"{each.variable} = {self._loaded_item(each)}")
                        self.known[id(node)] = each.variable
                self.shared([values])
                lines.say(values.where)
                self.add_decoded(values, overflows)
                lines.add("store(sent, i, decoded)")
                lines.forget()
        self.known = {}

    def _loaded_item(self, each: Field) -> str:
        if has_levels(each.dtype, True):
            less = " - 1" if each.dtype.packing == "digits" else ""
            return f"convert(convert(load({each.variable}_levels, i - start, LANES), i32){less}, f32)"
        return self._loaded(each)


def unpacking(each: Field) -> list[str]:
    """Source that unpacks the levels of a chunk."""
    name, at = each.variable, f"start // {each.dtype.per_byte}"
    if each.dtype.packing == "digits":
        return [f"if unpack_digits({name}_in, {at}, end - start, {name}_levels) < 0:", "    return False"]
    if each.dtype.packing == "bits":
        return [f"unpack_bits({name}_in, {at}, end - start, {name}_levels)"]
    return [f"unpack_planes({name}_in, {at}, end - start, {int(each.dtype.bits)}, {name}_levels)"]
