"""What is simulated: ranks, their links, nodes, and ranks that are slower than others."""

# Shapes: W = ranks, M = ranks of a node.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gradwire.core.errors import OptionError
from gradwire.planner.costs import LinkCosts

_SEGMENT_BYTES = 1448
_SEGMENT_HEADER_BYTES = 66


@dataclass(frozen=True)
class SimulatedLink:
    """A full-duplex link: each direction has the whole rate for itself.

    Attributes:
        rate_bits: bits a second; None for one that takes no time.
        latency_seconds: from one end to the other.
        message_seconds: for which a message of no bytes keeps the sending end busy.
        header_bytes: what the network adds to each 1,448 bytes, and once to each message: Ethernet 14, IPv4 20, TCP
            with timestamps 32. Every second packet is acknowledged, by one of headers alone in the other direction.
            Use 0 where the rate is a measured goodput.
    """

    rate_bits: float | None
    latency_seconds: float = 0.0
    message_seconds: float = 0.0
    header_bytes: int = _SEGMENT_HEADER_BYTES

    def __post_init__(self) -> None:
        if self.rate_bits is not None and self.rate_bits <= 0:
            raise OptionError(f"Expected a rate above 0, got {self.rate_bits}. Do: pass bits a second, or None.")
        if self.latency_seconds < 0:
            raise OptionError(f"Expected a latency of at least 0, got {self.latency_seconds}. Do: pass seconds.")

    @classmethod
    def measured(cls, link: LinkCosts) -> SimulatedLink:
        """The link that a probe has measured from end to end."""
        rate = 8 / link.seconds_per_byte if link.seconds_per_byte else None
        return cls(rate, link.latency, link.per_message, header_bytes=0)

    @property
    def seconds_a_byte(self) -> float:
        """Of frames."""
        if self.rate_bits is None:
            return 0.0
        return 8 / self.rate_bits * (1 + self.header_bytes / _SEGMENT_BYTES)

    @property
    def ack_seconds_a_byte(self) -> float:
        """Of frames, in the other direction."""
        return 8 / self.rate_bits * self.header_bytes / (2 * _SEGMENT_BYTES) if self.rate_bits else 0.0

    @property
    def header_seconds(self) -> float:
        """For the headers of a message's last segment, which is not full."""
        return 8 * self.header_bytes / self.rate_bits if self.rate_bits else 0.0


@dataclass(frozen=True)
class Straggler:
    """How a rank differs from the others.

    Attributes:
        slowdown: by which factor its processor takes longer, for the model and for codecs.
        delay_seconds: how much later it begins the step.
        rate_bits: of its link (its node's, where there are nodes), or None for that of all.
    """

    slowdown: float = 1.0
    delay_seconds: float = 0.0
    rate_bits: float | None = None

    def __post_init__(self) -> None:
        if self.slowdown <= 0 or self.delay_seconds < 0 or (self.rate_bits is not None and self.rate_bits <= 0):
            raise OptionError(
                f"Expected a slowdown and a rate above 0 and a delay of at least 0, got {self}. Do: for a rank of half "
                "the speed, slowdown=2."
            )


_TYPICAL = Straggler()


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        ranks: how many (W).
        link: of each rank; of each node, which its ranks share, where there are nodes.
        ranks_per_node: ranks on one machine (M), which must divide W.
        inner: of each rank to the others of its node.
        stragglers: ranks that differ, by rank.
        cores: how many tasks of all ranks together may run at once, where ranks share one machine (as in the lab);
            None for a processor a rank.
        wake_seconds: that codecs' or the transport's thread of a rank keeps a core busy before it goes on after a wait:
            switches of context, cold caches.
    """

    ranks: int
    link: SimulatedLink
    ranks_per_node: int = 1
    inner: SimulatedLink = field(default_factory=lambda: SimulatedLink(None))
    stragglers: Mapping[int, Straggler] = field(default_factory=dict)
    cores: int | None = None
    wake_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise OptionError(
                f"Expected ranks in whole nodes, got {self.ranks} ranks, {self.ranks_per_node} a node. Do: pass a "
                "number of ranks that is a multiple."
            )
        if self.cores is not None and self.cores < 1:
            raise OptionError(f"Expected at least 1 core, got {self.cores}. Do: pass None for a processor a rank.")
        for rank in self.stragglers:
            if not 0 <= rank < self.ranks:
                raise OptionError(f"Expected stragglers below rank {self.ranks}, got {rank}. Do: count from 0.")

    def straggler(self, rank: int) -> Straggler:
        """How a rank differs."""
        return self.stragglers.get(rank, _TYPICAL)

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    def members(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def outer_link(self, node: int) -> SimulatedLink:
        """The link of a node: the slowest that one of its ranks is said to have."""
        rates = [self.straggler(rank).rate_bits for rank in self.members(node)]
        slow = [rate for rate in rates if rate is not None]
        return replace(self.link, rate_bits=min(slow)) if slow else self.link


@dataclass(frozen=True)
class Compute:
    """What a typical rank computes in a step, in seconds, without any communication."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward_seconds, self.backward_seconds, self.optimizer_seconds) < 0:
            raise OptionError(f"Expected times of at least 0, got {self}. Do: pass seconds.")

    @property
    def total_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds
