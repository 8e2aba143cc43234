"""Options of an aggregation server."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gradwire.aggregator.session import Address
from gradwire.net.server import ServerOptions


@dataclass(frozen=True)
class AggregationOptions(ServerOptions):
    """How an aggregation server runs.

    Attributes:
        udp: Whether packets travel as datagrams, to the same port.
        multicast: Group and port to which each result is sent once; None sends each worker its own copy.
        drop: Fraction of the received datagrams to drop, to try the effect of losses.
        xdp: Network interface at which a program in the kernel adds up (`gradwire.aggregator.xdp`); None adds up in
            this process alone.
        xdp_mode: How the program is attached: ``"native"`` by the driver; ``"broadcast"`` by the driver, which also
            sends the copies of results; ``"generic"`` with any driver.
        guard: How that program knows packets: ``"siphash"`` by a keyed tag, ``"crc32c"`` by a checksum alone, for
            networks that the operator trusts.
    """

    timeout: timedelta = timedelta(seconds=30)
    patience: timedelta = timedelta(seconds=30)
    udp: bool = False
    multicast: Address | None = None
    drop: float = 0.0
    xdp: str | None = None
    xdp_mode: str = "native"
    guard: str = "siphash"
