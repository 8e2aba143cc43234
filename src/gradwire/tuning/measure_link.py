"""Measures latency and rate of every rank's link, between steps and with the job's own transport.

Ranks form rings and measure at the same time, so that every link is busy in both directions, as in a synchronization.
The ranks of a node share its link: each forms a ring with a rank of every other node. The links within nodes are
measured by a ring on each node.
Latency is half of a round trip of small frames, engine and transport included. For the rate, each rank sends a train
of frames, and the receiver times only the second half: the first half may have used up the burst that a shaped link or
a switch allows. A short train first tells how long the second one can be.

On failure: as any synchronization, within the deadlines of the job.
"""

# Shapes: W = ranks, K = numbers

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from gradwire.planner.costs import LinkCosts, slowest
from gradwire.sync.chunk import Chunk
from gradwire.sync.exchange import PROBE_BYTES, PROBE_TENSOR
from gradwire.sync.operations import Draft, FrameFields, Operations
from gradwire.sync.synchronizer import Synchronizer
from gradwire.wire.frame import FrameKind
from gradwire.wire.payload import Payload

_ROUND_TRIPS = 5
_SHORT_TRAIN = 8
_LONG_TRAIN = 256
_TARGET_SECONDS = 0.1


class Links(NamedTuple):
    """What was measured, the same on all ranks.

    Attributes:
        between: Each rank's link to another node, while the other ranks of its node use it, too.
        within: The slowest link between ranks of one node; None if there is no such pair, or only one node.
    """

    between: tuple[LinkCosts, ...]
    within: LinkCosts | None = None


def measure_links(synchronizer: Synchronizer) -> Links:
    """Measure the link of each rank. Call it on all ranks, between steps; all get the same figures.

    On nodes of different sizes, or on one node, ranks form one ring, and each measures its link to the next one.

    It sends at most 17 MB per rank and ring, and takes about 0.2 seconds on links of 20 Mb/s and above.

    Raises:
        SyncError: The synchronizer failed.
    """
    rank, world_size = synchronizer.rank, synchronizer.world_size
    if world_size == 1:
        return Links((LinkCosts(0.0, 0.0),))
    nodes = synchronizer.nodes
    if not 1 < len(nodes) < world_size or len({len(node) for node in nodes}) > 1:
        return Links(_RingMeasurement(synchronizer, range(world_size)).links())
    home = next(node for node in nodes if rank in node)
    column = [node[home.index(rank)] for node in nodes]
    between, within = (_RingMeasurement(synchronizer, ring).links() for ring in (column, home))
    return Links(between, slowest(within))


class _RingMeasurement:
    """Measures the link of this rank to the next one of its ring."""

    def __init__(self, synchronizer: Synchronizer, ring: Sequence[int]) -> None:
        self._synchronizer = synchronizer
        place = ring.index(synchronizer.rank)
        self._next, self._previous = ring[(place + 1) % len(ring)], ring[place - 1]

    def links(self) -> tuple[LinkCosts, ...]:
        """Measure, and return the figures of all ranks."""
        latency = median(self._round_trip() for _ in range(_ROUND_TRIPS)) / 2
        short = self._rate(_SHORT_TRAIN)
        # The slowest link decides the length for all ranks.
        num_frames = float(np.nanmin(self._gather(np.array([short])))) * _TARGET_SECONDS / PROBE_BYTES
        rate = self._rate(int(np.clip(num_frames, _SHORT_TRAIN, _LONG_TRAIN)))
        return tuple(LinkCosts(float(row[0]), 1 / float(row[1])) for row in self._gather(np.array([latency, rate])))

    def _gather(self, mine: np.ndarray) -> np.ndarray:
        """Gather the numbers of all ranks: float64[K] to float64[W, K]."""
        future = self._synchronizer.exchange(mine)
        self._synchronizer.wait()
        rows: np.ndarray = future.value()
        return rows

    def _round_trip(self) -> float:
        """Measure seconds from this rank to the next one and back."""
        draft, small = Draft(), Chunk(0, 0, 0)
        probe = draft.add("encode", "start", "make probe", small)
        draft.send_frame(probe, self._next, FrameKind.STATS, small, 0, "send probe")
        there = draft.recv_frame(self._previous, FrameKind.STATS, small, 0, "recv probe")
        draft.send_frame(probe, self._previous, FrameKind.STATS, small, 1, "send probe", after=[there])
        back = draft.recv_frame(self._next, FrameKind.STATS, small, 1, "recv probe")
        draft.add("merge", "note", "note probe", small, [back])
        codec = _Probe()
        self._run(draft, codec)
        return codec.times[0] - codec.started

    def _rate(self, num_frames: int) -> float:
        """Measure bytes per second in the second half of a train from the previous rank."""
        draft, small = Draft(), Chunk(0, 0, 0)
        # A rank sends once its receiver waits, so that no frame arrives before it is expected.
        probe = draft.add("encode", "start", "make probe", small)
        draft.send_frame(probe, self._previous, FrameKind.STATS, small, 0, "send probe")
        ready = draft.recv_frame(self._next, FrameKind.STATS, small, 0, "recv probe")
        full = draft.add("encode", "start", "make probe", Chunk(0, 0, PROBE_BYTES))
        for index in range(num_frames):
            chunk = Chunk(index, 0, PROBE_BYTES)
            draft.send_frame(full, self._next, FrameKind.STATS, chunk, 1, "send probe", after=[ready])
            arrived = draft.recv_frame(self._previous, FrameKind.STATS, chunk, 1, "recv probe")
            draft.add("merge", "note", "note probe", chunk, [arrived])
        codec = _Probe()
        self._run(draft, codec)
        half, times = num_frames // 2, codec.times
        return (
            (num_frames - half)
            * (PROBE_BYTES + self._synchronizer.prefix_bytes)
            / max(times[num_frames - 1] - times[half - 1], 1e-9)
        )

    def _run(self, draft: Draft, codec: _Probe) -> None:
        self._synchronizer.run_alone(Operations(draft.ops, FrameFields(PROBE_TENSOR)), codec, "probe")


class _Probe:
    """The codec of probes.

    Attributes:
        started: When the first probe was made, in seconds of the monotonic clock.
        times: When the probe of each chunk arrived.
    """

    def __init__(self) -> None:
        self.started = 0.0
        self.times: dict[int, float] = {}

    def start(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        """Return a body of as many bytes as the chunk has elements."""
        self.started = self.started or time.monotonic()
        return Payload(np.zeros(chunk.count, np.uint8))

    def note(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        """Note the time."""
        self.times[chunk.index] = time.monotonic()
