"""One sweep of an encoder as Numba source: over the gradient, block by block if it has blocks, or over a list."""

from __future__ import annotations

import math

from gradwire.lang.emit import chunk_of
from gradwire.lang.ir import Field, Node
from gradwire.lang.operators.arithmetic import Arithmetic
from gradwire.lang.operators.base import Emission, lookup
from gradwire.lang.passes import Sweep
from gradwire.lang.targets.numba.encode_function import NumbaEncodeFunction
from gradwire.lang.targets.numba.expressions import STORAGE, has_levels, is_condition


class NumbaElementSweep:
    """Emits one sweep over the gradient."""

    def __init__(self, encoder: NumbaEncodeFunction, step: Sweep, failure: str = "return -1") -> None:
        self.f, self.step, self.failure = encoder, step, failure
        self.lines = encoder.lines
        self.program = encoder.program
        self.decoded = [self.program.output] if step.residual else []
        self.encoded = list(step.roots)
        if step.residual:
            dense = (each.node for each in self.program.fields if each.node.space.kind in ("elements", "blocks"))
            self.encoded += dense
        self.roots = [*self.encoded, *self.decoded]
        self.chunk = chunk_of(step.packs)
        self.overflows: str | None = None  # the condition that a decoded element could overflow

    def emit(self) -> None:
        f, step, lines = self.f, self.step, self.lines
        f.known = {}
        title = [f.names[id(node)] for node in (*step.sinks, *step.block_nodes)]
        title += [each.name for each in step.packs] + ["the residual"] * step.residual
        title = list(dict.fromkeys(title))
        lines.add("", f"# Sweep over the gradient: {', '.join(title) or 'is it finite?'}.")
        emissions = f.sinks(step.sinks)
        for node, emission in emissions:
            self._capacity(node)
            lines.add(*emission.before)
        if step.compensates:
            lines.add("watch = splat(np.int32(0), LANES)")
        f.buffers(self.roots, self.chunk)
        for each in [*self._block_fields(), *step.packs]:
            f.offset(each)
            if has_levels(each.dtype, bool(step.cut_by)):
                lines.add(f"{each.variable}_levels = np.empty({self.chunk}, np.uint8)")
            dtype = STORAGE.get(each.dtype.name, "u8")
            count = f.count(each) if each.dtype.packing == "raw" else f"{each.variable}_bytes"
            # An array that a coding shortens is packed in scratch memory, after the results of filters.
            place = f"address(body) + np.uint64({each.variable}_at)" if each.coding is None else "room"
            lines.add(f"{each.variable}_out = array_at({place}, {count}, {dtype})")
            if each.dtype.packing in ("planes", "digits") or has_levels(each.dtype, bool(step.cut_by)):
                lines.add(f"{each.variable}_next = np.int64(0)")
        if step.residual:
            with f.as_receiver():
                f.decode_scalars()
                self.overflows = f.overflows(self.program.output)
        if step.block_nodes:
            self._tiles(emissions)
        else:
            with lines.block(f"for start in range(0, n, {self.chunk}):"):
                lines.add(f"end = min(n, start + {self.chunk})")
                self._chunk(emissions, step.compensates)
        if step.compensates:
            lines.add("if largest_lane(watch) >= INFINITY_BITS:", f"    {self.failure}")
            f.stored = True
        for _, emission in emissions:
            lines.add(*emission.after)
        f.known = {}

    def _capacity(self, node: Node) -> None:
        """Set the maximum length of a list, and the number of slots of its table."""
        if node.op not in ("filter", "hash"):
            return
        name = self.f.names[id(node)]
        most = f"max(np.int64({self.f.scalar64(node.inputs[2])}), 0)" if len(node.inputs) > 2 else ""
        if node.op == "hash":
            self.lines.add(f"{name}_slots = {most}")
        bound = most if node.op == "filter" else ""
        self.lines.add(f"{name}_capacity = " + (f"min(n, {bound})" if bound else "n"))

    def _block_fields(self) -> list[Field]:
        mine = {id(node) for node in self.step.block_nodes}
        return [
            each for each in self.program.fields
            if each.node.space.kind == "blocks" and id(each.node) in mine and each not in self.step.packs
        ]  # fmt: skip

    # -- plain sweeps ----------------------------------------------------------------------------------------

    def _chunk(self, emissions: list[tuple[Node, Emission]], first_read: bool) -> None:
        """Process the elements from `start` to `end`."""
        f, lines = self.f, self.lines
        f.draws(self.roots, "start", "end - start")
        per_chunk = [emission for _, emission in emissions if emission.chunk or emission.end]
        for emission in per_chunk:
            lines.add(*emission.chunk)
        with lines.block("for i in range(start, end, LANES):"):
            lines.add("stop = end")
            self._vector(emissions, first_read)
        for emission in per_chunk:
            lines.add(*emission.end)
        self._flush()

    def _vector(self, emissions: list[tuple[Node, Emission]], first_read: bool) -> None:
        """Process the 64 elements at i, up to `stop`."""
        f, step, lines = self.f, self.step, self.lines
        f.read()
        f.known = {id(f.gradient()): "x"}
        if first_read:
            lines.add("watch = maximum(watch, magnitude_bits(x))")
            if not step.residual:
                lines.add("if residual_out is not None:", f"    {self._stored('residual_out', 'x')}")
        if emissions or any(each.dtype.packing == "bits" for each in step.packs):
            lines.add("inside = lanes_below(stop - i, LANES)")
        f.shared([root for root in self.encoded if root.space.kind in ("elements", "items")])
        for node, emission in emissions:
            f.feed(node, emission)
        for each in step.packs:
            if each.node.space.kind == "elements":
                self._pack(each)
        if step.residual:
            self._residual()

    def _pack(self, each: Field) -> None:
        f, lines, name, dtype = self.f, self.lines, each.variable, each.dtype
        lines.say(each.node.where)
        node = each.node
        if dtype.packing == "bits" and not self.step.cut_by:
            mask = f.vector(node.inputs[0]).source if is_condition(node) else f"({f.vector(node).vector} != 0)"
            if self.step.residual and not is_condition(node):
                lines.add(f"{name} = {f.vector(node).vector}")
                f.known[id(node)] = name
                mask = f"({name} != 0)"
            lines.add(f"store({name}_out, i >> 3, as_bytes(mask_bits({mask} & inside)))")
            return
        value, integers = f.packed(node, name)
        if dtype.packing == "digits":
            lines.add(f"store({name}_levels, i - start, convert({integers} + 1, u8))")
        elif has_levels(dtype, bool(self.step.cut_by)):
            lines.add(f"store({name}_levels, i - start, convert({integers}, u8))")
        elif dtype.is_integer:
            lines.add(self._stored(f"{name}_out", f"convert({integers}, {STORAGE[dtype.name]})"))
        else:
            lines.add(f"store_f32({name}_out, i, {value})")

    def _stored(self, out: str, value: str) -> str:
        """Store the lanes before `stop`, which is the end of the array unless blocks end within vectors."""
        return f"store_until({out}, i, stop, {value})" if self.step.cut_by else f"store({out}, i, {value})"

    def _residual(self) -> None:
        f, lines, program = self.f, self.lines, self.program
        with f.as_receiver(), lines.block("if residual_out is not None:"):
            lines.forget()
            lines.say(program.output.where)
            before = dict(f.known)
            f.shared([program.output])
            f.add_decoded(program.output, self.overflows)
            lines.add(self._stored("residual_out", "x - decoded"))
            f.known = before
        lines.forget()

    def _flush(self) -> None:
        """Pack the levels of a chunk."""
        for each in self.step.packs:
            if each.node.space.kind == "elements" and has_levels(each.dtype, bool(self.step.cut_by)):
                self.lines.add(_packing(each))

    # -- sweeps by blocks ------------------------------------------------------------------------------------

    def _tiles(self, emissions: list[tuple[Node, Emission]]) -> None:
        """Reduce the blocks of a tile, then process the rest of the sweep while the tile is in the cache."""
        f, step, lines = self.f, self.step, self.lines
        block = step.block_nodes[0].space.block
        tile = math.lcm(block, self.chunk)
        values = step.block_nodes
        num_blocks = tile // block
        for node in values:
            lines.add(f"{f.names[id(node)]}_of = np.empty({num_blocks}, np.float32)")
        with lines.block(f"for tile in range(0, n, {tile}):"):
            lines.add(f"tile_end = min(n, tile + {tile})")
            with lines.block(f"for b in range(tile // {block}, (tile_end + {block - 1}) // {block}):"):
                self._reduce_block(block)
            lines.forget()
            with lines.block(f"for start in range(tile, tile_end, {self.chunk}):"):
                lines.add(f"end = min(tile_end, start + {self.chunk})")
                f.draws(self.roots, "start", "end - start")
                compensated, f.stored = f.stored, True
                if step.cut_by:
                    self._segments(emissions, block)
                else:
                    with lines.block("for i in range(start, end, LANES):"):
                        lines.add("stop = end")
                        self._pick_block(block)
                        self._vector(emissions, False)
                f.stored = compensated
                self._flush()

    def _segments(self, emissions: list[tuple[Node, Emission]], block: int) -> None:
        """Process the vectors of a chunk. Vectors end at the end of a block."""
        lines = self.lines
        lines.add("i = start")
        with lines.block("while i < end:"):
            self._pick_block(block)
            lines.add(f"segment_end = min(end, (b + 1) * {block})")
            with lines.block("while i < segment_end:"):
                lines.add("stop = min(segment_end, i + LANES)")
                self._vector(emissions, False)
                lines.add("i = stop")

    def _pick_block(self, block: int) -> None:
        """Set the variables of block values to those of element i's block."""
        f, lines = self.f, self.lines
        lines.add(f"b = i // {block}")
        for node in self.step.block_nodes:
            name = f.names[id(node)]
            lines.add(f"{name} = {name}_of[b - tile // {block}]")
        if self.step.residual:
            with f.as_receiver():
                f.decode_blocks()

    def _reduce_block(self, block: int) -> None:
        f, step, lines = self.f, self.step, self.lines
        lines.add(f"block_end = min(n, (b + 1) * {block})")
        emissions = f.sinks(step.block_sinks)
        for _, emission in emissions:
            lines.add(*emission.before)
        roots = [each for node in step.block_sinks for each in node.inputs]
        with lines.block(f"for start in range(b * {block}, block_end, CHUNK):"):
            lines.add("end = min(block_end, start + CHUNK)")
            f.draws(roots, "start", "end - start")
            for _, emission in emissions:
                lines.add(*emission.chunk)
            with lines.block("for i in range(start, end, LANES):"):
                lines.add("stop = end")
                f.read()
                f.known = {id(f.gradient()): "x"}
                lines.add("inside = lanes_below(stop - i, LANES)")
                if step.compensates:
                    lines.add("watch = maximum(watch, magnitude_bits(x))")
                    lines.add("if residual_out is not None:", "    store_until(residual_out, i, stop, x)")
                f.shared(roots)
                for node, emission in emissions:
                    f.feed(node, emission)
            for _, emission in emissions:
                lines.add(*emission.end)
        f.known = {}
        sinks = {id(node) for node in step.block_sinks}
        for node, emission in emissions:
            name = f.names[id(node)]
            lines.add(*emission.after, f"{name} = narrow({name})")
        for node in step.block_nodes:
            name = f.names[id(node)]
            if id(node) not in sinks:
                lines.say(node.where)
                operator = lookup(node.op)
                assert isinstance(operator, Arithmetic)
                text = operator.scalar(*(f.scalar32(each) for each in node.inputs))
                lines.add(f"{name} = narrow(np.float64({text}))")
            lines.add(f"{name}_of[b - tile // {block}] = {name}")
        for each in self.program.fields:
            if each.node.space.kind == "blocks":
                lines.add(f"{each.variable}_out[b] = {f.names[id(each.node)]}")


class NumbaItemSweep:
    """Emits one sweep over a list."""

    def __init__(self, encoder: NumbaEncodeFunction, step: Sweep, failure: str = "") -> None:
        self.f, self.step = encoder, step

    def emit(self) -> None:
        f, step, lines = self.f, self.step, self.f.lines
        source = step.space.source
        assert source is not None
        count = f"{f.names[id(source)]}_count"
        title = [f.names[id(node)] for node in step.sinks] + [each.name for each in step.packs]
        lines.add("", f"# Sweep over the list: {', '.join(title)}.")
        emissions = f.sinks(step.sinks)
        for _, emission in emissions:
            lines.add(*emission.before)
        chunk = chunk_of(step.packs)
        for each in step.packs:
            f.offset(each)
            dtype = STORAGE.get(each.dtype.name, "u8")
            size = f.count(each) if each.dtype.packing == "raw" else f"{each.variable}_bytes"
            if each.is_positions:
                dtype, size = "u8", f"{each.variable}_bytes"
            lines.add(f"{each.variable}_out = array_at(address(body) + np.uint64({each.variable}_at), {size}, {dtype})")
            if has_levels(each.dtype, True):
                lines.add(
                    f"{each.variable}_levels = np.empty({chunk}, np.uint8)", f"{each.variable}_next = np.int64(0)"
                )
            if each.is_positions:
                lines.add(f"write_positions({f.names[id(source)]}_index[:{count}], n, {each.variable}_out)")
        with lines.block(f"for start in range(0, {count}, {chunk}):"):
            lines.add(f"end = min({count}, start + {chunk})")
            for _, emission in emissions:
                lines.add(*emission.chunk)
            with lines.block("for i in range(start, end, LANES):"):
                self._vector(source, emissions)
            for _, emission in emissions:
                lines.add(*emission.end)
            for each in step.packs:
                if has_levels(each.dtype, True):
                    lines.add(_packing(each))
        for _, emission in emissions:
            lines.add(*emission.after)
        f.known = {}

    def _vector(self, source: Node, emissions: list[tuple[Node, Emission]]) -> None:
        f, step, lines = self.f, self.step, self.f.lines
        f.known = {}
        lines.add("stop = end", "inside = lanes_below(stop - i, LANES)")
        if source.op in ("sample", "sort"):
            lines.add(f"v = load({f.names[id(source)]}, i, LANES)")
            f.known[id(source)] = "v"
        else:
            f.load_items(source)
        f.shared([root for root in step.roots if root.op != "index"])
        for node, emission in emissions:
            f.feed(node, emission)
        for each in step.packs:
            if each.is_positions:
                continue
            name, dtype = each.variable, each.dtype
            lines.say(each.node.where)
            value, integers = f.packed(each.node, name)
            if has_levels(dtype, True):
                add = " + 1" if dtype.packing == "digits" else ""
                lines.add(f"store({name}_levels, i - start, convert({integers}{add}, u8))")
            elif dtype.is_integer:
                lines.add(f"store_until({name}_out, i, stop, convert({integers}, {STORAGE[dtype.name]}))")
            else:
                lines.add(f"store_f32({name}_out, i, {value})")


def _packing(each: Field) -> str:
    """Source that packs the levels of a chunk."""
    name, packing = each.variable, each.dtype.packing
    bits = f", {int(each.dtype.bits)}" if packing == "planes" else ""
    return f"{name}_next = pack_{packing}({name}_levels, end - start{bits}, {name}_out, {name}_next)"
