"""Datagrams of a session whose packets a program adds up: the same guards as the program's, for sockets.

Workers and the server use them for all packets, those that reach Python as well. A received packet gets the checksum
that its tag replaces, so that whoever reads it need not know of tags.

Guarantees under SipHash: those of `gradwire.net.datagrams`. A datagram without the tag of its direction is dropped, and
so is one whose number was used. Numbers of the server's programs begin at 2^63 and have a window of their own, because
programs and Python send at their own pace. Each packet of a worker's goes to one of the two by its content, so each
sees every repetition of what it takes.

Differences: tags of 8 bytes, not 16. Under the checksum, datagrams have neither tags nor numbers.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from typing import NamedTuple

import google_crc32c
import numpy as np

from gradwire.aggregator.datagram_keys import FROM_SERVER, FROM_WORKER
from gradwire.aggregator.packet import PACKET_HEADER_BYTES, field
from gradwire.aggregator.xdp.layout import FIRST_NUMBER
from gradwire.aggregator.xdp.siphash import KEY_BYTES, TAG_BYTES, siphash
from gradwire.net.datagrams import NUMBER_BYTES, DatagramReceiver, DatagramSender

_CHECKSUM = field("checksum")
_TAG = struct.Struct("<Q")


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
    """A number, and a tag of 8 bytes over packet and number, behind the packet, by a key of 16 bytes."""

    trailer_bytes = NUMBER_BYTES + TAG_BYTES

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._key = np.frombuffer(key, np.uint64)

    def trailer(self, packet: np.ndarray) -> bytes:
        number = self._num_sent.to_bytes(NUMBER_BYTES, "little")
        self._num_sent += 1
        return number + _TAG.pack(siphash(np.concatenate((packet, np.frombuffer(number, np.uint8))), self._key))


class SipHashReceiver(DatagramReceiver):
    """The other end of a `SipHashSender`."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._key = np.frombuffer(key, np.uint64)
        self._windows = DatagramReceiver(key), DatagramReceiver(key)  # of Python's numbers, and of a program's

    def open(self, datagram: memoryview) -> memoryview | None:
        tagged = datagram[: max(0, len(datagram) - TAG_BYTES)]
        packet = tagged[: max(0, len(tagged) - NUMBER_BYTES)]
        tag = _TAG.pack(siphash(np.frombuffer(tagged, np.uint8), self._key))
        if len(packet) < PACKET_HEADER_BYTES or not hmac.compare_digest(tag, datagram[len(tagged) :]):
            self.forged += 1
            return None
        number = int.from_bytes(tagged[len(packet) :], "little")
        if not self._windows[number >= FIRST_NUMBER]._is_new(number):
            self.replayed += 1
            return None
        checksum = packet[_CHECKSUM.offset : _CHECKSUM.offset + _CHECKSUM.num_bytes]
        checksum[:] = bytes(_CHECKSUM.num_bytes)
        checksum[:] = struct.pack("<I", google_crc32c.value(np.frombuffer(packet, np.uint8)))
        return packet


class Keys(NamedTuple):
    """Keys of a worker's datagrams, of 16 bytes each: of what the worker sends, and of what the server sends it."""

    from_worker: bytes
    from_server: bytes


def keys(derive: Callable[[str], bytes]) -> Keys:
    """Return the keys of a worker. `derive` returns the key of its connection for a use."""
    return Keys(*(derive(f"{who}, added up in the kernel")[:KEY_BYTES] for who in (FROM_WORKER, FROM_SERVER)))


def ends(guard: str, sent: bytes, received: bytes) -> tuple[DatagramSender, DatagramReceiver]:
    """Return both directions of an end, by the keys of what it sends and of what it receives."""
    if guard == "crc32c":
        return ChecksumSender(sent), ChecksumReceiver(received)
    return SipHashSender(sent), SipHashReceiver(received)
