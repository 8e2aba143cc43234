"""Datagrams of a session whose packets a program adds up: the same guards as the program's, for sockets.

Workers and the server use them for all packets, those that reach Python as well. A received packet gets the checksum
that its tag replaces, so that whoever reads it need not know of tags.

Differences from `gradwire.net.datagrams`: datagrams have no numbers. A replayed packet is one that the protocol knows.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable

import google_crc32c
import numpy as np

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, field
from gradwire.aggregator.xdp.siphash import KEY_BYTES, TAG_BYTES, siphash
from gradwire.net.datagrams import DatagramReceiver, DatagramSender
from gradwire.net.handshake import JobKey

_CHECKSUM = field("checksum")
_TAG = struct.Struct("<Q")
_USE = "datagrams of the worker, added up in the kernel"


class ChecksumSender(DatagramSender):
    """Nothing behind the packet, whose header has a checksum."""

    trailer_bytes = 0

    def trailer(self, packet: np.ndarray) -> bytes:
        return b""


class ChecksumReceiver(DatagramReceiver):
    """The packet, whose header has a checksum, as it came."""

    def open(self, datagram: memoryview) -> memoryview | None:
        return datagram


class SipHashSender(DatagramSender):
    """A tag of 8 bytes behind the packet, by a key of 16 bytes."""

    trailer_bytes = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._key = np.frombuffer(key, np.uint64)

    def trailer(self, packet: np.ndarray) -> bytes:
        return _TAG.pack(siphash(packet, self._key))


class SipHashReceiver(DatagramReceiver):
    """The other end of a `SipHashSender`."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._key = np.frombuffer(key, np.uint64)

    def open(self, datagram: memoryview) -> memoryview | None:
        packet = datagram[: max(0, len(datagram) - TAG_BYTES)]
        tag = _TAG.pack(siphash(np.frombuffer(packet, np.uint8), self._key))
        if len(packet) < PACKET_HEADER_BYTES or not hmac.compare_digest(tag, datagram[len(packet) :]):
            self.forged += 1
            return None
        checksum = packet[_CHECKSUM.offset : _CHECKSUM.offset + _CHECKSUM.num_bytes]
        checksum[:] = bytes(_CHECKSUM.num_bytes)
        checksum[:] = struct.pack("<I", google_crc32c.value(np.frombuffer(packet, np.uint8)))
        return packet


def worker_key(derive: Callable[[str], bytes]) -> bytes:
    """Return the key of what a worker sends, of 16 bytes. `derive` returns the key of its connection for a use."""
    return derive(_USE)[:KEY_BYTES]


def server_key(key: JobKey, epoch: int) -> bytes:
    """Return the key of what an incarnation of the server sends, of 16 bytes: one for all workers."""
    return key.mac(b"results added up in the kernel", epoch.to_bytes(8, "little"))[:KEY_BYTES]


def ends(guard: str, sent: bytes, received: bytes) -> tuple[DatagramSender, DatagramReceiver]:
    """Return both directions of an end, by the keys of what it sends and of what it receives."""
    if guard == "crc32c":
        return ChecksumSender(sent), ChecksumReceiver(received)
    return SipHashSender(sent), SipHashReceiver(received)
