"""The encoder as Triton and torch source: kernels, and the host function that launches them in order."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.lang.emit import Lines
from gradwire.lang.interpret import is_stat
from gradwire.lang.ir import ELEMENTS, Field, Node, Program, closure
from gradwire.lang.operators.base import coding_of
from gradwire.lang.passes import Assign, SubtractItems, Sweep, schedule
from gradwire.lang.targets.triton.encode_function import TritonEncodeFunction, load_items
from gradwire.lang.targets.triton.expressions import num_bytes
from gradwire.lang.targets.triton.sweep import TritonElementSweep, TritonItemSweep


class TritonEncoder(TritonEncodeFunction):
    """Emits `encode`."""

    def encode(self) -> str:
        """The source of `encode` and of its kernels."""
        lines = self._begin("encode(grad, scale, residual_in, residual_out, stats, keys, first, static)")
        self._make_body()
        for step in schedule(self.program):
            if isinstance(step, Assign):
                self._assign(step.node)
            elif isinstance(step, SubtractItems):
                self._subtract()
            elif step.space == ELEMENTS:
                TritonElementSweep(self, step).emit()
            else:
                TritonItemSweep(self, step).emit()
        lines.add("", "if watch.item():", "    return None")
        self._finish_body()
        return self.source(str(lines))

    def measure(self) -> str:
        """The source of `measure`: the encoder up to the values of the preliminary round."""
        lines = self._begin("measure(grad, scale, residual_in, keys, first, static)")
        lines.add("residual_out = stats = None")
        needed = {id(node) for node in closure([node.inputs[0] for node in self.program.stats])}
        for step in schedule(self.program):
            if isinstance(step, Assign) and id(step.node) in needed:
                self._assign(step.node)
            elif isinstance(step, Sweep) and (step.compensates or any(id(node) in needed for node in step.sinks)):
                sinks = [node for node in step.sinks if id(node) in needed]
                only = Sweep(step.space, sinks, compensates=step.compensates)
                (TritonElementSweep if step.space == ELEMENTS else TritonItemSweep)(self, only).emit()
        own = ", ".join(f"narrow({self.scalar(node.inputs[0])})" for node in self.program.stats)
        lines.add("", f"values = torch.stack([{own}]).to(torch.float32)")
        lines.add("return torch.where(watch > 0, torch.inf, values)")
        return self.source(str(lines))

    def _begin(self, signature: str) -> Lines:
        lines = self.lines
        lines.add(f"def {signature}:")
        lines.indent = 1
        lines.add("grad, watch = as_elements(grad), flag(grad)", "n = grad.numel()")
        if self.static:
            lines.add("static = static.tolist()")
        return lines

    # -- scalars and lists -----------------------------------------------------------------------------------

    def _assign(self, node: Node) -> None:
        name, lines = self.names[id(node)], self.lines
        if node.op == "over_ranks":
            lines.say(node.where)
            position = [id(each) for each in self.program.stats].index(id(node))
            lines.add("if stats is None:", f"    {name} = narrow({self.scalar(node.inputs[0])})", "else:")
            lines.add(f"    {name} = stats[{position}].to(torch.float64)")
            lines.add("    watch |= (~torch.isfinite(stats)).any().to(torch.int32)")
        elif node.op == "sample":
            self._sample(node, name)
        else:
            self.assign(node)
            if node.op in ("sort", "top"):
                lines.add(f"{name}_count = {name}{'_value' if node.op == 'top' else ''}.numel()")

    def _listed(self, node: Node, name: str) -> None:
        """Write the decoded items of a list to memory."""
        count = self.count(node)
        kernel = self.kernel(f"Compute {name} of the items of a list.", count=count)
        load_items(kernel, node)
        kernel.lines.say(node.where)
        kernel.give(f"{name}_out", name)
        kernel.shared([node])
        kernel.lines.add(f"tl.store({name}_out + i, {kernel.decoded(node)}, mask=inside)")
        self.lines.add(f"{name} = empty({count}, torch.float32, grad)")
        kernel.launch(f"chunks({count})")

    def _sample(self, node: Node, name: str) -> None:
        lines = self.lines
        lines.say(node.where)
        lines.add(f"{name}_count = min(n, max(int({self.scalar(node.inputs[1])}), 1))")
        lines.add(f"{name} = empty({name}_count, torch.float32, grad)")
        kernel = self.kernel(f"Draw {name}.", "j", f"{name}_count")
        kernel.at, kernel.is_group = "i", False
        kernel.give("num_elements", "n")
        kernel.give("key_low", "*sample_words(keys)")
        kernel.give("key_high", "")
        kernel.lines.add("i = sample_position(j, n, num_elements, key_low, key_high)")
        self.read(kernel)
        kernel.give(f"{name}_out", name)
        kernel.lines.say(node.where)
        kernel.lines.add(f"tl.store({name}_out + j, {kernel.lanes(node.inputs[0])}, mask=inside)")
        kernel.launch(f"chunks({name}_count)")

    def _subtract(self) -> None:
        """Subtract the decoded values of a list from the gradient."""
        output, lines = self.program.output, self.lines
        lines.forget()
        lines.add("", "# The residual: the gradient less what the list carries.")
        with self.as_receiver(), lines.block("if residual_out is not None:"):
            values, index = self.resolved(output.inputs[0]), self.resolved(output.inputs[1])
            self.decode_scalars()
            lines.say(output.where)
            count, list_name = self.count(index), self.list_name(index)
            if values.op == "value":
                lines.add(f"sent = {self.list_name(values)}")
            else:
                self._listed(output.inputs[0], "sent")
            lines.add(f"launch(add_at, (chunks({count}),), {list_name}, sent, {count}, residual_out, n, -1.0, watch)")

    # -- the payload -----------------------------------------------------------------------------------------

    def _arrays(self) -> list[Field]:
        return [each for each in self.program.fields if each.is_array]

    def _make_body(self) -> None:
        """Allocate the body, if its length is known."""
        self.lines.add(*scalar_size(self.program))
        if self.is_list:
            return
        self.lines.add(*places_of(self._arrays(), self.field_count))
        self.lines.add("body = empty(body_bytes, torch.uint8, grad)")

    def _finish_body(self) -> None:
        lines, program = self.lines, self.program
        scalars = [each for each in program.fields if not each.is_array]
        names = [self.names[id(each.node)] for each in scalars]
        if any(is_stat(program, each) for each in scalars):
            kept = [self.names[id(each.node)] for each in scalars if not is_stat(program, each)]
            lines.add(f"scalars = [{', '.join(names)}] if stats is None else [{', '.join(kept)}]")
            names = ["*scalars"]
        own = [f"scalar_bytes({', '.join(names)})"] if names else []
        if self.is_list:
            assert program.items is not None and program.items.source is not None
            own.append(f"length_bytes({self.names[id(program.items.source)]}_count, grad)")
            arrays = [each for each in self._arrays() if not each.is_positions]
            parts = own + [f"as_bytes({self._array(each)})" for each in arrays]
            parts += [f"pack_positions({self._array(each)}, n)" for each in self._arrays() if each.is_positions]
            lines.add(f"return torch.cat([{', '.join(parts)}])")
            return
        if own:
            lines.add(f"body[:scalars_bytes] = {own[0]}")
        for each in self._arrays():
            if each.node.space.kind == "blocks":
                name = each.variable
                lines.add(f"body[{name}_at : {name}_at + {name}_bytes] = as_bytes({self._array(each)})")
        last, body = program.fields[-1], "body"
        if last.coding is not None:
            lines.say(last.coding.where)
            body = coding_of(last).triton_shorten(body, f"{last.variable}_at")
        lines.add(f"return {body}")

    def _array(self, each: Field) -> str:
        if each.node.op in ("index", "value"):
            return self.list_name(each.node)
        return self.names[id(each.node)] if each.node.space.kind == "blocks" else f"{each.variable}_out"


def scalar_size(program: Program) -> list[str]:
    """Set `scalars_bytes`, the bytes of scalars and of the length of lists."""
    scalars = [each for each in program.fields if not each.is_array]
    own = sum(is_stat(program, each) for each in scalars)
    most = 4 * (len(scalars) + (program.items is not None))
    return [f"scalars_bytes = {most} if stats is None else {most - 4 * own}" if own else f"scalars_bytes = {most}"]


def places_of(arrays: list[Field], count: Callable[[Field], str]) -> list[str]:
    """Set the places of arrays in a body, their lengths, and the length of the body."""
    lines, at = [], "scalars_bytes"
    for each in arrays:
        name = each.variable
        lines.append(f"{name}_at, {name}_bytes = {at}, {num_bytes(each, count(each))}")
        at = f"{name}_at + {name}_bytes"
    return [*lines, f"body_bytes = {at}"]
