"""One sweep of an encoder as a Triton kernel: over the gradient, block by block if it has blocks, or over a list.

A filter needs a second kernel over the same elements, after the number of items in each chunk is known. Blocks are
reduced by a separate kernel: one program per block keeps more of a GPU busy than one for several blocks.
"""

from __future__ import annotations

from gradwire.lang.emit import Lines, chunk_of
from gradwire.lang.ir import BOOL, Field, Node
from gradwire.lang.operators.base import DeviceEmission, Sink, lookup
from gradwire.lang.passes import Sweep
from gradwire.lang.targets.triton.encode_function import TritonEncodeFunction, load_items
from gradwire.lang.targets.triton.expressions import Kernel, has_tail
from gradwire.lang.types import CHUNK

_MOST_LANES, _LEAST_LANES = 1024, 64


class _Sweep:
    """Shared by sweeps over elements and over lists."""

    count = "n"

    def __init__(self, encoder: TritonEncodeFunction, step: Sweep) -> None:
        self.f, self.step, self.lines, self.program = encoder, step, encoder.lines, encoder.program
        self.chunk = chunk_of(step.packs)

    def _title(self, nodes: list[Node], packs: list[Field], more: list[str]) -> str:
        names = [self.f.names[id(node)] for node in nodes] + [each.name for each in packs] + more
        return ", ".join(dict.fromkeys(names)) or "is it finite?"

    def _sink(self, kernel: Kernel, node: Node) -> DeviceEmission:
        """Let a kernel feed a sink."""
        operator, name, lines = lookup(node.op), self.f.names[id(node)], kernel.lines
        assert isinstance(operator, Sink)
        lines.say(node.where)
        is_condition = node.inputs[0].dtype == BOOL
        value = "" if is_condition else _named(lines, f"{name}_of", kernel.lanes(node.inputs[0]))
        masks = [kernel.lanes(each) for each in node.inputs[not is_condition : 2]]
        chosen = _named(lines, f"{name}_chosen", " & ".join(["inside", *masks]))
        return operator.triton(node, name, value, chosen)

    def _sinks(self, kernel: Kernel, nodes: list[Node], shape: str) -> list[DeviceEmission]:
        """Let a kernel feed sinks. Each gets memory for one value per chunk."""
        found = []
        for node in nodes:
            emission = self._sink(kernel, node)
            kernel.lines.add(*emission.inside)
            if node.op in ("filter", "hash"):
                self._most(node)
            self.lines.add(*emission.before)
            kernel.take(*emission.takes)
            for name, dtype in emission.parts.items():
                kernel.take(name)
                self.lines.add(f"{name} = empty({shape}, torch.{dtype}, grad)")
            found.append(emission)
        return found

    def _most(self, node: Node) -> None:
        """Set the maximum length of a list, or the number of slots of its table."""
        self.lines.say(node.where)
        most = self.f.scalar(node.inputs[2]) if len(node.inputs) > 2 else "n"
        value = f"max(int({most}), 0)" if node.op == "hash" else most
        self.lines.add(f"{self.f.names[id(node)]}_{'slots' if node.op == 'hash' else 'most'} = {value}")

    # -- packing ---------------------------------------------------------------------------------------------

    def _open(self, kernel: Kernel, fields: list[Field]) -> None:
        """Allocate packed arrays."""
        for each in fields:
            self.f.place(each)
            kernel.take(f"{each.variable}_out")
            if has_tail(each.dtype):
                kernel.take(f"{each.variable}_tail")
                self.lines.add(f"{each.variable}_tail = empty({each.dtype.chunk}, torch.uint8, grad)")

    def _pack(self, kernel: Kernel, each: Field) -> None:
        lines, name, dtype = kernel.lines, each.variable, each.dtype
        lines.say(each.node.where)
        if dtype.packing == "bits" and each.node.op == "cast" and each.node.inputs[0].dtype == BOOL:
            lines.add(f"store_bits({name}_out, start, n, {kernel.lanes(each.node.inputs[0])} & inside)")
            return
        value = kernel.variable(each.node, name)
        if dtype.packing == "bits":
            lines.add(f"store_bits({name}_out, start, n, ({value} != 0) & inside)")
        elif dtype.packing == "digits":
            lines.add(f"{name}_digit = {value}.to(tl.int32) + 1", f"{name}_packed = {name}_packed * 3 + {name}_digit")
            lines.add(f"store_tail({name}_tail, tile, i, n, {name}_digit)")
        elif has_tail(dtype):
            lines.add(f"store_planes({name}_out, {name}_tail, start, n, {value}, {int(dtype.bits)})")
        else:
            lines.add(f"tl.store({name}_out + i, {_stored(value, dtype.name)}, mask=inside)")

    def _trits(self) -> list[str]:
        return [each.variable for each in self.step.packs if each.dtype.packing == "digits"]

    def _begin_planes(self, kernel: Kernel) -> None:
        """With trits, a program has five times 1,024 elements."""
        if self.chunk == CHUNK:
            return
        lines = kernel.lines
        lines.lines.clear()
        lines.add("tile = tl.program_id(0).to(tl.int64) * 5120")
        lines.add(*(f"{name}_packed = tl.zeros([1024], tl.int32)" for name in self._trits()))
        lines.add("for plane in tl.static_range(5):")
        lines.indent += 1
        lines.add("start = tile + plane * 1024", "i = start + tl.arange(0, 1024)", "inside = i < n")

    def _end_planes(self, kernel: Kernel) -> None:
        if self.chunk > CHUNK:
            kernel.lines.indent = 1
            kernel.lines.add(*(f"store_digits({name}_out, tile, n, {name}_packed)" for name in self._trits()))

    def _run(self, kernel: Kernel) -> None:
        kernel.launch(f"chunks({self.count}{f', {self.chunk}' if self.chunk > CHUNK else ''})")

    def _close(self, fields: list[Field]) -> None:
        for each in fields:
            if has_tail(each.dtype):
                name, dtype = each.variable, each.dtype
                self.lines.add(f"pack_rest({name}_tail, {name}_out, {self.count}, {dtype.per_byte}, {dtype.chunk})")


class TritonElementSweep(_Sweep):
    """Emits one sweep over the gradient."""

    def emit(self) -> None:
        f, step = self.f, self.step
        packs = [each for each in step.packs if each.node.space.kind == "elements"]
        if step.block_nodes:
            self._reduce_blocks()
        self.is_first = step.compensates and not step.block_sinks
        residual = ["the residual"] * step.residual
        title = self._title(step.sinks, packs, residual)
        self.lines.forget()
        self.lines.add("", f"# Sweep over the gradient: {title}.")
        if step.residual:
            with f.as_receiver():
                f.decode_scalars()
        kernel = f.kernel(f"Sweep over the gradient: {title}.")
        self._open(kernel, packs)
        self._begin_planes(kernel)
        self._read(kernel, stores=not step.residual)
        kernel.shared([*(each for node in step.sinks for each in node.inputs), *(each.node for each in packs)])
        emissions = self._sinks(kernel, step.sinks, "chunks(n)")
        for each in packs:
            self._pack(kernel, each)
        if step.residual:
            self._residual(kernel)
        self._end_planes(kernel)
        self._run(kernel)
        self._close(packs)
        f.stored = f.stored or self.is_first
        for node, emission in zip(step.sinks, emissions):
            self._finish(node, emission)

    def _read(self, kernel: Kernel, stores: bool) -> None:
        """Read the elements. The first sweep stores them and checks that they are finite."""
        self.f.read(kernel)
        if self.is_first:
            kernel.take("watch")
            kernel.lines.add("watch_for_nonfinite(watch, x)")
            if stores:
                kernel.take("residual_out")
                kernel.lines.add("if residual_out is not None:", "    tl.store(residual_out + i, x, mask=inside)")

    def _residual(self, kernel: Kernel) -> None:
        f, lines, output = self.f, kernel.lines, self.program.output
        kernel.take("residual_out")
        before = dict(kernel.known)
        with f.as_receiver(), lines.block("if residual_out is not None:"):
            lines.forget()
            lines.say(output.where)
            kernel.shared([output])
            lines.add(f"decoded = {kernel.decoded(output)}", "tl.store(residual_out + i, x - decoded, mask=inside)")
        kernel.known = before

    def _finish(self, node: Node, emission: DeviceEmission) -> None:
        """Finish a sink on the host; for lists, with a second kernel over the same elements."""
        name = self.f.names[id(node)]
        self.lines.say(node.where)
        self.lines.add(*emission.after)
        if emission.again:
            kernel = self.f.kernel(f"Sweep over the gradient: write the list {name}.")
            self.f.read(kernel)
            kernel.shared(node.inputs)
            self._sink(kernel, node)
            kernel.lines.add(*emission.again)
            kernel.take(*emission.outputs)
            kernel.launch("chunks(n)")

    # -- blocks ----------------------------------------------------------------------------------------------

    def _reduce_blocks(self) -> None:
        """Compute block values, with one program per block, or per chunk of a large block."""
        f, step, lines = self.f, self.step, self.lines
        block = step.block_nodes[0].space.block
        lines.forget()
        lines.add("", f"# Blocks of {block}: {self._title(step.block_nodes, [], [])}.")
        lines.add(f"blocks = ceil_div(n, {block})")
        if step.block_sinks:
            self._block_kernel(block)
        for node in step.block_values:
            name = f.names[id(node)]
            kernel = f.kernel(f"Compute {name} of each block.", "b", "blocks")
            kernel.lines.say(node.where)
            kernel.give(f"{name}_out", name)
            kernel.lines.add(f"tl.store({name}_out + b, {kernel.lanes(node)}, mask=inside)")
            lines.say(node.where)
            lines.add(f"{name} = empty(blocks, torch.float32, grad)")
            kernel.launch("chunks(blocks)")
            f.stored_blocks.add(id(node))

    def _block_kernel(self, block: int) -> None:
        f, step, lines = self.f, self.step, self.lines
        lanes = max(_LEAST_LANES, min(_MOST_LANES, 1 << (block - 1).bit_length()))
        per_block = -(-block // lanes)
        kernel = f.kernel(f"Reduce blocks of {block}.")
        kernel.is_group = False
        kernel.lines.lines.clear()
        kernel.lines.add("block = tl.program_id(0).to(tl.int64)")
        start = f"block * {block}" + (f" + tl.program_id(1) * {lanes}" if per_block > 1 else "")
        kernel.lines.add(f"chunk = block * {per_block} + tl.program_id(1)" if per_block > 1 else "chunk = block")
        kernel.lines.add(f"i = {start} + tl.arange(0, {lanes})", f"inside = (i < n) & (i < (block + 1) * {block})")
        self.is_first = step.compensates
        self._read(kernel, stores=True)
        kernel.shared(each for node in step.block_sinks for each in node.inputs)
        emissions = self._sinks(kernel, step.block_sinks, f"(blocks, {per_block})")
        kernel.launch(f"blocks, {per_block}" if per_block > 1 else "blocks")
        f.stored = f.stored or self.is_first
        for node, emission in zip(step.block_sinks, emissions):
            name = f.names[id(node)]
            lines.say(node.where)
            lines.add(*emission.after, f"{name} = narrowed({name})")
            f.stored_blocks.add(id(node))


class TritonItemSweep(_Sweep):
    """Emits one sweep over a list."""

    def emit(self) -> None:
        f, step = self.f, self.step
        source = step.space.source
        assert source is not None
        self.count = f"{f.names[id(source)]}_count"
        packs = [each for each in step.packs if each.node.op not in ("index", "value")]
        if not packs and not step.sinks:
            return
        title = self._title(step.sinks, packs, [])
        self.lines.add("", f"# Sweep over the list: {title}.")
        kernel = f.kernel(f"Sweep over the list: {title}.", count=self.count)
        self._open(kernel, packs)
        self._begin_planes(kernel)
        load_items(kernel, source)
        kernel.shared([*(each for node in step.sinks for each in node.inputs), *(each.node for each in packs)])
        emissions = self._sinks(kernel, step.sinks, f"chunks({self.count})")
        for each in packs:
            self._pack(kernel, each)
        self._end_planes(kernel)
        self._run(kernel)
        self._close(packs)
        for node, emission in zip(step.sinks, emissions):
            self.lines.say(node.where)
            self.lines.add(*emission.after)


def _named(lines: Lines, name: str, value: str) -> str:
    """A variable that holds a value; the value itself if it is a variable."""
    if value.isidentifier():
        return value
    lines.add(f"{name} = {value}")
    return name


def _stored(value: str, dtype: str) -> str:
    """A value converted to the type of its array."""
    if dtype == "bfloat16":
        return f"bfloat16_bits({value})"
    if dtype == "float32":
        return value
    if dtype == "float16":
        return f"{value}.to(tl.float16)"
    return f"{value}.to(tl.int32)" + ("" if dtype == "int32" else f".to(tl.{dtype})")
