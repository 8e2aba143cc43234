"""Authenticated datagrams: UDP with a keyed tag of 16 bytes after each packet.

Guarantees: a datagram without the tag of this job and this incarnation of the server is dropped unread. Nobody without
the job key can make an end send anything. The tag does not tell holders of the key apart, does not encrypt, and does
not detect a replay within one incarnation of the server. There the protocol knows every packet, and answers go to the
worker's own address, not to the source of the replay.

Source: BLAKE2 (RFC 7693) with a key, 16 bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.net.handshake import JobKey

TAG_BYTES = 16
MAX_DATAGRAM_BYTES = 65_507
MAX_PACKET_BYTES = MAX_DATAGRAM_BYTES - TAG_BYTES
BUFFER_BYTES = 8 << 20
"""Size requested for the kernel's buffers. The kernel may grant less (net.core.rmem_max)."""
SEND_SECONDS = 1
"""Longest wait for room in the kernel. After it, a packet is lost."""
Address = tuple[str, int]
# With Linux's SO_RCVBUFFORCE and SO_SNDBUFFORCE, which Python does not name and net.core.rmem_max does not limit.
_BUFFERS = ((socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32))


class DatagramSocket:
    """A UDP socket of a job.

    Args:
        address: Address to bind to; port 0 for any port.
        key: The job key.
        buffer_bytes: Size requested for the kernel's buffers.
        shared: Whether other sockets of this machine may bind to the same address, for multicast.

    Attributes:
        address: Address that the socket is bound to.
        forged: Number of datagrams dropped for their tag.
    """

    def __init__(
        self, address: Address, key: JobKey, *, buffer_bytes: int = BUFFER_BYTES, shared: bool = False
    ) -> None:
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
        self.forged = 0
        self._job_key = key
        self._tag = hashlib.blake2b(digest_size=TAG_BYTES, key=secrets.token_bytes(32))  # matches nothing
        self._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES + 1))

    def enter(self, epoch: int) -> None:
        """Switch to packets of this incarnation of the server."""
        key = self._job_key.mac(b"aggregation datagrams", epoch.to_bytes(8, "little"))
        self._tag = hashlib.blake2b(digest_size=TAG_BYTES, key=key)

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

    def send(self, packet: np.ndarray, addresses: Iterable[Address]) -> None:
        """Send one packet to each address. Waits for room in the kernel; a packet that the kernel refuses is lost."""
        tag = self._tag.copy()
        tag.update(packet.data)
        buffers: list[Any] = [packet.data, tag.digest()]
        for address in addresses:
            with contextlib.suppress(OSError):
                self.socket.sendmsg(buffers, [], 0, address)

    def receive(self, most: int) -> Iterator[memoryview]:
        """Yield the packets that have arrived, each valid until the next. Never waits.

        Reads at most `most` datagrams, forged ones included, so that a flood of them holds nobody up.
        """
        for _ in range(most):
            try:
                num_bytes = self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except OSError:  # nothing has arrived; or an error of an earlier send
                return
            packet = self._buffer[: max(0, num_bytes - TAG_BYTES)]
            tag = self._tag.copy()
            tag.update(packet)
            if hmac.compare_digest(tag.digest(), self._buffer[len(packet) : num_bytes]):
                yield packet
            else:
                self.forged += 1

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()
