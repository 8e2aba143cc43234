"""An aggregator within one process, exact and slow, whose latecomers a test chooses.

Sums are of 64 bits and in one place; who is late, in which packet of which round, is a function. For tests of what
ranks make of its replies; the servers of `gradwire.aggregator` have tests of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

import gradwire.aggregator.strategy  # noqa: F401  # registers itself
from gradwire.aggregator.request import Reply
from gradwire.aggregator.service import Aggregator
from gradwire.aggregator.session import Operation, SessionConfig
from gradwire.core.errors import SyncError
from gradwire.kernels import reference
from gradwire.wire.frame import FrameFlags

Late = Callable[[int, int, int, int], bool]
"""Whether (round, stream, packet, rank) is late."""


@dataclass
class _Round:
    """What ranks have submitted."""

    parts: dict[int, tuple[np.ndarray | None, np.ndarray, FrameFlags, Future[Reply]]] = field(default_factory=dict)


class Room:
    """The aggregator of one group.

    Args:
        late: who is; nobody unless told otherwise.
    """

    def __init__(self, late: Late = lambda *_: False) -> None:
        self.late = late
        self.config: SessionConfig | None = None
        self.replies: list[tuple[int, int, Reply]] = []  # round, stream
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._lock = threading.Lock()
        self._error: SyncError | None = None

    def fail(self, error: SyncError) -> None:
        """End as a server would whose connection is lost."""
        with self._lock:
            self._error = error
            waiting = [each[3] for round_ in self._rounds.values() for each in round_.parts.values()]
            self._rounds.clear()
        for future in waiting:
            future.set_exception(self._again())

    def _again(self) -> SyncError:
        """As each process would have its own."""
        assert self._error is not None, "it has failed"
        return type(self._error)(str(self._error))

    def submit(
        self, key: tuple[int, int], rank: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags
    ) -> Future[Reply]:
        assert self.config is not None, "ranks have come in"
        future: Future[Reply] = Future()
        with self._lock:
            if self._error is not None:
                raise self._again()
            round_ = self._rounds.setdefault(key, _Round())
            assert rank not in round_.parts, f"rank {rank} submitted {key} twice"
            round_.parts[rank] = (payload, out, flags, future)
            if len(round_.parts) < self.config.world_size:
                return future
            del self._rounds[key]
        reply = self._add_up(key, round_)
        self.replies.append((*key, reply))
        for _, _, _, waiting in round_.parts.values():
            waiting.set_result(reply)
        return future

    def _add_up(self, key: tuple[int, int], round_: _Round) -> Reply:
        assert self.config is not None, "ranks have come in"
        config, (number, stream) = self.config, key
        described, num_packets = config.streams[stream], config.num_packets(stream)
        is_sum = described.operation is Operation.SUM
        total = np.full(described.size, 0 if is_sum else -np.inf)
        counted, heard = np.zeros((num_packets, config.world_size), bool), FrameFlags.NONE
        for rank, (payload, _, flags, _) in sorted(round_.parts.items()):
            values = None if payload is None else self._values(stream, payload)
            for packet in range(num_packets):
                if self.late(number, stream, packet, rank):
                    continue
                heard |= flags
                if values is not None:
                    counted[packet, rank] = True
                    where = slice(packet * config.packet_elements, (packet + 1) * config.packet_elements)
                    total[where] = total[where] + values[where] if is_sum else np.maximum(total[where], values[where])
        heard_enough = config.world_size - max(
            (sum(self.late(number, stream, packet, rank) for rank in range(config.world_size)))
            for packet in range(num_packets)
        )
        assert heard_enough >= config.needed, "the test leaves out more than the config allow"
        for _, out, _, _ in round_.parts.values():
            assert not is_sum or total.max(initial=0) <= np.iinfo(out.dtype).max
            out[:] = total
        return Reply(counted.sum(axis=1), counted, heard, config.packet_elements)

    def _values(self, stream: int, payload: np.ndarray) -> np.ndarray:
        assert self.config is not None, "ranks have come in"
        described = self.config.streams[stream]
        if described.operation is Operation.MAXIMUM:
            return payload
        table, lanes = self.config.tables[described.table], np.zeros(described.size, np.uint32)
        assert payload.nbytes == self.config.payload_bytes(stream, described.size)
        reference.lookup_indices(payload, table.bits, table.array, lanes)
        return lanes


@dataclass(frozen=True)
class InRoom(Aggregator):
    """Options that lead to a room."""

    room: Room = field(default_factory=Room)

    def client(
        self, config: SessionConfig, rank: int, session: int, timeout: timedelta, stall_timeout: timedelta
    ) -> Any:
        return _Guest(self.room, config, rank)


class _Guest:
    """A rank in a room: what its connection needs of an `AggregationClient`."""

    def __init__(self, room: Room, config: SessionConfig, rank: int) -> None:
        assert room.config in (None, config), "all ranks say the same"
        room.config = self.config = config
        self.rank = rank
        self._room = room

    def submit(
        self, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray, flags: FrameFlags = FrameFlags.NONE
    ) -> Future[Reply]:
        return self._room.submit((round_, stream), self.rank, payload, out, flags)

    def close(self, reason: str = "") -> None:
        """Nothing to end."""
