"""From a program to sweeps over memory.

`lower` makes a sweep of every reduction, filter and packed array. Maps get no sweep: they are computed where they are
used (*map into pack*). Then each pass of `ENCODE_PASSES` turns a list of steps into another:

- `merge_reductions`: reductions and filters that can be computed at the same time share a sweep.
- `merge_packs`: one sweep packs all arrays of the payload.
- `fuse_blocks`: a block is reduced and packed while it is in the cache.
- `update_residual`: the sweep that packs also subtracts what the decoder will produce, so the residual is complete when
  the payload is.
- `compensate_first`: the first sweep adds the old residual to the gradient.

Emitters fuse the rest: decoders that write or add (*decode into accumulate*), and decoders of the payloads of all ranks
in one sweep.
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
        space: Elements of the gradient, or items of a list.
        sinks: Reductions and filters it feeds.
        packs: Fields of the payload it packs.
        block_sinks: Reductions of blocks, done block by block before the rest of the sweep.
        block_values: Other nodes with one value per block, in order.
        residual: Whether it writes the residual.
        compensates: Whether it is the first to read the gradient and adds the old residual.
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
        """All nodes with one value per block."""
        return [*self.block_sinks, *self.block_values]

    @property
    def cut_by(self) -> int:
        """Elements per block if blocks may end within a vector, else 0."""
        block = self.block_nodes[0].space.block if self.block_nodes else 0
        return block if block % LANES else 0

    @property
    def roots(self) -> list[Node]:
        """Nodes whose values it needs."""
        inputs = [each for node in (*self.sinks, *self.block_sinks) for each in node.inputs]
        return [*inputs, *(each.node for each in self.packs)]


@dataclass
class Assign:
    """A scalar or a list computed between sweeps."""

    node: Node


@dataclass
class SubtractItems:
    """The residual of a list: subtract the values sent, at their positions."""


Step = Sweep | Assign | SubtractItems


def lower(program: Program) -> list[Step]:
    """One step for each node except maps."""
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
    """Move each reduction to the earliest sweep over the same space at which its inputs are known.

    Scalars are computed as early as possible for the same reason.
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
    """Number of steps that must be done before everything these nodes depend on is known."""
    needs = {id(node) for node in closure(roots)}
    return max((position + 1 for position, other in enumerate(made) if needs & _made_by(other)), default=0)


def _made_by(step: Step) -> set[int]:
    if isinstance(step, Assign):
        return {id(step.node)}
    if isinstance(step, Sweep):
        return {id(node) for node in (*step.sinks, *step.block_sinks, *step.block_values)}
    return set()


def merge_packs(program: Program, steps: list[Step]) -> list[Step]:
    """Pack all arrays of a space in one sweep."""
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
    """Move values of blocks into the sweep that uses them."""
    blocks = [s for s in steps if isinstance(s, Sweep) and (s.block_values or _is_block(s))]
    if not blocks:
        return steps
    made = [step for step in steps if step not in blocks]
    users = [s for s in made if isinstance(s, Sweep) and s.space == ELEMENTS and _uses_blocks(s)]
    if not users:  # only values of blocks are sent
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
    """Let the last sweep over elements write the residual. For lists, subtract the values sent."""
    if program.output.op == "scatter":
        return [*steps, SubtractItems()]
    last = [step for step in steps if isinstance(step, Sweep) and step.space == ELEMENTS]
    if not last or not last[-1].packs:
        steps = [*steps, Sweep(ELEMENTS)]
        last = [steps[-1]]  # type: ignore[list-item]
    last[-1].residual = True
    return steps


def compensate_first(program: Program, steps: list[Step]) -> list[Step]:
    """Let the first sweep over elements add the old residual and check that elements are finite."""
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
    """Steps of the encoder after all passes."""
    steps = lower(program)
    for run in ENCODE_PASSES:
        steps = run(program, steps)
    return steps
