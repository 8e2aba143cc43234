"""The machines of a simulated step: ranks, links, nodes, stragglers and an aggregation server."""

# Shapes: W = ranks, M = ranks of a node.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradwire.core.errors import OptionError
from gradwire.planner.costs import LinkCosts
from gradwire.planner.curves import Cost, LinearCost

_SEGMENT_BYTES = 1448
_SEGMENT_HEADER_BYTES = 66
ETHERNET_MTU = 1500
# Seconds of a packet by its elements, on a core of an AMD EPYC (Zen 5): `python -m benchmarks run aggregation-server`.
PYTHON_PACKET = LinearCost(22e-6, 4.4e-10)
RANK_PACKET = LinearCost(27e-6, 3.7e-10)
# Of 1,024 indices, which a frame of Ethernet holds.
PYTHON_DATAGRAM, RANK_DATAGRAM = LinearCost(18e-6, 0.0), LinearCost(30e-6, 0.0)
XDP_PACKET = LinearCost(1.07e-6, 0.0)  # `python -m benchmarks run xdp-packets`


@dataclass(frozen=True)
class SimulatedLink:
    """A full-duplex link. Each direction has the whole rate.

    With `queue_bytes`, the switch loses packets. TCP serves connections side by side, so a connection fills the queue
    toward its receiver with its first burst, of `window_bytes`, as soon as it has a message, and keeps that room until
    the message has arrived: further bytes leave as earlier ones are acknowledged. A connection that finds no room loses
    its burst. It sends the burst again `resend_seconds` later, and its later messages wait for that. The model knows no
    fast retransmission, which needs more packets of the connection to arrive, and no change of the window: it is
    pessimistic for long transfers.

    Attributes:
        rate_bits: Bits per second; None for a link that takes no time.
        latency_seconds: One-way latency.
        message_seconds: Seconds that a message without bytes occupies the sending end.
        header_bytes: Bytes of headers for each 1,448 bytes, and once for each message: Ethernet 14, IPv4 20, TCP with
            timestamps 32. Every second packet is acknowledged by a packet of headers. Use 0 if the rate is a measured
            goodput.
        queue_bytes: Bytes that the switch holds for the receiver; None if nothing is lost.
        window_bytes: First burst of a connection: ten packets (RFC 6928).
        resend_seconds: Retransmission timeout: Linux's shortest.
    """

    rate_bits: float | None
    latency_seconds: float = 0.0
    message_seconds: float = 0.0
    header_bytes: int = _SEGMENT_HEADER_BYTES
    queue_bytes: float | None = None
    window_bytes: float = 10 * _SEGMENT_BYTES
    resend_seconds: float = 0.2

    def __post_init__(self) -> None:
        if self.rate_bits is not None and self.rate_bits <= 0:
            raise OptionError(f"The rate of a link is {self.rate_bits}. Pass bits per second above 0, or None.")
        if self.latency_seconds < 0:
            raise OptionError(f"The latency of a link is {self.latency_seconds}. Pass seconds of at least 0.")
        if self.queue_bytes is not None and min(self.queue_bytes, self.window_bytes, self.resend_seconds) <= 0:
            raise OptionError(
                f"A queue of {self.queue_bytes} bytes, a window of {self.window_bytes} bytes and a timeout of "
                f"{self.resend_seconds} s cannot be simulated. Pass values above 0, or queue_bytes=None."
            )

    @classmethod
    def measured(cls, link: LinkCosts, ranks: int = 1) -> SimulatedLink:
        """A link whose goodput was measured from end to end, for each of the ranks that share it."""
        rate = 8 * ranks / link.seconds_per_byte if link.seconds_per_byte else None
        return cls(rate, link.latency, link.per_message, header_bytes=0)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte of a frame, headers of full packets included."""
        if self.rate_bits is None:
            return 0.0
        return 8 / self.rate_bits * (1 + self.header_bytes / _SEGMENT_BYTES)

    @property
    def ack_seconds_per_byte(self) -> float:
        """Seconds that acknowledgements occupy the other direction, per byte of a frame."""
        return 8 / self.rate_bits * self.header_bytes / (2 * _SEGMENT_BYTES) if self.rate_bits else 0.0

    @property
    def header_seconds(self) -> float:
        """Seconds of the headers of a message's last packet, which is not full."""
        return 8 * self.header_bytes / self.rate_bits if self.rate_bits else 0.0


@dataclass(frozen=True)
class Straggler:
    """How one rank differs from the others.

    Attributes:
        slowdown: Factor on the time of its processor, for the model and for codecs.
        delay_seconds: How much later it begins the step.
        rate_bits: Rate of its link, or of its node's link; None for the rate of all links.
    """

    slowdown: float = 1.0
    delay_seconds: float = 0.0
    rate_bits: float | None = None

    def __post_init__(self) -> None:
        if self.slowdown <= 0 or self.delay_seconds < 0 or (self.rate_bits is not None and self.rate_bits <= 0):
            raise OptionError(
                f"{self} cannot be simulated. Pass a slowdown and a rate above 0 and a delay of at least 0: a rank of "
                "half the speed has slowdown=2."
            )


_TYPICAL = Straggler()


@dataclass(frozen=True)
class SimulatedServer:
    """The aggregation server of strategy ``"server"``: a node with a link and one processor of its own.

    Times of packets are functions of their number of elements. Those of the server count once for each contribution,
    with its share of the results; those of a rank count for a contribution and its result together.

    Attributes:
        link: Its link; None for one like the ranks'. `SimulatedLink(None)` is a server in the switch, or on a host that
            bridges the ranks: only their own links limit it.
        multicast: Whether it sends a result once, and the network copies it. Otherwise, it sends one to each rank.
        packet: Seconds of its processor for a packet of indices.
        statistics_packet: Seconds of its processor for a packet of the preliminary round.
        rank_packet: Seconds of a rank's transport for a packet.
        packet_elements, mtu: As in `gradwire.Aggregator`. With `mtu`, packets are datagrams; otherwise, they are frames
            of a TCP connection. Acknowledgements of datagrams are not simulated, and none is lost.
    """

    link: SimulatedLink | None = None
    multicast: bool = False
    packet: Cost = PYTHON_PACKET
    statistics_packet: Cost = PYTHON_PACKET
    rank_packet: Cost = RANK_PACKET
    packet_elements: int = 60 << 10
    mtu: int = 0

    def __post_init__(self) -> None:
        if self.multicast and not self.mtu:
            raise OptionError(
                "Only datagrams can be sent to a multicast group. Pass mtu=1500, or the MTU of the links, or leave "
                "multicast out."
            )

    @classmethod
    def datagrams(
        cls, link: SimulatedLink | None = None, packet: Cost = PYTHON_DATAGRAM, **options: Any
    ) -> SimulatedServer:
        """A server in Python whose packets are datagrams of one frame of Ethernet."""
        return cls(
            link,
            packet=packet,
            statistics_packet=PYTHON_DATAGRAM,
            rank_packet=RANK_DATAGRAM,
            mtu=ETHERNET_MTU,
            **options,
        )

    @classmethod
    def xdp(cls, link: SimulatedLink | None = None, **options: Any) -> SimulatedServer:
        """A server that adds up in the kernel's packet path; the preliminary round goes to Python (docs/xdp.md)."""
        return cls.datagrams(link, XDP_PACKET, **options)

    def over(self, link: SimulatedLink) -> SimulatedLink:
        """A link as the server's packets take it: datagrams have no TCP headers, and their own are in the packets."""
        return replace(link, header_bytes=0) if self.mtu else link


@dataclass(frozen=True)
class Cluster:
    """Ranks and their links.

    Attributes:
        ranks: Number of ranks (W).
        link: Link of each rank; or of each node, shared by its ranks.
        ranks_per_node: Ranks on one machine (M), a divisor of W.
        inner: Link of each rank to the other ranks of its node.
        stragglers: Ranks that differ, by rank.
        cores: Number of cores that all ranks share, if they run on one machine as in the lab; None for a processor per
            rank.
        wake_seconds: Seconds of a core for waking a thread that has waited: context switches, cold caches.
        server: Aggregation server, for plans with the strategy ``"server"``.

    Raises:
        OptionError: A number is out of range, or `ranks_per_node` does not divide `ranks`.
    """

    ranks: int
    link: SimulatedLink
    ranks_per_node: int = 1
    inner: SimulatedLink = field(default_factory=lambda: SimulatedLink(None))
    stragglers: Mapping[int, Straggler] = field(default_factory=dict)
    cores: int | None = None
    wake_seconds: float = 0.0
    server: SimulatedServer | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise OptionError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}. Pass a number of ranks that is a "
                "multiple."
            )
        if self.cores is not None and self.cores < 1:
            raise OptionError(f"The cluster has {self.cores} cores. Pass at least 1, or None for a processor per rank.")
        for rank in self.stragglers:
            if not 0 <= rank < self.ranks:
                raise OptionError(f"There is no rank {rank} to be a straggler. Ranks are 0 to {self.ranks - 1}.")

    def straggler(self, rank: int) -> Straggler:
        """How a rank differs from the others."""
        return self.stragglers.get(rank, _TYPICAL)

    def node(self, rank: int) -> int:
        """Index of a rank's node."""
        return rank // self.ranks_per_node

    def members(self, node: int) -> range:
        """Ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def outer_link(self, node: int) -> SimulatedLink:
        """Link of a node, at the lowest rate of its ranks."""
        rates = [self.straggler(rank).rate_bits for rank in self.members(node)]
        slow = [rate for rate in rates if rate is not None]
        return replace(self.link, rate_bits=min(slow)) if slow else self.link
