"""Closed forms: how long one tensor takes with a given compressor, strategy and number of partitions.

Each strategy is described once, by the *legs* of a partition: one range of every rank's share, or, in an all-gather,
one range. A leg is a number of equal messages, with what is encoded before and decoded after each. The legs give the
seconds of a partition alone, the time it occupies a rank's link and codec, and (in `schedule`) how it overlaps with
other tensors and the backward pass. Several partitions form a pipeline.

Guarantees: no time falls when a tensor grows, or when a link or a codec slows down (tests).

Source: HiPress (SOSP 2021), section 3.3, equations 1 and 2; DRAGONN (ICML 2022), section 4.2. Differences: counts are
those of our operations. In scatter-reduce a rank encodes a payload while it sends the one before, so the longer of the
two counts; HiPress counts all K encodes. Our ring has HiPress's counts: 2 (W − 1) sends, W encodes, W decodes. The
latency of a message overlaps with other messages, its time on the link does not. With the latency in
`LinkCosts.per_message`, the forms are those of HiPress and DRAGONN. Preliminary rounds, accumulators, engine tasks and
frame headers are counted, too.
"""

# Shapes: N = elements of a range, W = ranks, K = partitions of a rank's share.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gradwire.compressors.base.registry import DENSE_NAME
from gradwire.core.errors import UnknownNameError
from gradwire.planner.costs import CodecCosts, Cost, Costs
from gradwire.sync.chunk import RANGE_ALIGNMENT

Kind = Literal["work", "fan", "relay", "chain"]


@dataclass(frozen=True)
class Leg:
    """Equal messages of a partition, as one rank sees them. Times are in seconds per message.

    Attributes:
        kind: ``"work"`` has no message, and waits for everything before it. In a ``"fan"``, messages are independent:
            one is encoded while another is sent. In a ``"relay"``, each rank passes on what has arrived, and decodes
            meanwhile. In a ``"chain"``, each message waits until the one before is decoded and encoded again.
        encode: Time of the codec before a message is sent.
        wire: Time on the link.
        decode: Time of the codec after a message has arrived.
        latency: Time between leaving the link and arriving.
        messages: Number of messages.
        aside: Total decoding time that waits for no message of this leg.
    """

    kind: Kind
    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0
    latency: float = 0.0
    messages: int = 1
    aside: float = 0.0

    @property
    def coding(self) -> float:
        """Total seconds of the codec."""
        return self.messages * (self.encode + self.decode) + self.aside

    @property
    def busy(self) -> float:
        """Total seconds of the link."""
        return self.messages * self.wire

    @property
    def waiting(self) -> float:
        """Seconds of latency that do not overlap."""
        return self.latency if self.kind == "fan" else self.messages * self.latency

    @property
    def seconds(self) -> float:
        """From the first encode to the last decode."""
        if self.messages == 0:
            return 0.0
        if self.kind in ("work", "chain"):
            return self.messages * (self.encode + self.wire + self.latency + self.decode) + self.aside
        if self.kind == "fan":
            step = max(self.wire, self.encode + self.decode)
        else:
            step = max(self.encode + self.wire + self.latency, self.decode)
        exposed = max(0.0, self.aside - self.wire - self.latency)
        return self.encode + self.wire + self.latency + self.decode + (self.messages - 1) * step + exposed


@dataclass(frozen=True)
class Route:
    """A tensor's way through codec and link, with one compressor and strategy.

    Attributes:
        legs: Legs of one partition.
        partitions: Number of partitions that follow each other.
    """

    legs: tuple[Leg, ...]
    partitions: int = 1

    @property
    def encode(self) -> float:
        """Seconds in which a rank encodes."""
        return self.partitions * sum(leg.messages * leg.encode for leg in self.legs)

    @property
    def decode(self) -> float:
        """Seconds in which a rank decodes and merges."""
        return self.partitions * sum(leg.messages * leg.decode + leg.aside for leg in self.legs)

    @property
    def wire(self) -> float:
        """Seconds in which a rank's link is busy."""
        return self.partitions * sum(leg.busy for leg in self.legs)

    @property
    def seconds(self) -> float:
        """From the gradient to its mean, with link and codec otherwise idle.

        While one partition is on the link, another uses the codec. Only the beginning of the first and the end of the
        last do not overlap: with n turns from codec to link, 1/n of a partition.
        """
        busier = max(sum(leg.coding for leg in self.legs), sum(leg.busy for leg in self.legs))
        alone = max(sum(leg.seconds for leg in self.legs), busier)
        turns = sum(leg.messages if leg.kind == "chain" else leg.kind != "work" for leg in self.legs)
        if self.partitions == 1:
            return alone
        return max(alone, self.partitions * busier + (alone - busier) / max(1, turns))


@dataclass(frozen=True)
class _Range:
    """Costs of one range of N elements."""

    count: float
    itemsize: int
    spec: str
    codec: CodecCosts
    costs: Costs
    share: float = 1.0  # share of the range that a tensor has in the messages of its fusion group
    fused: int = 1  # number of tensors that share tasks and frames

    def of(self, cost: Cost | None) -> float:
        assert cost is not None, "summable compressors and those with statistics say what these cost"
        return self.share * cost(self.count)

    @property
    def task(self) -> float:
        return self.costs.task / self.fused

    @property
    def encode(self) -> float:
        return self.of(self.codec.encode) + self.task

    @property
    def decode(self) -> float:
        return self.of(self.codec.decode) + self.task

    @property
    def payload(self) -> float:
        # A dense payload holds the values themselves; the measured curve is that of float32.
        return self.share * self.count * self.itemsize if self.spec == DENSE_NAME else self.of(self.codec.payload_bytes)

    def message(self, kind: Kind, nbytes: float, messages: int, encode: float = 0.0, decode: float = 0.0,
                aside: float = 0.0) -> Leg:  # fmt: skip
        """Return a leg of messages with `nbytes` of body. Send and recv tasks count as encoding and decoding."""
        link, nbytes = self.costs.slowest, self.costs.frame_bytes + self.fused * nbytes
        # The transport sends one frame and receives another while the link carries them both ways.
        wire = max(link.busy(nbytes), 2 * self.costs.frame(nbytes)) / self.fused
        return Leg(kind, encode + self.task, wire, decode + self.task, link.latency, messages, aside)

    def merge(self, payloads: int) -> float:
        """Seconds to decode payloads and add this rank's own gradient."""
        return payloads * self.of(self.codec.merge) + self.of(self.costs.add) + self.task

    def accumulate(self, payloads: int, aggregates: int = 0) -> float:
        """Seconds to add payloads and other accumulators to an accumulator."""
        return payloads * self.of(self.codec.accumulate) + aggregates * self.of(self.costs.add) + self.task

    @property
    def finalize(self) -> float:
        return self.of(self.costs.add) + self.of(self.codec.finalize) + self.task

    def stats(self, ranges: int) -> list[Leg]:
        """Return the preliminary round of several ranges, in which each rank sends to every other."""
        if not self.codec.needs_stats:
            return []
        peers = self.costs.world_size - 1
        each = self.message("fan", self.of(self.codec.stats_bytes), peers)
        sending = peers * (each.encode + each.decode) + self.task
        return [Leg("fan", self.of(self.codec.stats) + sending, each.busy, self.task, each.latency, ranges)]


def _scatter_reduce(cost: _Range, W: int) -> list[Leg]:
    """Send each owner its range, and the mean back. The owner does not encode its own range to merge it."""
    if cost.codec.summable:
        total = cost.of(cost.codec.accumulator_bytes)
        owner = Leg("work", encode=cost.encode, decode=cost.accumulate(W))
        gather = cost.message("fan", total, W - 1, decode=cost.finalize, aside=cost.finalize)
    else:
        owner = Leg("work", encode=cost.encode, decode=cost.merge(W - 1))
        gather = cost.message("fan", cost.payload, W - 1, decode=cost.decode, aside=cost.decode)
    return [*cost.stats(W), cost.message("fan", cost.payload, W - 1, encode=cost.encode), owner, gather]


def _ring(cost: _Range, W: int) -> list[Leg]:
    """Send over W − 1 hops of decode, merge and encode, then over W − 1 hops of the mean."""
    if cost.codec.summable:
        total = cost.of(cost.codec.accumulator_bytes)
        round_one = [
            cost.message("chain", cost.payload, 1, cost.encode, cost.accumulate(2)),
            cost.message("chain", total, W - 2, cost.encode, cost.accumulate(1, 1)),
        ]
        round_two = cost.message("relay", total, W - 1, decode=cost.finalize, aside=cost.finalize)
    else:
        round_one = [cost.message("chain", cost.payload, W - 1, cost.encode, cost.merge(1))]
        round_two = cost.message("relay", cost.payload, W - 1, decode=cost.decode, aside=cost.decode)
    return [*cost.stats(W), *round_one, Leg("work", encode=cost.encode), round_two]


def _allgather(cost: _Range, W: int) -> list[Leg]:
    """Encode once, send the payload to every other rank, and add up all payloads."""
    if cost.codec.summable:
        total = cost.accumulate(W) + cost.of(cost.codec.finalize)
    else:
        total = W * cost.of(cost.codec.merge) + cost.task
    fan = cost.message("fan", cost.payload, W - 1)
    return [*cost.stats(1), Leg("work", encode=cost.encode), fan, Leg("work", decode=total)]


FORMS: dict[str, Callable[[_Range, int], list[Leg]]] = {
    "allgather": _allgather,
    "ring": _ring,
    "scatter_reduce": _scatter_reduce,
}
"""By strategy: a function of a range's costs and the number of ranks."""


def route(
    spec: str, strategy: str, partitions: int, numel: int, costs: Costs, itemsize: int = 4, fused: int = 1
) -> Route:
    """Return the route of a tensor.

    Args:
        spec: A compressor of `costs`.
        strategy: One of `FORMS`.
        partitions: Number of ranges that a rank's share is cut into.
        numel: Elements of the tensor.
        costs: Costs of this job.
        itemsize: Bytes per element of the tensor.
        fused: Number of equal tensors, including this one, that share messages (`gradwire.sync.fusion`). The route is
            then the tensor's share, except for latencies.

    Raises:
        UnknownNameError: The strategy has no closed form, or the compressor was not measured.
    """
    if strategy not in FORMS:
        raise UnknownNameError("strategy", strategy, FORMS)
    W, codec = costs.world_size, costs.codec(spec)
    if W == 1 or numel == 0:
        return Route(())
    shares = 1 if strategy == "allgather" else W
    if fused > 1:  # each owner gets whole tensors
        return Route(tuple(FORMS[strategy](_Range(numel, itemsize, spec, codec, costs, 1 / shares, fused), W)))
    blocks = -(-numel // RANGE_ALIGNMENT)  # as a job is split: the longest range counts, and none is empty
    partitions = min(partitions, -(-blocks // shares))
    count = min(numel, -(-blocks // (shares * partitions)) * RANGE_ALIGNMENT)
    legs = FORMS[strategy](_Range(count, itemsize, spec, codec, costs), W)
    return Route(tuple(leg for leg in legs if leg.messages), partitions)


def native_seconds(nbytes: float, costs: Costs) -> float:
    """Seconds of the framework's own ring all-reduce: DRAGONN's 2 (W − 1) (α + m / (W B))."""
    link = costs.native or costs.slowest
    return 2 * (costs.world_size - 1) * link(nbytes / costs.world_size)
