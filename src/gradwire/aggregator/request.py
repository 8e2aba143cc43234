"""What one worker has submitted of one stream in one round, packet by packet, and what has been answered."""
# Shapes: W = workers, P = elements of the stream, Q = its packets

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwire.aggregator.interface import Reply
from gradwire.aggregator.packet import Packet, PacketKey, bitmap_bytes, workers_of
from gradwire.aggregator.session import SessionConfig
from gradwire.wire.frame import FrameFlags

_NOTHING = np.empty(0, np.uint8)


class AggregationRequest:
    """One call of `Aggregation.submit`.

    Args:
        terms: of the job.
        round_: of the call; as all that follows.
        stream: its place in the terms.
        payload: what this worker contributes; None for nothing.
        out: where the result goes.
        flags: what this worker says.
        deadline: by when the result must be there.

    Attributes:
        num_packets: Q.
        left: packets that have not been answered.
        begun: packets that have been sent at least once, or answered before.

    Raises:
        ValueError: payload or out does not fit the stream.
    """

    def __init__(
        self, terms: SessionConfig, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray,
        flags: FrameFlags, deadline: float,
    ) -> None:  # fmt: skip
        size, lanes = terms.streams[stream].size, terms.lanes(stream)
        if out.dtype != lanes or out.shape != (size,) or not out.flags.c_contiguous:
            raise ValueError(f"Expected out to be {lanes} of {size} elements, got {out.dtype} of shape {out.shape}.")
        due = terms.payload_bytes(stream, size)
        body = None if payload is None else payload.reshape(-1).view(np.uint8)
        if body is not None and body.nbytes != due:
            raise ValueError(f"Expected a payload of {due} bytes of stream {stream}, got {body.nbytes}.")
        self.round, self.stream = round_, stream
        self.flags, self.deadline = flags, deadline
        self.num_packets = self.left = terms.num_packets(stream)
        self.begun = 0
        self._payload, self._out, self._world_size = body, out, terms.world_size
        self._elements = terms.packet_elements
        self._packet_bytes = terms.payload_bytes(stream, terms.packet_elements)
        self._words = bitmap_bytes(terms.world_size)
        self._answered = bytearray(self.num_packets)
        self._counts = np.zeros(self.num_packets, np.int64)
        self._counted = np.zeros((self.num_packets, terms.world_size), bool)
        self._said = 0

    def lacks(self, place: int) -> bool:
        """Whether a packet of it has not been answered."""
        return place < self.num_packets and not self._answered[place]

    def unanswered(self) -> Iterator[PacketKey]:
        """The packets that have been sent and not answered."""
        for place in range(self.begun):
            if not self._answered[place]:
                yield PacketKey(self.round, self.stream, place)

    def piece(self, place: int) -> np.ndarray:
        """The body of one packet."""
        if self._payload is None:
            return _NOTHING
        return self._payload[place * self._packet_bytes : (place + 1) * self._packet_bytes]

    def take(self, packet: Packet) -> None:
        """Take the result of a packet that is lacking."""
        place = packet.key.packet
        part = self._out[place * self._elements : (place + 1) * self._elements]
        part[:] = np.frombuffer(packet.body[self._words :], self._out.dtype)
        self._counts[place] = packet.num_added
        self._counted[place] = workers_of(packet.body[: self._words], self._world_size)
        self._said |= packet.flags
        self._answered[place] = 1
        self.left -= 1

    def reply(self) -> Reply:
        """Who is in the result, once it is whole."""
        assert not self.left, "some packets have not been answered"
        return Reply(self._counts, self._counted, FrameFlags(self._said), self._elements)
