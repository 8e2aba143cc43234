"""An aggregator within one process, exact and slow, in which a test decides who is late.

Sums are of 64 bits and in one place. A function decides who is late, in which packet of which round. It is for tests of
what ranks do with its replies; the servers of `gradwire.aggregator` have their own tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import gradwire.aggregator.strategy  # noqa: F401  # registers itself
from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.request import Reply
from gradwire.aggregator.service import Aggregator
from gradwire.aggregator.session import Operation, SessionConfig
from gradwire.core.errors import SyncError
from gradwire.kernels import reference
from gradwire.net.client import ConnectionOptions
from gradwire.wire.frame import HEADER_BYTES, FrameFlags

Late = Callable[[int, int, int, int], bool]
"""Whether (round, stream, packet, rank) is late."""


@dataclass
class _Round:
    """Submissions of the ranks."""

    submissions: dict[int, tuple[np.ndarray | None, np.ndarray, FrameFlags, Future[Reply]]] = field(
        default_factory=dict
    )


class LocalAggregator:
    """The aggregator of one group.

    Args:
        late: Decides who is late; by default nobody.
        lost: Decides who does not get a result in time, and fills it; by default nobody.
    """

    def __init__(self, late: Late = lambda *_: False, lost: Late = lambda *_: False) -> None:
        self.late, self.lost = late, lost
        self.config: SessionConfig | None = None
        self.replies: list[tuple[int, int, Reply]] = []  # round, stream
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._lock = threading.Lock()
        self._error: SyncError | None = None

    def fail(self, error: SyncError) -> None:
        """Fail as if the connection to a server were lost."""
        with self._lock:
            self._error = error
            waiting = [each[3] for round_ in self._rounds.values() for each in round_.submissions.values()]
            self._rounds.clear()
        for future in waiting:
            future.set_exception(self._copy_of_error())

    def _copy_of_error(self) -> SyncError:
        """Return a new error for each rank, as each process would have its own."""
        assert self._error is not None, "it has failed"
        return type(self._error)(str(self._error))

    def submit(
        self, key: tuple[int, int], rank: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags
    ) -> Future[Reply]:
        assert self.config is not None, "a rank has connected"
        future: Future[Reply] = Future()
        with self._lock:
            if self._error is not None:
                raise self._copy_of_error()
            round_ = self._rounds.setdefault(key, _Round())
            assert rank not in round_.submissions, f"rank {rank} submitted {key} twice"
            round_.submissions[rank] = (payload, out, flags, future)
            if len(round_.submissions) < self.config.world_size:
                return future
            del self._rounds[key]
        reply = self._sum(key, round_)
        self.replies.append((*key, reply))
        for rank, (_, out, _, waiting) in round_.submissions.items():
            waiting.set_result(self._received(key, rank, reply, out))
        return future

    def _received(self, key: tuple[int, int], rank: int, reply: Reply, out: np.ndarray) -> Reply:
        """Return what a rank receives of a result, with zeros in packets that it does not get in time."""
        assert self.config is not None, "a rank has connected"
        filled = np.array([self.lost(*key, packet, rank) for packet in range(reply.counts.size)])
        for packet in np.flatnonzero(filled):
            out[self.config.place(key[1], packet)] = 0
        return replace(reply, counts=reply.counts * ~filled, counted=reply.counted & ~filled[:, None], filled=filled)

    def _sum(self, key: tuple[int, int], round_: _Round) -> Reply:
        assert self.config is not None, "a rank has connected"
        config, (number, stream) = self.config, key
        described, num_packets = config.streams[stream], config.num_packets(stream)
        is_sum = described.operation is Operation.SUM
        total = np.full(described.size, 0 if is_sum else -np.inf)
        counted, heard = np.zeros((num_packets, config.world_size), bool), FrameFlags.NONE
        for rank, (payload, _, flags, _) in sorted(round_.submissions.items()):
            values = None if payload is None else self._values(stream, payload)
            for packet in range(num_packets):
                if self.late(number, stream, packet, rank):
                    continue
                heard |= flags
                if values is not None:
                    counted[packet, rank] = True
                    elements = config.place(stream, packet)
                    total[elements] = (
                        total[elements] + values[elements] if is_sum else np.maximum(total[elements], values[elements])
                    )
        num_heard = config.world_size - max(
            (sum(self.late(number, stream, packet, rank) for rank in range(config.world_size)))
            for packet in range(num_packets)
        )
        assert num_heard >= config.needed, "the test leaves out more ranks than the config allows"
        for _, out, _, _ in round_.submissions.values():
            assert not is_sum or total.max(initial=0) <= np.iinfo(out.dtype).max
            out[:] = total
        return Reply(counted.sum(axis=1), counted, heard, config.packet_size(stream), np.zeros(num_packets, bool))

    def _values(self, stream: int, payload: np.ndarray) -> np.ndarray:
        assert self.config is not None, "a rank has connected"
        described = self.config.streams[stream]
        if described.operation is Operation.MAXIMUM:
            return payload
        table, values = self.config.tables[described.table], np.zeros(described.size, np.uint32)
        assert payload.nbytes == self.config.payload_bytes(stream, described.size)
        reference.lookup_indices(payload, table.bits, table.array, values)
        return values


@dataclass(frozen=True)
class LocalOptions(Aggregator):
    """Options that connect to a `LocalAggregator`."""

    aggregator: LocalAggregator = field(default_factory=LocalAggregator)

    def client(self, config: SessionConfig, rank: int, session: int, connection: ConnectionOptions) -> Any:
        return _LocalClient(self.aggregator, config, rank)


class _LocalClient:
    """The connection of one rank: the part of `AggregationClient` that is used."""

    def __init__(self, aggregator: LocalAggregator, config: SessionConfig, rank: int) -> None:
        assert aggregator.config in (None, config), "all ranks have the same config"
        aggregator.config = self.config = config
        self.rank = rank
        self._aggregator = aggregator

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags = FrameFlags.NONE
    ) -> Future[Reply]:
        return self._aggregator.submit((round_, stream), self.rank, payload, out, flags)

    def header_bytes(self, stream: int) -> int:
        return self.config.num_packets(stream) * (HEADER_BYTES + PACKET_HEADER_BYTES)

    def close(self, reason: str = "") -> None:
        """Nothing to close."""
