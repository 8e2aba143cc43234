"""The link probe: latency and rate of every rank's link, measured between steps with the job's own transport.

Ranks form a ring, and all measure at once, so that every link is busy both ways as it is in a synchronisation. Latency
is half of a round trip of small frames, engine and transport included. For the rate each rank sends a train of frames
and its receiver looks at the second half of it alone: the first half may have passed on the tokens that a shaped link
or a switch has saved up. A first, short train says how long the second can be.

On failure: as any synchronisation, within the deadlines of the job.
"""

# Shapes: W = ranks.

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from gradwire.sync.costs import LinkCosts
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.transport.base import Transport
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

PROBE_TENSOR = 0xFFFF_FFFE  # the tensor id of these frames
CHUNK_BYTES = 64 * 1024
_ROUND_TRIPS = 5
_SHORT_TRAIN = 8
_LONG_TRAIN = 256
_TARGET_SECONDS = 0.1


@dataclass
class Probe:
    """What a probe needs of a synchroniser.

    Attributes:
        transport: carries the frames.
        run: runs a graph to its end.
        gather: brings float64[K] of each rank to all: float64[W, K].
        next_round: gives the round of the next graph.
    """

    transport: Transport
    run: Callable[[TaskGraph], None]
    gather: Callable[[np.ndarray], np.ndarray]
    next_round: Callable[[], int]

    def links(self) -> tuple[LinkCosts, ...]:
        """The link of each rank, from its own end."""
        latency = median(self._round_trip() for _ in range(_ROUND_TRIPS)) / 2
        short = self._rate(_SHORT_TRAIN)
        # The slowest link sets the length for all, as it would set the time of a step.
        chunks = float(np.nanmin(self.gather(np.array([short])))) * _TARGET_SECONDS / CHUNK_BYTES
        rate = self._rate(int(np.clip(chunks, _SHORT_TRAIN, _LONG_TRAIN)))
        return tuple(LinkCosts(float(row[0]), 1 / float(row[1])) for row in self.gather(np.array([latency, rate])))

    def _round_trip(self) -> float:
        """Seconds from this rank to the next one and back."""
        graph, times = self._graph(), []
        self._send(graph, self._next, 0, 0)
        there = self._recv(graph, self._previous, 0)
        self._send(graph, self._previous, 0, 1, after=there)
        back = self._recv(graph, self._next, 1)
        graph.add("merge", "note probe", lambda: times.append(time.monotonic()), [back])
        begun = time.monotonic()
        self.run(graph)
        return float(times[0] - begun)

    def _rate(self, chunks: int) -> float:
        """Bytes a second that this rank received in the second half of a train from the rank before."""
        graph, times = self._graph(), [0.0] * chunks
        # Who has heard that its receiver waits may send: then nothing comes before it is expected.
        self._send(graph, self._previous, 0, 0)
        ready = self._recv(graph, self._next, 0)
        for index in range(chunks):
            self._send(graph, self._next, CHUNK_BYTES, 1, index, after=ready)
            arrived = self._recv(graph, self._previous, 1, index)
            graph.add("merge", "note probe", partial(_note, times, index), [arrived])
        self.run(graph)
        half = chunks // 2
        return (chunks - half) * (CHUNK_BYTES + HEADER_BYTES) / max(times[-1] - times[half - 1], 1e-9)

    # -- frames ----------------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        return (self.transport.rank + 1) % self.transport.world_size

    @property
    def _previous(self) -> int:
        return (self.transport.rank - 1) % self.transport.world_size

    def _graph(self) -> TaskGraph:
        return TaskGraph("probe", self.next_round(), priority=0, on_done=lambda: None)

    def _send(
        self, graph: TaskGraph, peer: int, nbytes: int, stage: int, partition: int = 0, after: Task | None = None
    ) -> None:
        body = np.zeros(nbytes, np.uint8)
        header = Header(
            FrameKind.STATS, sender=self.transport.rank, epoch=self.transport.epoch, round=graph.round,
            tensor=PROBE_TENSOR, stage=stage, partition=partition, count=nbytes,
        )  # fmt: skip
        graph.add("send", "send probe", lambda: self.transport.send(peer, header, body), [after] if after else [], peer)

    def _recv(self, graph: TaskGraph, peer: int, stage: int, partition: int = 0) -> Task:
        key = FrameKey(peer, FrameKind.STATS, graph.round, PROBE_TENSOR, stage, partition)
        return graph.recv("recv probe", key)


def _note(times: list[float], index: int) -> None:
    times[index] = time.monotonic()
