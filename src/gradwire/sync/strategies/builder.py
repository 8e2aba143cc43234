"""The builder: what strategies are written in. It adds primitives for one item to its graph.

A strategy says who sends which range to whom; the builder turns that into tasks and frames, and a `PartCodec` knows
how a range is encoded, merged and decoded.
"""

# Shapes: W = ranks.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gradwire.compressors.base.registry import code
from gradwire.core.events import Event, EventStream
from gradwire.core.spec import ELEMENT_TYPES
from gradwire.net.transport import Transport
from gradwire.residuals.transaction import Residuals
from gradwire.sync.codec import DENSE, LossyCodec, make_codec
from gradwire.sync.engine import ReceivedFrame
from gradwire.sync.fusion import FusionCodec, FusionGroup
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.sync.nodes import Nodes
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header


@dataclass
class Runtime:
    """What is the same for every job of a synchronizer.

    Attributes:
        transport: Carries the frames.
        residuals: The residuals of this rank.
        events: Where metrics go.
        seed: Seed of all random streams.
        nodes: Gives the ranks of each node; None where every rank is a node.
        services: Connections of strategies that need more than the ranks, by the strategy's name.
    """

    transport: Transport
    residuals: Residuals
    events: EventStream
    seed: int
    nodes: Callable[[], Nodes] | None = None
    services: dict[str, Any] = field(default_factory=dict)


class Builder:
    """Adds the primitives of one item to its graph.

    Args:
        item: what is synchronized; a bundle of items travels by all-gather or scatter-reduce only.
        graph: where the tasks go.
        around: transport, residuals and the constants of the job.
    """

    def __init__(self, item: TensorJob | FusionGroup, graph: TaskGraph, around: Runtime) -> None:
        self.item = item
        self.graph = graph
        self.rank = around.transport.rank
        self.world_size = around.transport.world_size
        self._transport = around.transport
        self._events = around.events
        self._codec = self._make_codec(around)
        self._find_nodes = around.nodes
        self._sums: dict[int, tuple[Task, list[int]]] = {}  # by part: what makes the node's sum, and who has one

    def _make_codec(self, around: Runtime) -> LossyCodec:
        constants = around.residuals, self.rank, self.world_size, around.seed
        if isinstance(self.item, FusionGroup):
            return cast(LossyCodec, FusionCodec(self.item, *constants))
        return make_codec(self.item, *constants)

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all send to one rank at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def nodes(self) -> Nodes:
        """The ranks of each node."""
        return tuple((rank,) for rank in range(self.world_size)) if self._find_nodes is None else self._find_nodes()

    def arrived(self) -> None:
        """Take note that the item holds the mean."""
        self._codec.arrived()

    # -- the five primitives ---------------------------------------------------------------------------------

    def start(self, part: Chunk, phase: str) -> Task:
        """Encode this rank's own gradient of `part`, or its node's sum: the first stage of every path."""
        return self.graph.add("encode", phase, lambda: self._codec.start(part), self._inputs(part, True))

    def merge(self, part: Chunk, messages: Sequence[Task], stage: int, phase: str) -> Task:
        """Decode what arrived, add this rank's own gradient, or its node's sum, and encode the total again."""

        def run() -> EncodedChunk:
            return self._codec.merge(part, [message_of(task) for task in messages], stage)

        return self.graph.add("merge", phase, run, [*messages, *self._inputs(part, self._codec.encodes_own(stage))])

    def decode(self, part: Chunk, message: Task, stage: int, phase: str, after: Sequence[Task] = ()) -> Task:
        """Write the mean of `part` over the gradient, once `after` has no more use for that."""
        return self.graph.add(
            "decode", phase, lambda: self._codec.decode(part, message_of(message), stage), [message, *after]
        )

    def decode_sum(self, part: Chunk, messages: Sequence[Task], phase: str) -> Task:
        """Write the sum of all ranks' messages, in rank order, over the gradient."""
        return self.graph.add(
            "decode",
            phase,
            lambda: self._codec.decode_sum(part, [message_of(task) for task in messages]),
            messages,
        )

    def send(self, message: Task, peer: int, part: Chunk, stage: int, phase: str) -> Task:
        """Send what `message` holds, made here or arrived, to `peer`."""
        name = self.item.entry.compressor.name
        return self._add_send(message, peer, part, stage, phase, name)

    def recv(self, peer: int, part: Chunk, stage: int, phase: str) -> Task:
        """Wait for the frame of one range."""
        return self._recv(peer, self._codec.kind(stage), part, stage, phase)

    # -- dense within a node ---------------------------------------------------------------------------------

    def encode_from(self, stage: int, among: int) -> None:
        """Encode from `stage` on only, what `among` ranks have of each range; before it ranges travel dense."""
        self._codec.encode_from(stage, among)

    def dense(self, part: Chunk, phase: str) -> Task:
        """Take this rank's gradient of `part`, not compressed."""
        return self.graph.add("encode", phase, lambda: self._codec.dense(part))

    def add_up(self, part: Chunk, messages: Sequence[Task], members: list[int], phase: str = "merge reduce") -> Task:
        """Add this rank's gradient to what its node's other ranks sent dense.

        From then on the sum stands for this rank's gradient of `part`; `members` are the ranks that have such sums.
        """
        run = lambda: self._codec.add_up(part, [message_of(task) for task in messages])  # noqa: E731
        task = self.graph.add("merge", phase, run, messages)
        self._sums[part.index] = task, members
        return task

    def spread(self, part: Chunk, mean: Task, decoded: Task, phase: str) -> Task:
        """The mean of `part`, which `mean` carries and `decoded` has written, not compressed."""
        return self.graph.add("encode", phase, lambda: self._codec.spread(part, message_of(mean)), [mean, decoded])

    def place(self, part: Chunk, message: Task, phase: str, after: Sequence[Task] = ()) -> Task:
        """Write the mean of `part`, which arrived dense, over the gradient, once `after` has no more use for that."""
        return self.graph.add("decode", phase, lambda: self._codec.place(part, message_of(message)), [message, *after])

    def send_dense(self, message: Task, peer: int, part: Chunk, stage: int, phase: str) -> Task:
        """Send what `dense` or `spread` made to `peer`."""
        return self._add_send(message, peer, part, stage, phase, DENSE.name)

    def recv_dense(self, peer: int, part: Chunk, stage: int, phase: str) -> Task:
        """Wait for the frame of one range, not compressed."""
        return self._recv(peer, FrameKind.PAYLOAD, part, stage, phase)

    # -- the preliminary round -------------------------------------------------------------------------------

    def _inputs(self, part: Chunk, encoded: bool) -> list[Task]:
        """The tasks after which this rank can encode, or add, what it has of `part`."""
        sums = [self._sums[part.index][0]] if part.index in self._sums else []
        return [*sums, *self._preliminary(part, encoded)]

    def _preliminary(self, part: Chunk, encoded: bool) -> list[Task]:
        """For compressors that need them: the task after which the reduced statistics of `part` are there.

        Args:
            encoded: whether this rank encodes its gradient of the part, or only adds it.
        """
        if not self.item.entry.compressor.needs_stats:
            return []
        after, members, stage = [], list(range(self.world_size)), self._codec.first
        if part.index in self._sums:
            task, members = self._sums[part.index]
            after = [task]
        mine = self.graph.add("encode", "encode stats", lambda: self._codec.stats(part, encoded), after)
        messages = {self.rank: mine}
        for peer in (peer for peer in self.peers if peer in members):
            self.send(mine, peer, part, stage, "send stats")
            messages[peer] = self._recv(peer, FrameKind.STATS, part, stage, "recv stats")
        ordered = [messages[rank] for rank in members]
        reduce = self.graph.add(
            "merge",
            "merge stats",
            lambda: self._codec.reduce_stats(part, [message_of(task) for task in ordered]),
            ordered,
        )
        return [reduce]

    # -- frames ----------------------------------------------------------------------------------------------

    def _recv(self, peer: int, kind: FrameKind, part: Chunk, stage: int, phase: str) -> Task:
        return self.graph.recv(phase, FrameKey(peer, kind, self.item.round, self.item.tensor, stage, part.index))

    def _add_send(self, message: Task, peer: int, part: Chunk, stage: int, phase: str, compressor: str) -> Task:
        def run() -> None:
            self._send(peer, message_of(message), part, stage, compressor)

        return self.graph.add("send", phase, run, [message], peer)

    def _send(self, peer: int, message: EncodedChunk, part: Chunk, stage: int, compressor: str) -> None:
        item = self.item
        header = Header(
            message.kind,
            compressor=code(compressor),
            flags=message.flags,
            sender=self.rank,
            stage=stage,
            dtype=ELEMENT_TYPES[item.dtype],
            epoch=self._transport.epoch,
            round=item.round,
            tensor=item.tensor,
            partition=part.index,
            offset=item.offset + part.offset,
            count=part.count,
        )
        start = time.monotonic()
        self._transport.send(peer, header, message.body)
        nbytes = HEADER_BYTES + message.body.nbytes
        self._events.emit(Event("send", start, time.monotonic() - start, item.name, item.round, nbytes, peer))


def message_of(task: Task) -> EncodedChunk:
    """The encoded chunk that a task made, or that arrived for it."""
    value = task.value
    if isinstance(value, ReceivedFrame):
        return EncodedChunk(value.header.kind, value.header.flags, value.body, value.header.sender)
    assert isinstance(value, EncodedChunk), f"{task.phase} gave no message"
    return value
