"""Options of an aggregation server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import timedelta

from gradwire.aggregator.session import Address
from gradwire.core.errors import OptionError
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

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            OptionError: They do not, or the address of the group is no multicast group.
        """
        if self.multicast is not None and not self.udp:
            raise OptionError("Results can only be multicast as datagrams. Pass udp=True (--udp).")
        if self.multicast is not None and not _is_group(self.multicast[0]):
            raise OptionError(f"{self.multicast[0]!r} is no IPv4 multicast group. Pass one of 239.0.0.0/8.")
        if self.xdp is None:
            return
        if not self.udp or self.multicast is not None or self.drop:
            raise OptionError(
                "--xdp takes datagrams and answers each worker: pass --udp, and neither --multicast nor --drop."
            )
        if ":" in self.host:
            raise OptionError(
                f"--xdp adds up packets of IPv4 alone, and {self.host} is an IPv6 address. Pass an IPv4 address to "
                "--host, or serve without --xdp."
            )


def _is_group(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_multicast
    except ValueError:
        return False
