"""The packet of an aggregation round: a header of 44 bytes, then a body. A datagram each, or the body of a frame.

Guarantees: arbitrary bytes lead to a `Packet` or to `FrameError`; nothing is allocated by a declared length; a flipped
bit or a missing byte anywhere fails `unpack`. The checksum guards against faults; over UDP a keyed tag stands behind
each packet as well (`gradwire.net.datagrams`), against attackers.

Layout, little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic ``GWA1`` |
| 4 | 1 | version |
| 5 | 1 | kind |
| 6 | 2 | flags |
| 8 | 8 | epoch: of the server's life |
| 16 | 8 | round |
| 24 | 4 | stream |
| 28 | 4 | index of the packet in its stream |
| 32 | 2 | worker: who sends, or 65,535 for the server |
| 34 | 2 | count: contributions in a result |
| 36 | 4 | length of the body |
| 40 | 4 | CRC-32C over header (checksum as 0) and body |

Source: THC (Li et al. 2024), appendix C. Differences: the round has 64 bits and the server's life an epoch, so an old
packet is never taken for a new one; a result names the workers that are in it; checksums.
"""
# Shapes: W = workers

from __future__ import annotations

import struct
from collections.abc import Iterable
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
_LAYOUT = struct.Struct("<4sBBHQQIIHHII")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 40
_ZERO = bytes(4)
_KEY = struct.Struct("<QII")
_WORD_BITS = 32
_KNOWN_FLAGS = int(FrameFlags.PRESENT | FrameFlags.USED | FrameFlags.NONFINITE)

assert _LAYOUT.size == PACKET_HEADER_BYTES


class PacketKind(IntEnum):
    """What a packet says. Numbers are never reused."""

    DATA = 1
    """A worker's contribution; without a body, that it has none."""
    RESULT = 2
    """Who was counted, and what their contributions make."""
    HELD = 3
    """The server has these contributions, and waits for others. For packets over UDP alone."""
    ASK = 4
    """A worker waits for the result of a contribution that is held."""
    WANTED = 5
    """The server lacks this contribution."""
    OBSOLETE = 6
    """The server has gone on without this worker, and no longer has the result: "notify straggler"."""


_KINDS = {int(kind): kind for kind in PacketKind}


class PacketKey(NamedTuple):
    """Which contribution, or which result, of one server's life."""

    round: int
    stream: int
    packet: int


class Packet(NamedTuple):
    """A packet that has been checked.

    Attributes:
        kind: what it says.
        key: of what.
        worker: who sends it; `SERVER` for the server.
        epoch: of the server's life.
        flags: what the contributor, or all contributors together, say.
        num_added: contributions in a result.
        body: uint8, a view of what was received.
    """

    kind: PacketKind
    key: PacketKey
    worker: int
    epoch: int
    flags: int
    num_added: int
    body: np.ndarray


def seal(
    frame: np.ndarray, kind: PacketKind, key: PacketKey, worker: int, epoch: int, *, flags: int = 0, count: int = 0
) -> None:
    """Write the header of a packet whose body is in place behind it: the rest of `frame`, which is uint8."""
    length = frame.nbytes - PACKET_HEADER_BYTES
    _LAYOUT.pack_into(frame.data, 0, MAGIC, VERSION, kind, flags, epoch, *key, worker, count, length, 0)
    _CHECKSUM.pack_into(frame.data, _CHECKSUM_AT, google_crc32c.value(frame))


def pack(
    kind: PacketKind, key: PacketKey, worker: int, epoch: int, body: np.ndarray | bytes = b"", *, flags: int = 0
) -> np.ndarray:
    """Return a whole packet: uint8; the body is copied."""
    content = np.frombuffer(body, np.uint8)
    frame = np.empty(PACKET_HEADER_BYTES + content.nbytes, np.uint8)
    frame[PACKET_HEADER_BYTES:] = content
    seal(frame, kind, key, worker, epoch, flags=flags)
    return frame


def unpack(datagram: bytes | memoryview | np.ndarray) -> Packet:
    """Return the packet that is exactly these bytes; its body is a view of them.

    Raises:
        FrameError: they are none.
    """
    data = np.frombuffer(datagram, np.uint8)
    if data.nbytes < PACKET_HEADER_BYTES:
        raise FrameError(f"Expected a packet of at least {PACKET_HEADER_BYTES} bytes, got {data.nbytes}.")
    header, body = data[:PACKET_HEADER_BYTES].tobytes(), data[PACKET_HEADER_BYTES:]
    magic, version, kind, flags, epoch, round_, stream, place, worker, count, length, checksum = _LAYOUT.unpack(header)
    if magic != MAGIC or version != VERSION or kind not in _KINDS or flags > _KNOWN_FLAGS:
        raise FrameError(f"Expected a packet, got magic {magic!r}, version {version}, kind {kind}, flags {flags:#x}.")
    if length != body.nbytes:
        raise FrameError(f"Expected a body of {length} bytes, got {body.nbytes}.")
    found = google_crc32c.value(header[:_CHECKSUM_AT] + _ZERO)
    if google_crc32c.extend(found, body) != checksum:
        raise FrameError(f"Expected checksum {checksum:#010x} of a packet, got another. The network corrupts data.")
    return Packet(_KINDS[kind], PacketKey(round_, stream, place), worker, epoch, flags, count, body)


def keys_to(keys: Iterable[PacketKey]) -> bytes:
    """The body of HELD."""
    return b"".join(_KEY.pack(*key) for key in keys)


def keys_of(body: np.ndarray) -> list[PacketKey]:
    """Which contributions a HELD is about.

    Raises:
        FrameError: the body is not a list of them.
    """
    if body.nbytes % _KEY.size:
        raise FrameError(f"Expected keys of {_KEY.size} bytes each, got {body.nbytes} bytes.")
    return [PacketKey(*found) for found in _KEY.iter_unpack(body.tobytes())]


def bitmap_bytes(world_size: int) -> int:
    """Bytes of the bitmap of workers at the front of a result: whole words, so that lanes are aligned behind it."""
    return -(-world_size // _WORD_BITS) * (_WORD_BITS // 8)


def workers_of(bitmap: np.ndarray, world_size: int) -> np.ndarray:
    """Who is in a bitmap: bool[W]."""
    bits = np.unpackbits(bitmap, count=world_size, bitorder="little")
    return bits.astype(bool)
