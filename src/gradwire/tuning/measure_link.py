"""Measures latency and rate of every rank's link, between steps and with the job's own transport.

Ranks form a ring and measure at the same time, so that every link is busy in both directions, as in a synchronization.
Latency is half of a round trip of small frames, engine and transport included. For the rate, each rank sends a train
of frames, and the receiver times only the second half: the first half may have used up the burst that a shaped link or
a switch allows. A short train first tells how long the second one can be.

On failure: as any synchronization, within the deadlines of the job.
"""

# Shapes: W = ranks, K = numbers

from __future__ import annotations

import time
from functools import partial
from statistics import median

import numpy as np

from gradwire.net.transport import Transport
from gradwire.planner.costs import LinkCosts
from gradwire.sync.exchange import PROBE_BYTES, PROBE_TENSOR
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.sync.synchronizer import Synchronizer
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

_ROUND_TRIPS = 5
_SHORT_TRAIN = 8
_LONG_TRAIN = 256
_TARGET_SECONDS = 0.1


def measure_links(synchronizer: Synchronizer) -> tuple[LinkCosts, ...]:
    """Measure the link of each rank. Call it on all ranks, between steps; all get the same figures.

    It sends at most 17 MB per rank and takes about 0.2 seconds on links of 20 Mb/s and above.

    Raises:
        SyncError: The synchronizer failed.
    """
    return (LinkCosts(0.0, 0.0),) if synchronizer.world_size == 1 else _LinkMeasurement(synchronizer).links()


class _LinkMeasurement:
    """Measures the link of this rank."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._synchronizer = synchronizer
        self._next = (synchronizer.rank + 1) % synchronizer.world_size
        self._previous = (synchronizer.rank - 1) % synchronizer.world_size

    def links(self) -> tuple[LinkCosts, ...]:
        latency = median(self._round_trip() for _ in range(_ROUND_TRIPS)) / 2
        short = self._rate(_SHORT_TRAIN)
        # The slowest link decides the length for all ranks.
        num_frames = float(np.nanmin(self._gather(np.array([short])))) * _TARGET_SECONDS / PROBE_BYTES
        rate = self._rate(int(np.clip(num_frames, _SHORT_TRAIN, _LONG_TRAIN)))
        return tuple(LinkCosts(float(row[0]), 1 / float(row[1])) for row in self._gather(np.array([latency, rate])))

    def _gather(self, mine: np.ndarray) -> np.ndarray:
        """Gather the numbers of all ranks: float64[K] to float64[W, K]."""
        rows: np.ndarray = self._synchronizer.exchange(mine).wait()
        return rows

    def _round_trip(self) -> float:
        """Measure seconds from this rank to the next one and back."""
        times: list[float] = []

        def build(graph: TaskGraph, transport: Transport) -> None:
            self._send(graph, transport, self._next, 0, 0)
            there = self._recv(graph, self._previous, 0)
            self._send(graph, transport, self._previous, 0, 1, after=there)
            back = self._recv(graph, self._next, 1)
            graph.add("merge", "note probe", lambda: times.append(time.monotonic()), [back])
            times.append(time.monotonic())

        self._synchronizer.run_alone(build, "probe")
        return times[1] - times[0]

    def _rate(self, num_frames: int) -> float:
        """Measure bytes per second in the second half of a train from the previous rank."""
        times = [0.0] * num_frames

        def build(graph: TaskGraph, transport: Transport) -> None:
            # A rank sends once its receiver waits, so that no frame arrives before it is expected.
            self._send(graph, transport, self._previous, 0, 0)
            ready = self._recv(graph, self._next, 0)
            for index in range(num_frames):
                self._send(graph, transport, self._next, PROBE_BYTES, 1, index, after=ready)
                arrived = self._recv(graph, self._previous, 1, index)
                graph.add("merge", "note probe", partial(_note, times, index), [arrived])

        self._synchronizer.run_alone(build, "probe")
        half = num_frames // 2
        return (num_frames - half) * (PROBE_BYTES + HEADER_BYTES) / max(times[-1] - times[half - 1], 1e-9)

    # -- frames ----------------------------------------------------------------------------------------------

    def _send(
        self,
        graph: TaskGraph,
        transport: Transport,
        peer: int,
        nbytes: int,
        stage: int,
        partition: int = 0,
        after: Task | None = None,
    ) -> None:
        body = np.zeros(nbytes, np.uint8)
        header = Header(
            FrameKind.STATS, sender=transport.rank, epoch=transport.epoch, round=graph.round,
            tensor=PROBE_TENSOR, stage=stage, partition=partition, count=nbytes,
        )  # fmt: skip
        graph.add("send", "send probe", lambda: transport.send(peer, header, body), [after] if after else [], peer)

    def _recv(self, graph: TaskGraph, peer: int, stage: int, partition: int = 0) -> Task:
        key = FrameKey(peer, FrameKind.STATS, graph.round, PROBE_TENSOR, stage, partition)
        return graph.recv("recv probe", key)


def _note(times: list[float], index: int) -> None:
    times[index] = time.monotonic()
