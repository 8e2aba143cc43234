"""What a server keeps of one packet of a stream: the sum of the current round, and results of earlier rounds."""
# Shapes: W = workers, E = elements of the packet

from __future__ import annotations

import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, SERVER, Packet, PacketKey, PacketKind, bitmap_bytes, seal
from gradwire.aggregator.session import FLOAT, IndexTable, Operation, SessionConfig
from gradwire.kernels import active as kernels

NEVER = -1


class AggregationSlot:
    """One aggregator of pseudocode 1, whose `agtr_idx` is (stream, packet) here.

    Args:
        config: Session configuration of the job.
        stream: Index of the stream.
        packet: Index of the packet in the stream.

    Attributes:
        expected_round: The current round, or the last one; `NEVER` before the first.
        done: If true, the current round has been answered.
        heard: Bitmap of the workers heard in the current round; the number of its set bits is `recv_count`.
        counted: Bitmap of the workers whose contribution was added.
        awaited: Bitmap of the workers that must be heard, because they missed too many rounds.
        last_heard: Last round in which each worker was heard.
        num_answered: Number of rounds answered.
        ahead: Later rounds that workers have already contributed to, by worker; only after a restart of the server.
        fills: Whether workers go on without this packet's result after a while; see `SessionConfig.fills`.
    """

    __slots__ = (
        "_accumulator", "_bitmap_bytes", "_dtype", "_elements", "_flags", "_frame", "_key", "_max_misses", "_misses",
        "_results", "_table", "_world_size", "ahead", "awaited", "counted", "done", "expected_round", "fills",
        "heard", "last_heard", "num_answered",
    )  # fmt: skip

    def __init__(self, config: SessionConfig, stream: int, packet: int) -> None:
        self.expected_round = NEVER
        self.done = True
        self.heard = self.counted = self.num_answered = 0
        self.last_heard = [NEVER] * config.world_size
        self.ahead: dict[int, int] = {}
        self.fills = config.fills(stream)
        self._key = stream, packet
        self._table: IndexTable | None = None
        if config.streams[stream].operation is Operation.SUM:
            self._table = config.tables[config.streams[stream].table]
        self._elements = config.elements(stream, packet)
        self._dtype = config.result_dtype(stream)
        self._world_size, self._max_misses = config.world_size, config.max_misses
        self._bitmap_bytes = bitmap_bytes(config.world_size)
        self._flags = 0
        self._misses: dict[int, int] = {}
        self.awaited = self._awaited()
        self._results: dict[int, np.ndarray] = {}
        self._frame = self._accumulator = np.empty(0, np.uint8)

    @property
    def missing(self) -> list[int]:
        """Workers that have not been heard in the current round."""
        return [worker for worker in range(self._world_size) if not self.heard >> worker & 1]

    def begin(self, round_: int) -> None:
        """Begin a round. Sums are formed in the frame that they will be sent in."""
        self.expected_round, self.done = round_, False
        self.heard = self.counted = self._flags = 0
        start = PACKET_HEADER_BYTES + self._bitmap_bytes
        self._frame = np.empty(start + self._elements * self._dtype.itemsize, np.uint8)
        self._accumulator = self._frame[start:].view(self._dtype)

    def hear(self, packet: Packet) -> None:
        """Add the first contribution of a worker to the current round, or note that it has none."""
        bit = 1 << packet.worker
        self.heard |= bit
        self.last_heard[packet.worker] = self.expected_round
        self._flags |= packet.flags
        if packet.body.nbytes:
            self._add(packet.body, is_first=not self.counted)
            self.counted |= bit

    def close(self, epoch: int) -> np.ndarray:
        """Answer the round: return the result packet, and keep it as long as a worker may ask for it."""
        if not self.counted:
            self._accumulator.fill(0 if self._table is not None else -np.inf)
        bitmap = self._frame[PACKET_HEADER_BYTES : PACKET_HEADER_BYTES + self._bitmap_bytes]
        bitmap[:] = np.frombuffer(self.counted.to_bytes(self._bitmap_bytes, "little"), np.uint8)
        key = PacketKey(self.expected_round, *self._key)
        seal(self._frame, PacketKind.RESULT, key, SERVER, epoch, flags=self._flags, count=self.counted.bit_count())
        oldest = min(self.last_heard)
        self._results = {round_: kept for round_, kept in self._results.items() if round_ >= oldest}
        self._results[self.expected_round] = self._frame
        self._misses = {worker: self._misses.get(worker, 0) + 1 for worker in self.missing}
        self.awaited = self._awaited()
        self.done = True
        self.num_answered += 1
        return self._frame

    def result(self, round_: int) -> np.ndarray | None:
        """Return the result of an earlier round, if it is still kept."""
        return self._results.get(round_)

    def _awaited(self) -> int:
        workers = range(self._world_size)
        return sum(1 << worker for worker in workers if self._misses.get(worker, 0) >= self._max_misses)

    def _add(self, body: np.ndarray, *, is_first: bool) -> None:
        if self._table is not None:
            kernels.lookup_indices(body, self._table.bits, self._table.array, self._accumulator, not is_first)
            return
        values = np.frombuffer(body, FLOAT) + np.float32(0)  # turns -0 into 0
        values[np.isnan(values)] = np.inf  # so that the order of contributions does not matter
        if is_first:
            self._accumulator[:] = values
        else:
            np.maximum(self._accumulator, values, out=self._accumulator)
