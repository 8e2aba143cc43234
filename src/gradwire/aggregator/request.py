"""A worker's contribution to one stream in one round, its result as packets arrive, and the reply."""
# Shapes: W = workers, P = elements of a stream, Q = its packets

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from gradwire.aggregator.packet import Packet, PacketKey, bitmap_bytes, workers_of
from gradwire.aggregator.session import IndexTable, Operation, SessionConfig
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import INDEX_CHUNK, index_bytes, widths
from gradwire.kernels.layout import ceil_div
from gradwire.wire.frame import FrameFlags

_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, eq=False)
class Reply:
    """Who is in a result. Identical on all workers, as the result is, except for packets that a worker has filled.

    Attributes:
        counts: Number of contributions in each packet, int64[Q]. Decoding divides by it.
        counted: Which workers are in each packet, bool[Q, W]. A worker that submitted and was not counted keeps its
            gradient.
        flags: Union of the flags of all workers that were heard.
        packet_elements: Elements per packet of the stream, except for the last.
        filled: Which packets did not come in time, bool[Q]. Their sums are 0, as if nobody had contributed. This rank
            does not know who is in them for the others.
    """

    counts: np.ndarray
    counted: np.ndarray
    flags: FrameFlags
    packet_elements: int
    filled: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Reply]) -> Reply:
        """Return the reply to a stream from those to consecutive packets of it."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])  # one row for each packet
            for name, value in vars(parts[0]).items()
            if isinstance(value, np.ndarray)
        }
        return replace(parts[0], flags=reduce(or_, (part.flags for part in parts)), **arrays)

    def counts_of_blocks(self, block: int, num_blocks: int) -> np.ndarray:
        """Return the counts per block of the stream, int64[num_blocks], for `LookupCompressor.finalize_blocks`.

        Raises:
            ValueError: Counts differ, and packets are not whole blocks.
        """
        return self._by_block(self.counts, block, num_blocks)

    def counted_blocks(self, worker: int, block: int, num_blocks: int) -> np.ndarray:
        """Return which blocks contain a worker's contribution, bool[num_blocks]."""
        return self._by_block(self.counted[:, worker], block, num_blocks)

    def filled_blocks(self, block: int, num_blocks: int) -> np.ndarray:
        """Return which blocks were filled with zeros, bool[num_blocks]."""
        return self._by_block(self.filled, block, num_blocks)

    def _by_block(self, values: np.ndarray, block: int, num_blocks: int) -> np.ndarray:
        if (values == values[0]).all():
            return np.full(num_blocks, values[0], values.dtype)
        if self.packet_elements % block:
            raise ValueError(
                f"Packets of {self.packet_elements} elements are not whole blocks of {block}, and not all workers are "
                "in all packets. Choose packet_elements as a multiple of the block."
            )
        return np.repeat(values, self.packet_elements // block)[:num_blocks]


class AggregationRequest:
    """One call of `AggregationClient.submit`, which documents the arguments.

    Args:
        config: Session configuration of the job.
        round_: Round of the contribution.
        stream: Index of the stream.
        payload: The contribution, or None.
        out: Destination of the result.
        flags: Flags of this worker.
        deadline: When the result must be complete, on the caller's clock.

    Attributes:
        num_packets: Number of packets Q.
        num_missing: Number of packets without a result.
        num_sent: Packets before this index have been sent at least once, or were answered before.

    Raises:
        ValueError: `payload` or `out` does not fit the stream.
    """

    def __init__(
        self, config: SessionConfig, round_: int, stream: int, payload: np.ndarray | None, out: np.ndarray,
        flags: FrameFlags, deadline: float,
    ) -> None:  # fmt: skip
        size, body = config.streams[stream].size, checked_body(config, stream, payload, out)
        self.round, self.stream = round_, stream
        self.flags, self.deadline = flags, deadline
        self.num_packets = self.num_missing = config.num_packets(stream)
        self.num_sent = 0
        self._out, self._world_size, self._elements = out, config.world_size, config.packet_size(stream)
        self._packet_bytes = config.payload_bytes(stream, self._elements)
        is_cut = config.streams[stream].operation is Operation.SUM and self._elements % INDEX_CHUNK
        if body is not None and is_cut:
            body = cut_chunks(body, size, config.tables[config.streams[stream].table], self._elements)
        self._payload = body
        self._bitmap_bytes = bitmap_bytes(config.world_size)
        self._answered = bytearray(self.num_packets)
        self._counts = np.zeros(self.num_packets, np.int64)
        self._counted = np.zeros((self.num_packets, self._bitmap_bytes), np.uint8)  # bitmaps of workers
        self._filled = np.zeros(self.num_packets, bool)
        self._all_flags = 0

    def lacks(self, packet: int) -> bool:
        """Whether the result of a packet is missing."""
        return packet < self.num_packets and not self._answered[packet]

    def unanswered(self) -> Iterator[PacketKey]:
        """Yield the packets that were sent and have no result."""
        for packet in range(self.num_sent):
            if not self._answered[packet]:
                yield PacketKey(self.round, self.stream, packet)

    def body(self, packet: int) -> np.ndarray:
        """Return the body of a packet."""
        if self._payload is None:
            return _EMPTY
        return self._payload[packet * self._packet_bytes : (packet + 1) * self._packet_bytes]

    def take(self, result: Packet) -> None:
        """Take the result of a packet that lacks one."""
        packet = result.key.packet
        out = self._place(packet)
        out[:] = np.frombuffer(result.body[self._bitmap_bytes :], out.dtype)
        self._counts[packet] = result.num_added
        self._counted[packet] = result.body[: self._bitmap_bytes]
        self._all_flags |= result.flags
        self._answer(packet)

    def fill(self, packet: int) -> None:
        """Replace the sum of a packet that lacks a result by zeros."""
        self._place(packet)[:] = 0
        self._filled[packet] = True
        self._answer(packet)

    def _place(self, packet: int) -> np.ndarray:
        return self._out[packet * self._elements : (packet + 1) * self._elements]

    def _answer(self, packet: int) -> None:
        self._answered[packet] = 1
        self.num_missing -= 1

    def reply(self) -> Reply:
        """Return who is in the result, once it is complete."""
        assert not self.num_missing, "some packets have no result"
        counted = workers_of(self._counted, self._world_size)
        return Reply(self._counts, counted, FrameFlags(self._all_flags), self._elements, self._filled)


def checked_body(config: SessionConfig, stream: int, payload: np.ndarray | None, out: np.ndarray) -> np.ndarray | None:
    """Return the bytes of a contribution, uint8, or None.

    Raises:
        ValueError: `payload` or `out` does not fit the stream.
    """
    size, dtype = config.streams[stream].size, config.result_dtype(stream)
    if out.dtype != dtype or out.shape != (size,) or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous {dtype} of {size} elements, not {out.dtype} of {out.shape}.")
    num_bytes = config.payload_bytes(stream, size)
    body = None if payload is None else payload.reshape(-1).view(np.uint8)
    if body is not None and body.nbytes != num_bytes:
        raise ValueError(f"A payload takes {num_bytes} bytes of stream {stream}, not {body.nbytes}.")
    return body


def cut_chunks(packed: np.ndarray, size: int, table: IndexTable, elements: int) -> np.ndarray:
    """Repack indices in packets that are shorter than a chunk.

    Args:
        packed: Indices in chunks of 1,024, as compressors pack them: uint8.
        size: Number of indices P.
        table: Their table.
        elements: Indices per packet, a multiple of 8 and a divisor of 1,024.

    Returns:
        The bodies of all packets, one behind the other: uint8. Each is packed as a chunk of its own.
    """
    indices = np.empty(size, np.uint8)
    kernels.lookup_indices(packed, table.bits, np.arange(1 << table.bits, dtype=np.uint32), indices)
    whole = size // elements
    rows = _planar(indices[: whole * elements].reshape(whole, elements), table.bits)
    last = _planar(indices[whole * elements :].reshape(1, -1), table.bits)
    return np.concatenate([rows.reshape(-1), last.reshape(-1)])


def _planar(indices: np.ndarray, bits: int) -> np.ndarray:
    """Return packed rows of indices, uint8[Q, index_bytes(E, bits)], each row as one chunk."""
    num_rows, elements = indices.shape
    out = np.empty((num_rows, index_bytes(elements, bits)), np.uint8)
    at = shift = 0
    for width in widths(bits):
        per_byte, num_bytes = 8 // width, ceil_div(elements * width, 8)
        planes = np.zeros((num_rows, per_byte * num_bytes), np.uint8)
        planes[:, :elements] = indices >> shift & (1 << width) - 1
        shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
        packed = planes.reshape(num_rows, per_byte, num_bytes) << shifts
        out[:, at : at + num_bytes] = np.bitwise_or.reduce(packed, axis=1)
        at, shift = at + num_bytes, shift + width
    return out
