"""From a program to sweeps over memory, by passes that each do one thing.

`lower` makes a sweep of every reduction, filter and packed array: maps have no sweep of their own, they are computed
where they are needed (*map into pack*). Then each pass of `ENCODE_PASSES` takes the list of steps and gives another:

- `merge_reductions`: reductions and filters that can be known at the same time share a sweep;
- `merge_packs`: all arrays of the payload are packed in one sweep;
- `fuse_blocks`: a block is reduced and packed while it is in the cache;
- `update_residual`: what the decoder will make of the payload is taken from the gradient as it is packed, so that
  the residual is there when the payload is;
- `compensate_first`: the first sweep adds the residual to the gradient as it reads it.

Two more need no list of steps: a decoder writes or adds (*decode into accumulate*) and takes one payload or those of
all ranks (*decode of many ranks in one sweep*), and many small tensors go through one call (*batching*): emitters make
a function of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.kernels.layout import SUM_LANES as LANES
from gradwire.lang.ir import ELEMENTS, Field, Node, Program, Space, closure
from gradwire.lang.operators.base import Sink, Statement, lookup


@dataclass
class Sweep:
    """A pass over memory.

    Attributes:
        space: over the elements of the gradient, or the items of a list.
        sinks: reductions and filters it feeds.
        packs: fields of the payload it packs.
        block_sinks: reductions of a block that precede the rest of the sweep block by block.
        block_values: other nodes with one value a block, in order.
        residual: whether it writes the residual.
        compensates: whether it is the first to read the gradient, so that it adds the old residual.
    """

    space: Space
    sinks: list[Node] = field(default_factory=list)
    packs: list[Field] = field(default_factory=list)
    block_sinks: list[Node] = field(default_factory=list)
    block_values: list[Node] = field(default_factory=list)
    residual: bool = False
    compensates: bool = False

    @property
    def block_nodes(self) -> list[Node]:
        """All nodes with one value a block."""
        return [*self.block_sinks, *self.block_values]

    @property
    def cut_by(self) -> int:
        """Elements a block, where blocks end within vectors; else 0."""
        block = self.block_nodes[0].space.block if self.block_nodes else 0
        return block if block % LANES else 0

    @property
    def roots(self) -> list[Node]:
        """The nodes whose values it needs."""
        inputs = [each for node in (*self.sinks, *self.block_sinks) for each in node.inputs]
        return [*inputs, *(each.node for each in self.packs)]


@dataclass
class Assign:
    """A scalar or a list that is made between sweeps."""

    node: Node


@dataclass
class SubtractItems:
    """The residual of a list: the gradient less what was sent, at its positions."""


Step = Sweep | Assign | SubtractItems


def lower(program: Program) -> list[Step]:
    """One step for each node that is not a map."""
    steps: list[Step] = []
    for node in program.encode_nodes():
        if isinstance(lookup(node.op), Sink):
            steps.append(Sweep(_swept(node.inputs[0].space), [node]))
        elif node.space.kind == "scalar" or node.op == "sample" or isinstance(lookup(node.op), Statement):
            steps.append(Assign(node))
        elif node.space.kind == "blocks":
            steps.append(Sweep(ELEMENTS, block_values=[node]))
    for each in program.fields:
        if each.is_array:
            steps.append(Sweep(_swept(each.node.space), packs=[each]))
    return steps


def _swept(space: Space) -> Space:
    return ELEMENTS if space.kind == "blocks" else space


def merge_reductions(program: Program, steps: list[Step]) -> list[Step]:
    """Give each reduction to the earliest sweep over the same space at which all it needs is known.

    So that it is known early, a scalar is computed as soon as what it needs is there.
    """
    made: list[Step] = []
    for step in steps:
        if isinstance(step, Assign) and step.node.space.kind == "scalar":
            made.insert(_known_after(list(step.node.inputs), made), step)
            continue
        host = _earliest_host(step, made) if isinstance(step, Sweep) and step.sinks else None
        if host is None:
            made.append(step)
        else:
            assert isinstance(step, Sweep)
            host.sinks += step.sinks
    return made


def _earliest_host(step: Sweep, made: list[Step]) -> Sweep | None:
    if any(node.attrs.get("block") for node in step.sinks):
        return None
    for other in made[_known_after(step.roots, made) :]:
        if isinstance(other, Sweep) and other.sinks and other.space == step.space and not _is_block(other):
            return other
    return None


def _known_after(roots: list[Node], made: list[Step]) -> int:
    """How many of the steps must be done before all that these nodes depend on is known."""
    needs = {id(node) for node in closure(roots)}
    return max((position + 1 for position, other in enumerate(made) if needs & _made_by(other)), default=0)


def _made_by(step: Step) -> set[int]:
    if isinstance(step, Assign):
        return {id(step.node)}
    if isinstance(step, Sweep):
        return {id(node) for node in (*step.sinks, *step.block_sinks, *step.block_values)}
    return set()


def merge_packs(program: Program, steps: list[Step]) -> list[Step]:
    """Pack the arrays of a space in one sweep."""
    made: list[Step] = []
    hosts: dict[Space, Sweep] = {}
    for step in steps:
        if isinstance(step, Sweep) and step.packs:
            if step.space in hosts:
                hosts[step.space].packs += step.packs
                continue
            hosts[step.space] = step
        made.append(step)
    return made


def fuse_blocks(program: Program, steps: list[Step]) -> list[Step]:
    """Move what is known a block at a time into the sweep that uses it."""
    blocks = [s for s in steps if isinstance(s, Sweep) and (s.block_values or _is_block(s))]
    if not blocks:
        return steps
    made = [step for step in steps if step not in blocks]
    users = [s for s in made if isinstance(s, Sweep) and s.space == ELEMENTS and _uses_blocks(s)]
    if not users:  # the values of blocks are all that is sent
        users = [Sweep(ELEMENTS)]
        made.append(users[0])
    assert len(users) == 1, "one sweep uses what blocks give"
    for step in blocks:
        users[0].block_sinks += step.sinks
        users[0].block_values += step.block_values
    return made


def _is_block(step: Sweep) -> bool:
    return any(node.space.kind == "blocks" for node in step.sinks)


def _uses_blocks(step: Sweep) -> bool:
    return any(node.space.kind == "blocks" for node in closure(step.roots))


def update_residual(program: Program, steps: list[Step]) -> list[Step]:
    """Let the last sweep over elements write the residual; of lists, subtract what they carry."""
    if program.output.op == "scatter":
        return [*steps, SubtractItems()]
    last = [step for step in steps if isinstance(step, Sweep) and step.space == ELEMENTS]
    if not last or not last[-1].packs:
        steps = [*steps, Sweep(ELEMENTS)]
        last = [steps[-1]]  # type: ignore[list-item]
    last[-1].residual = True
    return steps


def compensate_first(program: Program, steps: list[Step]) -> list[Step]:
    """Let the first sweep over elements add the old residual, and look for what is not finite."""
    first = next((step for step in steps if isinstance(step, Sweep) and step.space == ELEMENTS), None)
    if first is None:
        first = Sweep(ELEMENTS)
        steps = [first, *steps]
    first.compensates = True
    return steps


ENCODE_PASSES: tuple[Callable[[Program, list[Step]], list[Step]], ...] = (
    merge_reductions,
    merge_packs,
    fuse_blocks,
    update_residual,
    compensate_first,
)


def schedule(program: Program) -> list[Step]:
    """The steps of an encoder, after all passes."""
    steps = lower(program)
    for run in ENCODE_PASSES:
        steps = run(program, steps)
    return steps
