"""What a server keeps of one packet of one stream: the sum of the round that is under way, and results before it."""
# Shapes: W = workers, E = elements of the packet

from __future__ import annotations

import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, SERVER, Packet, PacketKey, PacketKind, bitmap_bytes, seal
from gradwire.aggregator.session import FLOAT, IndexTable, Operation, SessionConfig
from gradwire.kernels import active as kernels

NEVER = -1


class AggregationSlot:
    """One aggregator of Pseudocode 1; `agtr_idx` there is (stream, packet) here.

    Args:
        terms: of the job.
        stream: of which it is a part.
        packet: which part.

    Attributes:
        expected_round: the round that is under way, or was last; `NEVER` before the first.
        done: it has been answered.
        heard: bitmap of the workers that were heard in it: the bits that are set are `recv_count`.
        counted: bitmap of those whose contribution was added.
        closed: rounds that were answered.
        awaited: bitmap of the workers that must be heard, because they have missed too many.
        last_heard: of each worker, the last round that it was heard in.
        ahead: rounds that workers have asked for before their time, by worker; after a restart alone.
    """

    __slots__ = (
        "_dtype", "_elements", "_flags", "_frame", "_key", "_lanes", "_max_misses", "_misses", "_operation", "_results",
        "_table", "_words", "_world_size", "ahead", "awaited", "closed", "counted", "done", "expected_round", "heard",
        "last_heard",
    )  # fmt: skip

    def __init__(self, terms: SessionConfig, stream: int, packet: int) -> None:
        self.expected_round = NEVER
        self.done = True
        self.heard = self.counted = self.closed = 0
        self.last_heard = [NEVER] * terms.world_size
        self.ahead: dict[int, int] = {}
        self._key = stream, packet
        self._operation = terms.streams[stream].operation
        self._table: IndexTable | None = None
        if self._operation is Operation.SUM:
            self._table = terms.tables[terms.streams[stream].table]
        self._elements = terms.elements(stream, packet)
        self._dtype = terms.lanes(stream)
        self._world_size, self._max_misses = terms.world_size, terms.max_misses
        self._words = bitmap_bytes(terms.world_size)
        self._flags = 0
        self._misses: dict[int, int] = {}
        self.awaited = self._awaited()
        self._results: dict[int, np.ndarray] = {}
        self._frame = self._lanes = np.empty(0, np.uint8)

    @property
    def missing(self) -> list[int]:
        """Workers that have not been heard in this round."""
        return [worker for worker in range(self._world_size) if not self.heard >> worker & 1]

    def begin(self, round_: int) -> None:
        """Wait for the contributions to a round. Sums are formed where they will be sent from."""
        self.expected_round, self.done = round_, False
        self.heard = self.counted = self._flags = 0
        front = PACKET_HEADER_BYTES + self._words
        self._frame = np.empty(front + self._elements * self._dtype.itemsize, np.uint8)
        self._lanes = self._frame[front:].view(self._dtype)

    def hear(self, packet: Packet) -> None:
        """Take one contribution of a worker that has not been heard in this round, or hear that it has none."""
        bit = 1 << packet.worker
        self.heard |= bit
        self.last_heard[packet.worker] = self.expected_round
        self._flags |= packet.flags
        if packet.body.nbytes:
            self._add(packet.body, first=not self.counted)
            self.counted |= bit

    def close(self, epoch: int) -> np.ndarray:
        """Return the result of the round as a packet, which is kept as long as a worker may ask for it."""
        if not self.counted:
            self._lanes.fill(0 if self._table is not None else -np.inf)
        front = self._frame[PACKET_HEADER_BYTES : PACKET_HEADER_BYTES + self._words]
        front[:] = np.frombuffer(self.counted.to_bytes(self._words, "little"), np.uint8)
        key = PacketKey(self.expected_round, *self._key)
        seal(self._frame, PacketKind.RESULT, key, SERVER, epoch, flags=self._flags, count=self.counted.bit_count())
        oldest = min(self.last_heard)
        self._results = {round_: kept for round_, kept in self._results.items() if round_ >= oldest}
        self._results[self.expected_round] = self._frame
        self._misses = {worker: self._misses.get(worker, 0) + 1 for worker in self.missing}
        self.awaited = self._awaited()
        self.done = True
        self.closed += 1
        return self._frame

    def result(self, round_: int) -> np.ndarray | None:
        """The result of an earlier round, while it is kept."""
        return self._results.get(round_)

    def _awaited(self) -> int:
        workers = range(self._world_size)
        return sum(1 << worker for worker in workers if self._misses.get(worker, 0) >= self._max_misses)

    def _add(self, body: np.ndarray, *, first: bool) -> None:
        if self._table is not None:
            kernels.lookup_indices(body, self._table.bits, self._table.array, self._lanes, not first)
            return
        values = np.frombuffer(body, FLOAT) + np.float32(0)  # which makes one zero of two
        values[np.isnan(values)] = np.inf  # so that the order of contributions does not matter
        if first:
            self._lanes[:] = values
        else:
            np.maximum(self._lanes, values, out=self._lanes)
