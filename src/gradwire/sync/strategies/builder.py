"""The builder: what strategies are written in. It adds primitives for one item to its graph.

A strategy says who sends which range to whom; the builder turns that into tasks and frames, and a `PartCodec` knows
how a range is encoded, merged and decoded.
"""

# Shapes: W = ranks.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

from gradwire.compressors.base.registry import code
from gradwire.core.events import Event, EventStream
from gradwire.core.spec import ELEMENT_TYPES
from gradwire.feedback.residuals import Residuals
from gradwire.protocol.aggregation.interface import Reply
from gradwire.sync.aggregator import Service
from gradwire.sync.bundle import Bundle, BundleCodec
from gradwire.sync.codec import DENSE, LossyCodec, make_codec
from gradwire.sync.engine import Arrival
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.sync.item import Item, Message, Part
from gradwire.sync.nodes import Nodes
from gradwire.sync.plan import SERVER
from gradwire.sync.served import ServedCodec
from gradwire.transport.base import Transport
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header


@dataclass
class Surroundings:
    """What is the same for every item of a synchroniser. Without `nodes`, every rank is a node.

    `service` is the line to the aggregator, for items that travel by it.
    """

    transport: Transport
    residuals: Residuals
    events: EventStream
    seed: int
    nodes: Callable[[], Nodes] | None = None
    service: Service | None = None


class Builder:
    """Adds the primitives of one item to its graph.

    Args:
        item: what is synchronised; a bundle of items travels by all-gather or scatter-reduce only.
        graph: where the tasks go.
        around: transport, residuals and the constants of the job.
    """

    def __init__(self, item: Item | Bundle, graph: TaskGraph, around: Surroundings) -> None:
        self.item = item
        self.graph = graph
        self.rank = around.transport.rank
        self.world_size = around.transport.world_size
        self._transport = around.transport
        self._events = around.events
        constants = around.residuals, self.rank, self.world_size, around.seed
        if isinstance(item, Bundle):
            self._codec = cast(LossyCodec, BundleCodec(item, *constants))
        elif item.entry.strategy == SERVER:
            assert around.service is not None, "connected before anything is submitted"
            self._codec = ServedCodec(item, around.service, *constants)
        else:
            self._codec = make_codec(item, *constants)
        self._find_nodes = around.nodes
        self._service = around.service
        self._sums: dict[int, tuple[Task, list[int]]] = {}  # by part: what makes the node's sum, and who has one

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

    def start(self, part: Part, phase: str) -> Task:
        """Encode this rank's own gradient of `part`, or its node's sum: the first stage of every path."""
        return self.graph.add("encode", phase, lambda: self._codec.start(part), self._inputs(part, True))

    def merge(self, part: Part, messages: Sequence[Task], stage: int, phase: str) -> Task:
        """Decode what arrived, add this rank's own gradient, or its node's sum, and encode the total again."""

        def run() -> Message:
            return self._codec.merge(part, [_message(task) for task in messages], stage)

        return self.graph.add("merge", phase, run, [*messages, *self._inputs(part, self._codec.encodes_own(stage))])

    def decode(self, part: Part, message: Task, stage: int, phase: str, after: Sequence[Task] = ()) -> Task:
        """Write the mean of `part` over the gradient, once `after` has no more use for that."""
        return self.graph.add(
            "decode", phase, lambda: self._codec.decode(part, _message(message), stage), [message, *after]
        )

    def decode_sum(self, part: Part, messages: Sequence[Task], phase: str) -> Task:
        """Write the sum of all ranks' messages, in rank order, over the gradient."""
        return self.graph.add(
            "decode",
            phase,
            lambda: self._codec.decode_sum(part, [_message(task) for task in messages]),
            messages,
        )

    def send(self, message: Task, peer: int, part: Part, stage: int, phase: str) -> Task:
        """Send what `message` holds, made here or arrived, to `peer`."""
        name = self.item.entry.compressor.name
        return self._add_send(message, peer, part, stage, phase, name)

    def recv(self, peer: int, part: Part, stage: int, phase: str) -> Task:
        """Wait for the frame of one range."""
        return self._recv(peer, self._codec.kind(stage), part, stage, phase)

    # -- dense within a node ---------------------------------------------------------------------------------

    def encode_from(self, stage: int, among: int) -> None:
        """Encode from `stage` on only, what `among` ranks have of each range; before it ranges travel dense."""
        self._codec.encode_from(stage, among)

    def dense(self, part: Part, phase: str) -> Task:
        """Take this rank's gradient of `part`, not compressed."""
        return self.graph.add("encode", phase, lambda: self._codec.dense(part))

    def add_up(self, part: Part, messages: Sequence[Task], members: list[int], phase: str = "merge reduce") -> Task:
        """Add this rank's gradient to what its node's other ranks sent dense.

        From then on the sum stands for this rank's gradient of `part`; `members` are the ranks that have such sums.
        """
        run = lambda: self._codec.add_up(part, [_message(task) for task in messages])  # noqa: E731
        task = self.graph.add("merge", phase, run, messages)
        self._sums[part.index] = task, members
        return task

    def spread(self, part: Part, mean: Task, decoded: Task, phase: str) -> Task:
        """The mean of `part`, which `mean` carries and `decoded` has written, not compressed."""
        return self.graph.add("encode", phase, lambda: self._codec.spread(part, _message(mean)), [mean, decoded])

    def place(self, part: Part, message: Task, phase: str, after: Sequence[Task] = ()) -> Task:
        """Write the mean of `part`, which arrived dense, over the gradient, once `after` has no more use for that."""
        return self.graph.add("decode", phase, lambda: self._codec.place(part, _message(message)), [message, *after])

    def send_dense(self, message: Task, peer: int, part: Part, stage: int, phase: str) -> Task:
        """Send what `dense` or `spread` made to `peer`."""
        return self._add_send(message, peer, part, stage, phase, DENSE.name)

    def recv_dense(self, peer: int, part: Part, stage: int, phase: str) -> Task:
        """Wait for the frame of one range, not compressed."""
        return self._recv(peer, FrameKind.PAYLOAD, part, stage, phase)

    # -- the preliminary round -------------------------------------------------------------------------------

    def _inputs(self, part: Part, encoded: bool) -> list[Task]:
        """The tasks after which this rank can encode, or add, what it has of `part`."""
        sums = [self._sums[part.index][0]] if part.index in self._sums else []
        return [*sums, *self._preliminary(part, encoded)]

    def _preliminary(self, part: Part, encoded: bool) -> list[Task]:
        """For compressors that need them: the task after which the reduced statistics of `part` are there.

        Args:
            encoded: whether this rank encodes its gradient of the part, or only adds it.
        """
        if not self.item.entry.compressor.needs_stats:
            return []
        if isinstance(self._codec, ServedCodec):
            return [self._ask_stats(part, self._codec)]
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
            lambda: self._codec.reduce_stats(part, [_message(task) for task in ordered]),
            ordered,
        )
        return [reduce]

    # -- the aggregator --------------------------------------------------------------------------------------

    def ask_sum(self, part: Part, mine: Task) -> Task:
        """Send what `mine` encoded to the aggregator; ends with what it says of the sum."""
        codec = self._served
        return self._ask(part, mine, FrameKind.PAYLOAD, "send indices", lambda: codec.ask_sum(part, _message(mine)))

    def take(self, part: Part, total: Task, phase: str) -> Task:
        """Write the mean over the gradient, and keep what came too late for it."""
        codec, item = self._served, self.item

        def run() -> None:
            num_late = codec.take(part, total.value)
            if num_late:
                detail = {"elements": num_late}
                self._events.emit(Event("late", time.monotonic(), 0.0, item.name, item.round, detail=detail))

        return self.graph.add("decode", phase, run, [total])

    def _ask_stats(self, part: Part, codec: ServedCodec) -> Task:
        """The preliminary round by way of the aggregator."""
        mine = self.graph.add("encode", "encode stats", lambda: codec.stats(part))
        reply = self._ask(part, mine, FrameKind.STATS, "send stats", lambda: codec.ask_stats(part, _message(mine)))
        return self.graph.add("merge", "merge stats", lambda: codec.take_stats(part), [reply])

    def _ask(
        self, part: Part, mine: Task, kind: FrameKind, phase: str, ask: Callable[[], Future[Reply] | None]
    ) -> Task:
        def run() -> Future[Reply] | None:
            start, item = time.monotonic(), self.item
            future = ask()
            if future is not None:
                assert self._service is not None and isinstance(item, Item), "it has been asked"
                nbytes = self._service.sent_bytes(item, part, kind, _message(mine).body)
                self._events.emit(Event("send", start, time.monotonic() - start, item.name, item.round, nbytes))
            return future

        return self.graph.add("send", phase, run, [mine])

    @property
    def _served(self) -> ServedCodec:
        assert isinstance(self._codec, ServedCodec), "asked for by the server strategy alone"
        return self._codec

    # -- frames ----------------------------------------------------------------------------------------------

    def _recv(self, peer: int, kind: FrameKind, part: Part, stage: int, phase: str) -> Task:
        return self.graph.recv(phase, FrameKey(peer, kind, self.item.round, self.item.tensor, stage, part.index))

    def _add_send(self, message: Task, peer: int, part: Part, stage: int, phase: str, compressor: str) -> Task:
        def run() -> None:
            self._send(peer, _message(message), part, stage, compressor)

        return self.graph.add("send", phase, run, [message], peer)

    def _send(self, peer: int, message: Message, part: Part, stage: int, compressor: str) -> None:
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


def _message(task: Task) -> Message:
    value = task.value
    if isinstance(value, Arrival):
        return Message(value.header.kind, value.header.flags, value.body, value.header.sender)
    assert isinstance(value, Message), f"{task.phase} gave no message"
    return value
