"""Packets of aggregation: a header of 44 bytes and a body, sent as a UDP datagram or as the body of a TCP frame.

Guarantees: `unpack` turns arbitrary bytes into a `Packet` or raises `FrameError`, allocates nothing by a declared
length, and rejects a packet with any flipped bit or missing byte. The checksum protects against faults. Over UDP, a
keyed tag behind each packet protects against attackers (`gradwire.net.datagrams`).

Layout, little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic ``GWA1`` |
| 4 | 1 | version |
| 5 | 1 | kind |
| 6 | 2 | flags |
| 8 | 8 | epoch: incarnation of the server |
| 16 | 8 | round |
| 24 | 4 | stream |
| 28 | 4 | index of the packet in its stream |
| 32 | 2 | worker: sender, 65,535 for the server |
| 34 | 2 | count: number of contributions in a result |
| 36 | 4 | length of the body in bytes |
| 40 | 4 | CRC-32C of the header, with this field as 0, and the body |

Source: THC (Li et al. 2024), appendix C. Differences: rounds have 64 bits and each incarnation of a server an epoch of
its own, so that an old packet is never taken for a new one; a result names the workers in it; there is a checksum.
"""
# Shapes: W = workers

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import google_crc32c
import numpy as np

from gradwire.core.errors import FrameError
from gradwire.wire.frame import FrameFlags

MAGIC = b"GWA1"
VERSION = 1
PACKET_HEADER_BYTES = 44
MAX_ROUND = (1 << 64) - 2
SERVER = 0xFFFF
_FIELDS = {
    "magic": "4s", "version": "B", "kind": "B", "flags": "H", "epoch": "Q", "round": "Q", "stream": "I", "packet": "I",
    "worker": "H", "count": "H", "length": "I", "checksum": "I",
}  # fmt: skip
_LAYOUT = struct.Struct("<" + "".join(_FIELDS.values()))
_CHECKSUM = struct.Struct("<I")
_ZERO = bytes(4)
_KEY = struct.Struct("<QII")
_WORD_BITS = 32
KNOWN_FLAGS = int(FrameFlags.PRESENT | FrameFlags.USED | FrameFlags.NONFINITE)


class HeaderField(NamedTuple):
    """Place of a field of the header, in bytes."""

    offset: int
    num_bytes: int


def field(name: str) -> HeaderField:
    """Return the place of a field: of those in the table above, by its first word (``"packet"`` for the index)."""
    before = list(_FIELDS)[: list(_FIELDS).index(name)]
    return HeaderField(struct.calcsize("<" + "".join(_FIELDS[each] for each in before)), struct.calcsize(_FIELDS[name]))


_CHECKSUM_AT = field("checksum").offset
assert _LAYOUT.size == PACKET_HEADER_BYTES


class PacketKind(IntEnum):
    """Meaning of a packet. Numbers are never reused."""

    DATA = 1
    """A worker's contribution. An empty body means that the worker has nothing to add."""
    RESULT = 2
    """The aggregate of all counted contributions, and who was counted."""
    HELD = 3
    """The server has received these contributions and waits for others. Sent over UDP only."""
    ASK = 4
    """A worker asks again for the result of a contribution that the server holds."""
    WANTED = 5
    """The server does not have this contribution, and asks for it."""
    OBSOLETE = 6
    """The server has gone on without this worker and no longer has the result ("notify straggler")."""
    DIGEST = 7
    """Hashes of results that the server has sent to a multicast group."""


_KINDS = {int(kind): kind for kind in PacketKind}


class PacketKey(NamedTuple):
    """Identifies a contribution or a result within one incarnation of the server."""

    round: int
    stream: int
    packet: int


class Packet(NamedTuple):
    """A verified packet.

    Attributes:
        kind: Meaning of the packet.
        key: Contribution or result that it is about.
        worker: Sender; `SERVER` for the server.
        epoch: Incarnation of the server.
        flags: Flags of the contributor, or the union of those of all contributors.
        num_added: Number of contributions in a result.
        body: uint8 view of the received bytes.
    """

    kind: PacketKind
    key: PacketKey
    worker: int
    epoch: int
    flags: int
    num_added: int
    body: np.ndarray


@dataclass
class PacketCounters:
    """Packet counts of a worker or of the server.

    Attributes:
        sent: Packets sent, retransmissions included.
        sent_again: Contributions and results that had been sent before.
        received: Packets received, except for forged and dropped ones.
        forged: Datagrams without a valid tag of this end's peers: damaged, or from others.
        replayed: Datagrams that had come before, with their numbers.
        dropped: Datagrams dropped on purpose (option ``drop``).
        corrupt: Received bytes that are not a packet: truncated, or with a flipped bit.
        stale: Packets of another incarnation of the server.
        refused: Packets that this sender may not send.
        duplicates: Contributions that were already there, and results that nobody waited for.
        late: Contributions to a sum that had been answered without them.
        taken: Contributions that were added or noted as empty, and results that were waited for.
        filled: Results that did not come in time, and that the worker has replaced by zeros.
        abandoned: Sums that were not complete when a worker that had filled them sent its next contribution.
    """

    sent: int = 0
    sent_again: int = 0
    received: int = 0
    forged: int = 0
    replayed: int = 0
    dropped: int = 0
    corrupt: int = 0
    stale: int = 0
    refused: int = 0
    duplicates: int = 0
    late: int = 0
    taken: int = 0
    filled: int = 0
    abandoned: int = 0

    @classmethod
    def total(cls, counters: Iterable[PacketCounters]) -> PacketCounters:
        """Return the sums of several counts."""
        columns = zip(*(vars(each).values() for each in counters))
        return cls(*map(sum, columns))

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in vars(self).items())


def seal(
    frame: np.ndarray, kind: PacketKind, key: PacketKey, worker: int, epoch: int, *, flags: int = 0, count: int = 0
) -> None:
    """Write the header of a packet to `frame`, uint8, which already holds the body behind it."""
    length = frame.nbytes - PACKET_HEADER_BYTES
    _LAYOUT.pack_into(frame.data, 0, MAGIC, VERSION, kind, flags, epoch, *key, worker, count, length, 0)
    _CHECKSUM.pack_into(frame.data, _CHECKSUM_AT, google_crc32c.value(frame))


def pack(
    kind: PacketKind, key: PacketKey, worker: int, epoch: int, body: np.ndarray | bytes = b"", *, flags: int = 0
) -> np.ndarray:
    """Return a complete packet, uint8, with a copy of the body."""
    content = np.frombuffer(body, np.uint8)
    frame = np.empty(PACKET_HEADER_BYTES + content.nbytes, np.uint8)
    frame[PACKET_HEADER_BYTES:] = content
    seal(frame, kind, key, worker, epoch, flags=flags)
    return frame


def unpack(datagram: bytes | memoryview | np.ndarray) -> Packet:
    """Verify received bytes and return the packet; its body is a view of them.

    Raises:
        FrameError: The bytes are not exactly one packet.
    """
    data = np.frombuffer(datagram, np.uint8)
    if data.nbytes < PACKET_HEADER_BYTES:
        raise FrameError(f"Expected a packet of at least {PACKET_HEADER_BYTES} bytes, got {data.nbytes}.")
    header, body = data[:PACKET_HEADER_BYTES].tobytes(), data[PACKET_HEADER_BYTES:]
    magic, version, kind, flags, epoch, round_, stream, place, worker, count, length, checksum = _LAYOUT.unpack(header)
    if magic != MAGIC or version != VERSION or kind not in _KINDS or flags > KNOWN_FLAGS:
        raise FrameError(f"Not a packet: magic {magic!r}, version {version}, kind {kind}, flags {flags:#x}.")
    if length != body.nbytes:
        raise FrameError(f"Expected a body of {length} bytes, got {body.nbytes}.")
    found = google_crc32c.value(header[:_CHECKSUM_AT] + _ZERO)
    if google_crc32c.extend(found, body) != checksum:
        raise FrameError(f"A packet does not match its checksum {checksum:#010x}. The network corrupts data.")
    return Packet(_KINDS[kind], PacketKey(round_, stream, place), worker, epoch, flags, count, body)


def keys_to(keys: Iterable[PacketKey]) -> bytes:
    """Return the body of a HELD packet."""
    return b"".join(_KEY.pack(*key) for key in keys)


def keys_of(body: np.ndarray) -> list[PacketKey]:
    """Return the contributions that a HELD packet lists.

    Raises:
        FrameError: The body is not a list of keys.
    """
    if body.nbytes % _KEY.size:
        raise FrameError(f"Expected keys of {_KEY.size} bytes each, got {body.nbytes} bytes.")
    return [PacketKey(*found) for found in _KEY.iter_unpack(body.tobytes())]


def bitmap_bytes(world_size: int) -> int:
    """Bytes of the bitmap of workers at the start of a result: whole words, so that the sums behind it are aligned."""
    return -(-world_size // _WORD_BITS) * (_WORD_BITS // 8)


def workers_of(bitmaps: np.ndarray, world_size: int) -> np.ndarray:
    """Return which workers bitmaps contain, bool[..., W]. Bitmaps are uint8[..., B]."""
    return np.unpackbits(bitmaps, axis=-1, count=world_size, bitorder="little").astype(bool)
