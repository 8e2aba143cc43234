"""Whose datagrams are whose: the keys of a worker's datagrams, and the state that a server keeps of each worker's.

Keys come from the handshake of the worker's TCP connection, one for each direction. So no worker can write as another,
or as the server, unless it has seen the other's handshake on the network. Results to a multicast group have one key for
all workers: see `gradwire.aggregator.multicast`.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.aggregator.packet import field as field_of_packet
from gradwire.aggregator.retransmission import GRAIN_SECONDS
from gradwire.aggregator.session import Address
from gradwire.core.errors import FrameError
from gradwire.net.datagrams import DatagramReceiver, DatagramSender
from gradwire.net.handshake import JobKey

_KEY = slice(field_of_packet("round").offset, field_of_packet("worker").offset)
FROM_WORKER, FROM_SERVER = "datagrams of the worker", "datagrams of the server"


@dataclass
class WorkerDatagrams:
    """The datagrams of one worker, at the server.

    Attributes:
        worker: Rank of the worker.
        address: Where they come from, and where results go.
        receiver: The worker's direction.
        sender: The server's direction.
        validated: Whether a datagram of the worker's has come from the address. Before, nothing is sent there.
        round_trip_seconds: Shortest round trip of the worker's TCP connection when it joined; 0 if unknown.
    """

    worker: int
    address: Address
    receiver: DatagramReceiver
    sender: DatagramSender
    validated: bool = False
    round_trip_seconds: float = 0.0
    _cleared: float = -math.inf
    _asked: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # the last two answers to each question

    @classmethod
    def join(cls, worker: int, address: Address, host: str, derive: Callable[[str], bytes]) -> WorkerDatagrams:
        """Begin with a worker that has joined.

        Args:
            worker: Rank of the worker.
            address: Where it wants datagrams.
            host: Address of its connection's other end.
            derive: Returns the key for a use.

        Raises:
            FrameError: The worker wants them elsewhere than at its own host.
        """
        if ipaddress.ip_address(address[0]) != ipaddress.ip_address(host):
            raise FrameError(
                f"Worker {worker} wants datagrams at {address[0]}, but is connected from {host}. Datagrams go to the "
                "host of the connection only. Look for address translation between the two, or start the server "
                "without --udp."
            )
        return cls(worker, address, DatagramReceiver(derive(FROM_WORKER)), DatagramSender(derive(FROM_SERVER)))

    def asks_too_often(self, packet: memoryview, now: float) -> bool:
        """Whether a proven packet is the third about one result within a round trip.

        A worker's timers are never shorter than the round trip and `GRAIN_SECONDS`, so a worker that works asks once.
        """
        period = max(GRAIN_SECONDS, self.round_trip_seconds)
        if now - self._cleared >= period:
            self._asked = {key: times for key, times in self._asked.items() if now - times[1] < period}
            self._cleared = now
        key = bytes(packet[_KEY])
        times = self._asked.get(key, (-math.inf, -math.inf))
        if now - times[0] < period:
            return True
        self._asked[key] = times[1], now
        return False


def group_key(key: JobKey, epoch: int) -> bytes:
    """Return the key of datagrams to the multicast group of an incarnation of the server."""
    return key.mac(b"datagrams of the group", epoch.to_bytes(8, "little"))
