"""Authenticated datagrams: UDP packets with a number and a tag behind each.

Each direction between two ends has a key of its own (`gradwire.net.handshake.Handshake.derive`), which no other worker
is given. The number grows with each datagram of the direction.

Guarantees: a datagram without the tag of its direction is dropped, and so is one whose number was used, or is older
than `WINDOW` datagrams. Neither makes an end send anything. Does not encrypt.

Layout behind the packet, little-endian: 8 bytes number, 16 bytes tag (`gradwire.wire.mac`).

Source: RFC 4303 (ESP), section 3.4.3, for the window of numbers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.wire.mac import TAG_BYTES, FrameMac

NUMBER_BYTES = 8
TRAILER_BYTES = NUMBER_BYTES + TAG_BYTES
MAX_DATAGRAM_BYTES = 65_507
MAX_PACKET_BYTES = MAX_DATAGRAM_BYTES - TRAILER_BYTES
WINDOW = 4096
"""Datagrams of a direction may overtake fewer than this many others."""
_WINDOW_BITS = (1 << WINDOW) - 1
BUFFER_BYTES = 8 << 20
"""Size requested for the kernel's buffers. The kernel may grant less (net.core.rmem_max)."""
SEND_SECONDS = 1
"""Longest wait for room in the kernel. After it, a packet is lost."""
Address = tuple[str, int]
_IP_MTU, _IPV6_MTU = (socket.IPPROTO_IP, 14), (socket.IPPROTO_IPV6, 24)  # Linux's, which Python does not name
# With Linux's SO_RCVBUFFORCE and SO_SNDBUFFORCE, which Python does not name and net.core.rmem_max does not limit.
_BUFFERS = ((socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32))


def path_mtu(address: Address) -> int | None:
    """Return the largest IP packet that this host knows to reach an address, in bytes; None if it does not say."""
    if sys.platform != "linux":
        return None
    is_ipv6 = ":" in address[0]
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect(address)
        return any_socket.getsockopt(*(_IPV6_MTU if is_ipv6 else _IP_MTU))


class DatagramSender:
    """One direction of datagrams, at its sender.

    Args:
        key: 32 bytes for this direction only.
    """

    trailer_bytes = TRAILER_BYTES

    def __init__(self, key: bytes) -> None:
        self._mac = FrameMac(key)
        self._num_sent = 0

    def trailer(self, packet: np.ndarray) -> bytes:
        """Return the bytes behind a packet. Each call counts as a datagram, also if the packet was sent before."""
        number = self._num_sent
        self._num_sent += 1
        return number.to_bytes(NUMBER_BYTES, "little") + self._mac.tag(number, b"", packet)


class DatagramReceiver:
    """One direction of datagrams, at its receiver.

    Args:
        key: 32 bytes for this direction only.

    Attributes:
        forged: Number of datagrams dropped for their tag.
        replayed: Number of datagrams dropped for their number.
    """

    def __init__(self, key: bytes) -> None:
        self.forged = self.replayed = 0
        self._mac = FrameMac(key)
        self._next = 0  # above all numbers so far
        self._seen = 0  # bit i: number _next - 1 - i has come

    def open(self, datagram: memoryview) -> memoryview | None:
        """Return the packet in a datagram; None if it is forged or a replay."""
        packet, trailer = datagram[: max(0, len(datagram) - TRAILER_BYTES)], datagram[-TRAILER_BYTES:]
        number = int.from_bytes(trailer[:NUMBER_BYTES], "little")
        if len(trailer) < TRAILER_BYTES or not self._mac.matches(
            bytes(trailer[NUMBER_BYTES:]), number, b"", np.frombuffer(packet, np.uint8)
        ):
            self.forged += 1
        elif not self._is_new(number):
            self.replayed += 1
        else:
            return packet
        return None

    def _is_new(self, number: int) -> bool:
        """Whether a proven number has not come before; it has now."""
        ahead = number + 1 - self._next
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & _WINDOW_BITS
            self._next = number + 1
            return True
        if -ahead >= WINDOW:  # first: a bit for an old number would take memory
            return False
        bit = 1 << -ahead
        if self._seen & bit:
            return False
        self._seen |= bit
        return True


class DatagramSocket:
    """A UDP socket of a job.

    Args:
        address: Address to bind to; port 0 for any port.
        buffer_bytes: Size requested for the kernel's buffers.
        shared: Whether other sockets of this machine may bind to the same address, for multicast.

    Attributes:
        address: Address that the socket is bound to.
    """

    def __init__(self, address: Address, *, buffer_bytes: int = BUFFER_BYTES, shared: bool = False) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
        # A limit of the kernel's: one of Python's would make each call wait, those that must not as well.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        if shared:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option, beyond in _BUFFERS:
            self.socket.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
            if sys.platform == "linux":
                with contextlib.suppress(PermissionError):  # for root alone
                    self.socket.setsockopt(socket.SOL_SOCKET, beyond, buffer_bytes)
        try:
            self.socket.bind(address)
        except OSError:
            self.socket.close()
            raise
        self.address: Address = self.socket.getsockname()[:2]
        self._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES + 1))

    def join(self, group: str, interface: str) -> None:
        """Receive what is sent to a multicast group, on the interface with this address."""
        if ":" in group:
            raise OptionError(f"{group!r} is not an IPv4 multicast group. Pass one of 239.0.0.0/8.")
        membership = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton(interface))
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)

    def multicast_from(self, interface: str) -> None:
        """Send multicast packets from the interface with this address, and to this machine as well."""
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)

    def send(self, packet: np.ndarray, address: Address, sender: DatagramSender) -> None:
        """Send one packet. Waits for room in the kernel; a packet that the kernel refuses is lost."""
        buffers: list[Any] = [packet.data, sender.trailer(packet)]
        with contextlib.suppress(OSError):
            self.socket.sendmsg(buffers, [], 0, address)

    def receive(self, most: int) -> Iterator[tuple[Address, memoryview]]:
        """Yield the datagrams that have arrived, with their sources, each valid until the next. Never waits.

        Reads at most `most` datagrams, so that a flood of forged ones holds nobody up.
        """
        for _ in range(most):
            try:
                num_bytes, source = self.socket.recvfrom_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except OSError:  # nothing has arrived; or an error of an earlier send
                return
            yield source[:2], self._buffer[:num_bytes]

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()
