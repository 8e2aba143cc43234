"""Jobs that travel through an aggregation server: what their packets cost, and their graphs.

A rank's operations are those of the strategy ``"server"`` (`gradwire.aggregator.strategy`), and packets those of the
session that ranks and server would agree on. Each question to the server becomes a hand-over, messages to the server,
and messages back. Real packets travel one by one; here, neighbors share a message of up to 256 KiB, of which the server
sends the result when it has heard all ranks. The server has a graph of its own.
"""

# Shapes: N = tasks, W = ranks.

from __future__ import annotations

from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.service import streams_of, table_of
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.strategy import NAME
from gradwire.compressors.base import Compressor, LookupCompressor
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.net.datagrams import TRAILER_BYTES
from gradwire.simulate.cluster import Cluster, SimulatedServer
from gradwire.simulate.fragments import num_fragments
from gradwire.simulate.graphs import CONTRIBUTION, RESULT, RankGraph, Work, layout_of, work_of
from gradwire.simulate.loop import COMPUTE, HAND, RECV, SEND
from gradwire.sync.operations import Op, predecessors
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import operations_of
from gradwire.wire.frame import HEADER_BYTES, FrameKind

SERVER = NAME
DATAGRAM_HEADER_BYTES = 14 + 20 + 8
"""Ethernet, IPv4 and UDP."""


class Packets(NamedTuple):
    """Packets of one stream: of a chunk's statistics or of its indices.

    Attributes:
        number: Number of packets that a rank sends.
        elements: Elements of a packet, the mean.
        nbytes: Bytes of all contributions of a rank, and of all results, with the headers of packets.
    """

    number: int
    elements: float
    nbytes: dict[str, int]

    @property
    def segments(self) -> int:
        """Messages that they are simulated as."""
        return min(self.number, num_fragments(max(self.nbytes.values())))


class ServedPrices:
    """Costs of a job's packets.

    Args:
        compressor: Compressor of the job.
        dtype: Element type of the gradients.
        cluster: Ranks and server.

    Raises:
        OptionError: The cluster has no server.
    """

    def __init__(self, compressor: Compressor, dtype: torch.dtype, cluster: Cluster) -> None:
        if cluster.server is None:
            raise OptionError(
                f"The plan sends tensors through a server ({compressor!r}), but the cluster has none. Pass "
                "Cluster(..., server=SimulatedServer()), or choose a strategy between ranks."
            )
        assert isinstance(compressor, LookupCompressor), "a plan refuses others"
        self._compressor, self._dtype = compressor, dtype
        self._server, self._world_size = cluster.server, cluster.ranks
        self.packets = cache(self._packets)

    def _packets(self, frame: FrameKind, shape: tuple[int, ...]) -> Packets:
        server, world_size = self._server, self._world_size
        streams = streams_of(self._compressor, TensorSpec(shape, self._dtype), world_size, 0)
        config = SessionConfig(
            world_size, (table_of(self._compressor, world_size),), streams, server.packet_elements, mtu=server.mtu
        )
        index = int(frame is not FrameKind.STATS)
        number, size = config.num_packets(index), streams[index].size
        headers = PACKET_HEADER_BYTES + (TRAILER_BYTES + DATAGRAM_HEADER_BYTES if server.mtu else HEADER_BYTES)
        results = sum(config.result_bytes(index, packet) for packet in range(number))
        nbytes = {
            CONTRIBUTION: number * headers + config.payload_bytes(index, size),
            RESULT: number * headers + results,
        }
        return Packets(number, size / number, nbytes)

    def of(self, work: Work) -> Packets:
        """The packets that a message is part of."""
        assert work.frame is not None
        return self.packets(work.frame, work.shapes[0])

    def seconds(self, work: Work) -> float:
        """Seconds of the processor that sends or receives a message."""
        server, packets = self._server, self.of(work)
        if (work.call, work.packets) == ("send", RESULT):
            return 0.0  # in the cost of the contributions
        cost, share = server.rank_packet, work.share / 2
        if (work.call, work.packets) == ("recv", CONTRIBUTION):
            cost, share = server.statistics_packet if work.frame is FrameKind.STATS else server.packet, work.share
        return share * packets.number * cost(packets.elements)

    def frame_bytes(self, work: Work) -> float:
        """Bytes of a message."""
        return work.share * self.of(work).nbytes[work.packets]


class _Draft:
    """A graph that grows."""

    def __init__(self) -> None:
        self._works: dict[Work, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []  # work, kind, peer, chunk
        self._before: list[list[int]] = []

    def add(self, kind: int, work: Work, chunk: int, before: list[int], peer: int = -1) -> int:
        """Add a task, and return its index."""
        self._rows.append((self._works.setdefault(work, len(self._works)), kind, peer, chunk))
        self._before.append(before)
        return len(self._rows) - 1

    def graph(self) -> RankGraph:
        successors: list[list[int]] = [[] for _ in self._rows]
        for task, before in enumerate(self._before):
            for each in before:
                successors[each].append(task)
        work, kind, peer, chunk = (np.array(column, np.int64) for column in zip(*self._rows, strict=True))
        return RankGraph(
            list(self._works),
            work,
            kind,
            pending=np.array([len(before) for before in self._before], np.int64),
            successors_at=np.array([0, *accumulate(map(len, successors))], np.int64),
            successors=np.array(list(chain.from_iterable(successors)), np.int64),
            peer=peer,
            chunk=chunk,
            stage=np.zeros_like(chunk),
        )


def served_graphs(
    entry: PlanEntry, shape: tuple[int, ...], world_size: int, prices: ServedPrices, server: SimulatedServer
) -> tuple[list[RankGraph], np.ndarray]:
    """The graphs of a job on all ranks and, last, on the server.

    Returns:
        The graphs; and which send ends which recv, as pairs of task numbers over all graphs, one after another.
    """
    layout = layout_of(entry, shape, 0)
    ops = operations_of(layout, 0, world_size).ops
    rank, at_server = _Draft(), _Draft()
    ends: list[list[int]] = []  # of each operation
    questions: list[tuple[list[int], list[int], list[list[int]], list[list[int]]]] = []
    for op in ops:
        work = work_of(op, ops, layout, world_size)
        before = [task for each in predecessors(op) for task in ends[each]]
        if op.kind != "send":
            ends.append([rank.add(COMPUTE, work, op.chunk.index, before)])
            continue
        asked = _message(op, ops, work, prices)
        hand = rank.add(HAND, work._replace(call="hand"), op.chunk.index, before)
        count = round(1 / asked.share)
        sends = [rank.add(SEND, asked, op.chunk.index, [hand], peer=world_size) for _ in range(count)]
        answer = asked._replace(call="recv", packets=RESULT)
        recvs = [rank.add(RECV, answer, op.chunk.index, [], peer=world_size) for _ in range(count)]
        ends.append(recvs)
        questions.append((sends, recvs, *_answers(at_server, asked, op.chunk.index, count, world_size, server)))
    graph = rank.graph()
    size, pairs = graph.kind.size, []
    for sends, recvs, heard, answered in questions:
        for segment, (send, recv) in enumerate(zip(sends, recvs, strict=True)):
            for number in range(world_size):
                pairs.append((number * size + send, world_size * size + heard[segment][number]))
                source = answered[segment][number % len(answered[segment])]
                pairs.append((world_size * size + source, number * size + recv))
    return [graph] * world_size + [at_server.graph()], np.array(pairs, np.int64).reshape(-1, 2)


def _message(op: Op, ops: tuple[Op, ...], work: Work, prices: ServedPrices) -> Work:
    """One of the messages of a question."""
    asked = work._replace(call="send", frame=ops[op.inputs[0]].frame, taken=None, num_payloads=0, packets=CONTRIBUTION)
    return asked._replace(share=1 / prices.of(asked).segments)


def _answers(
    draft: _Draft, asked: Work, chunk: int, count: int, world_size: int, server: SimulatedServer
) -> tuple[list[list[int]], list[list[int]]]:
    """Add a question to the server's graph: its recvs and sends, by segment."""
    heard, answered = [], []
    taken = asked._replace(call="recv", phase=asked.phase.replace("send", "add"))
    result = asked._replace(packets=RESULT, phase=asked.phase.replace("send", "answer"))
    for _ in range(count):
        heard.append([draft.add(RECV, taken, chunk, [], peer=rank) for rank in range(world_size)])
        receivers = range(1 if server.multicast else world_size)
        answered.append([draft.add(SEND, result, chunk, heard[-1], peer=rank) for rank in receivers])
    return heard, answered
