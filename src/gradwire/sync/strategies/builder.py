"""The builder: strategies use it to add primitives to the task graph of a job.

A strategy decides who sends which chunk to whom. The builder turns that into tasks and frames. The codec knows how a
chunk is encoded, merged and decoded.
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
from gradwire.sync.batch import BatchCodec
from gradwire.sync.codec import DENSE, PayloadCodec, make_codec
from gradwire.sync.engine import ReceivedFrame
from gradwire.sync.fusion import FusionCodec, FusionGroup
from gradwire.sync.graph import FrameKey, Primitive, Task, TaskGraph
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.sync.nodes import Nodes
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header


@dataclass
class Runtime:
    """What is the same for every job of a synchronizer.

    Attributes:
        transport: Transport of the frames.
        residuals: Residuals of this rank.
        events: Stream of metrics.
        seed: Seed of all random streams.
        nodes: Returns the ranks of each node; None if every rank is a node.
        services: Connections to the servers of strategies that need one, by the strategy's name.
    """

    transport: Transport
    residuals: Residuals
    events: EventStream
    seed: int
    nodes: Callable[[], Nodes] | None = None
    services: dict[str, Any] = field(default_factory=dict)


class Builder:
    """Adds the primitives of one job to its graph.

    Args:
        job: What is synchronized. Fusion groups are for all-gather and scatter-reduce only.
        graph: Graph to which tasks are added.
        runtime: What is the same for every job.
    """

    def __init__(self, job: TensorJob | FusionGroup, graph: TaskGraph, runtime: Runtime) -> None:
        self.job = job
        self.graph = graph
        self.rank = runtime.transport.rank
        self.world_size = runtime.transport.world_size
        self._transport = runtime.transport
        self._events = runtime.events
        self._codec = self._make_codec(runtime)
        self._find_nodes = runtime.nodes
        self._node_sums: dict[int, tuple[Task, list[int]]] = {}  # by chunk: task of the sum, and ranks that have one

    def _make_codec(self, runtime: Runtime) -> PayloadCodec:
        constants = runtime.residuals, self.rank, self.world_size, runtime.seed
        if isinstance(self.job, FusionGroup):
            # The strategies of fusion groups call only what this codec has.
            compiled = BatchCodec.compiled_of(self.job)
            if compiled is not None:
                return cast(PayloadCodec, BatchCodec(self.job, *constants, compiled))
            return cast(PayloadCodec, FusionCodec(self.job, *constants))
        return make_codec(self.job, *constants)

    @property
    def peers(self) -> list[int]:
        """The other ranks, starting with the next one, so that not all ranks send to the same one first."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def nodes(self) -> Nodes:
        """The ranks of each node."""
        return tuple((rank,) for rank in range(self.world_size)) if self._find_nodes is None else self._find_nodes()

    def finish(self) -> None:
        """Tell the codec that the job holds the mean."""
        self._codec.finish()

    # -- the five primitives ---------------------------------------------------------------------------------

    def start(self, chunk: Chunk, phase: str) -> Task:
        """Encode this rank's gradient or its node's sum: the first stage of every path."""
        return self.graph.add("encode", phase, lambda: self._codec.start(chunk), self._inputs(chunk, True))

    def merge(self, chunk: Chunk, messages: Sequence[Task], stage: int, phase: str) -> Task:
        """Decode received chunks, add this rank's gradient or its node's sum, and encode the total."""
        after = self._inputs(chunk, self._codec.encodes_own(stage))
        return self._add("merge", phase, messages, lambda *found: self._codec.merge(chunk, found, stage), after)

    def decode(self, chunk: Chunk, message: Task, stage: int, phase: str, after: Sequence[Task] = ()) -> Task:
        """Overwrite the gradient with the mean, after the tasks that still need the gradient."""
        return self._add("decode", phase, [message], lambda mean: self._codec.decode(chunk, mean, stage), after)

    def decode_sum(self, chunk: Chunk, messages: Sequence[Task], phase: str) -> Task:
        """Overwrite the gradient with the sum of all ranks' messages, in rank order."""
        return self._add("decode", phase, messages, lambda *found: self._codec.decode_sum(chunk, found))

    def send(self, message: Task, peer: int, chunk: Chunk, stage: int, phase: str) -> Task:
        """Send an encoded chunk, made here or received, to `peer`."""
        return self._add_send(message, peer, chunk, stage, phase, self.job.entry.compressor.name)

    def recv(self, peer: int, chunk: Chunk, stage: int, phase: str) -> Task:
        """Wait for the frame of one chunk."""
        return self._recv(peer, self._codec.kind(stage), chunk, stage, phase)

    # -- dense within a node ---------------------------------------------------------------------------------

    def encode_from(self, stage: int, num_encoders: int) -> None:
        """Compress from `stage` on, on `num_encoders` ranks per chunk. Earlier stages are dense."""
        self._codec.encode_from(stage, num_encoders)

    def encode_dense(self, chunk: Chunk, phase: str) -> Task:
        """Encode this rank's gradient without compression."""
        return self.graph.add("encode", phase, lambda: self._codec.encode_dense(chunk))

    def merge_dense(self, chunk: Chunk, messages: Sequence[Task], members: list[int], phase: str) -> Task:
        """Add the dense gradients of the node's other ranks to this rank's. The sum replaces it from now on.

        Args:
            members: Ranks that have such a sum of the chunk.
        """
        task = self._add("merge", phase, messages, lambda *found: self._codec.merge_dense(chunk, found))
        self._node_sums[chunk.index] = task, members
        return task

    def encode_mean(self, chunk: Chunk, mean: Task, decoded: Task, phase: str) -> Task:
        """Encode the mean without compression. It came with `mean`, and `decoded` has written it."""
        return self._add("encode", phase, [mean], lambda found: self._codec.encode_mean(chunk, found), [decoded])

    def decode_dense(self, chunk: Chunk, message: Task, phase: str, after: Sequence[Task] = ()) -> Task:
        """Overwrite the gradient with a mean that is not compressed, after the tasks that still need the gradient."""
        return self._add("decode", phase, [message], lambda mean: self._codec.decode_dense(chunk, mean), after)

    def send_dense(self, message: Task, peer: int, chunk: Chunk, stage: int, phase: str) -> Task:
        """Send a chunk that is not compressed to `peer`."""
        return self._add_send(message, peer, chunk, stage, phase, DENSE.name)

    def recv_dense(self, peer: int, chunk: Chunk, stage: int, phase: str) -> Task:
        """Wait for the frame of a chunk that is not compressed."""
        return self._recv(peer, FrameKind.PAYLOAD, chunk, stage, phase)

    # -- the preliminary round -------------------------------------------------------------------------------

    def _inputs(self, chunk: Chunk, encoded: bool) -> list[Task]:
        """Return the tasks after which this rank can encode or add its contribution to a chunk."""
        sums = [self._node_sums[chunk.index][0]] if chunk.index in self._node_sums else []
        return [*sums, *self._preliminary(chunk, encoded)]

    def _preliminary(self, chunk: Chunk, encoded: bool) -> list[Task]:
        """Add a preliminary round, if the compressor needs one, and return its last task.

        Args:
            encoded: Whether this rank encodes its gradient of the chunk, instead of only adding it.
        """
        if not self.job.entry.compressor.needs_stats:
            return []
        after, members, stage = [], list(range(self.world_size)), self._codec.first_stage
        if chunk.index in self._node_sums:
            task, members = self._node_sums[chunk.index]
            after = [task]
        mine = self.graph.add("encode", "encode stats", lambda: self._codec.stats(chunk, encoded), after)
        messages = {self.rank: mine}
        for peer in (peer for peer in self.peers if peer in members):
            self.send(mine, peer, chunk, stage, "send stats")
            messages[peer] = self._recv(peer, FrameKind.STATS, chunk, stage, "recv stats")
        ordered = [messages[rank] for rank in members]
        return [self._add("merge", "merge stats", ordered, lambda *found: self._codec.reduce_stats(chunk, found))]

    # -- tasks and frames ------------------------------------------------------------------------------------

    def _add(
        self,
        kind: Primitive,
        phase: str,
        messages: Sequence[Task],
        run: Callable[..., Any],
        after: Sequence[Task] = (),
        peer: int | None = None,
    ) -> Task:
        """Add a task that calls `run` with the encoded chunks of `messages`, after these and `after`."""
        return self.graph.add(kind, phase, lambda: run(*map(message_of, messages)), [*messages, *after], peer)

    def _recv(self, peer: int, kind: FrameKind, chunk: Chunk, stage: int, phase: str) -> Task:
        return self.graph.recv(phase, FrameKey(peer, kind, self.job.round, self.job.tensor, stage, chunk.index))

    def _add_send(self, message: Task, peer: int, chunk: Chunk, stage: int, phase: str, compressor: str) -> Task:
        run = lambda found: self._send(peer, found, chunk, stage, compressor)  # noqa: E731
        return self._add("send", phase, [message], run, peer=peer)

    def _send(self, peer: int, message: EncodedChunk, chunk: Chunk, stage: int, compressor: str) -> None:
        job = self.job
        header = Header(
            message.kind,
            compressor=code(compressor),
            flags=message.flags,
            sender=self.rank,
            stage=stage,
            dtype=ELEMENT_TYPES[job.dtype],
            epoch=self._transport.epoch,
            round=job.round,
            tensor=job.tensor,
            partition=chunk.index,
            offset=job.offset + chunk.offset,
            count=chunk.count,
        )
        start = time.monotonic()
        self._transport.send(peer, header, message.body)
        nbytes = HEADER_BYTES + message.body.nbytes
        self._events.emit(Event("send", start, time.monotonic() - start, job.name, job.round, nbytes, peer))


def message_of(task: Task) -> EncodedChunk:
    """Return the encoded chunk that a task made or received."""
    value = task.value
    if isinstance(value, ReceivedFrame):
        return EncodedChunk(value.header.kind, value.header.flags, value.body, value.header.sender)
    assert isinstance(value, EncodedChunk), f"{task.phase} did not return an encoded chunk"
    return value
