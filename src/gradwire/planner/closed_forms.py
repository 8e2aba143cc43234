"""Closed forms: how long one tensor takes by one compressor, one strategy and one number of partitions.

A strategy is described once, as the *legs* of the way of one batch; a batch is one range of every rank's share, or
under all-gather one range. A leg is a number of like messages with what is encoded before and decoded after each. From
the legs come the seconds of a batch alone, what it occupies of a rank's link and codec, and (in `schedule`) how it fits
among other tensors and the backward. Further batches (partitions) pass in a pipeline.

Guarantees: no time falls where a tensor grows, a link slows down or a codec does (tests).

Source: HiPress (SOSP 2021), section 3.3, equations 1 and 2; DRAGONN (ICML 2022), section 4.2. Differences: counts are
those of our graphs. In scatter-reduce a rank sends its W − 1 payloads through one link while it encodes the next, so
that encodes hide behind sends, or sends behind encodes; HiPress counts all K encodes. Our ring has HiPress's counts:
2 (W − 1) sends, W encodes, W decodes. A message has a latency, which passes beside others, and a time on the link,
which does not; with the latency in `LinkCosts.per_message` the forms are HiPress's and DRAGONN's. Preliminary rounds
and accumulators are counted, engine tasks and frame headers too.
"""

# Shapes: N = elements of a range, W = ranks, K = partitions of a rank's share.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gradwire.compressors.base.registry import DENSE_NAME
from gradwire.core.errors import UnknownNameError
from gradwire.planner.costs import CodecCosts, Cost, Costs
from gradwire.sync.job import RANGE_ALIGNMENT

Kind = Literal["work", "fan", "relay", "chain"]


@dataclass(frozen=True)
class Leg:
    """Like messages on a batch's way, as one rank sees them. Seconds; all but `messages` are of one message.

    Attributes:
        kind: ``"work"`` has no message, and waits for all before it. In a ``"fan"`` messages are independent: the next
            is encoded while one is sent. In a ``"relay"`` each is the one that arrived, passed on; decodes are beside
            it. In a ``"chain"`` each waits for the one before to be decoded and encoded again.
        encode: before it is sent.
        wire: on the link.
        decode: after it has arrived.
        latency: between the two.
        messages: how many.
        aside: decoding that waits for no message of this leg, all of it together.
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
        """Seconds of the codec."""
        return self.messages * (self.encode + self.decode) + self.aside

    @property
    def busy(self) -> float:
        """Seconds of the link."""
        return self.messages * self.wire

    @property
    def waiting(self) -> float:
        """Seconds of latency, one after another."""
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
        beside = max(0.0, self.aside - self.wire - self.latency)
        return self.encode + self.wire + self.latency + self.decode + (self.messages - 1) * step + beside


@dataclass(frozen=True)
class Route:
    """A tensor's way by one method.

    Attributes:
        legs: of one batch.
        batches: how many follow each other.
    """

    legs: tuple[Leg, ...]
    batches: int = 1

    @property
    def encode(self) -> float:
        """Seconds in which a rank encodes."""
        return self.batches * sum(leg.messages * leg.encode for leg in self.legs)

    @property
    def decode(self) -> float:
        """Seconds in which a rank decodes and merges."""
        return self.batches * sum(leg.messages * leg.decode + leg.aside for leg in self.legs)

    @property
    def wire(self) -> float:
        """Seconds in which a rank's link is busy."""
        return self.batches * sum(leg.busy for leg in self.legs)

    @property
    def seconds(self) -> float:
        """From the gradient to its mean, with link and codec free.

        Of several batches one is on the link while another is with the codec. What does not fit beside each other is
        the beginning of the first and the end of the last: of a way with n turns from codec to link an n-th.
        """
        busier = max(sum(leg.coding for leg in self.legs), sum(leg.busy for leg in self.legs))
        alone = max(sum(leg.seconds for leg in self.legs), busier)
        turns = sum(leg.messages if leg.kind == "chain" else leg.kind != "work" for leg in self.legs)
        return alone if self.batches == 1 else max(alone, self.batches * busier + (alone - busier) / max(1, turns))


@dataclass(frozen=True)
class _Range:
    """The costs of one range of N elements."""

    count: float
    itemsize: int
    spec: str
    codec: CodecCosts
    costs: Costs
    share: float = 1.0  # of the range: what a tensor has in the messages of a bundle
    bundle: int = 1  # tensors that share tasks and frames

    def of(self, cost: Cost | None) -> float:
        assert cost is not None, "summable compressors and those with statistics say what these cost"
        return self.share * cost(self.count)

    @property
    def task(self) -> float:
        return self.costs.task / self.bundle

    @property
    def encode(self) -> float:
        return self.of(self.codec.encode) + self.task

    @property
    def decode(self) -> float:
        return self.of(self.codec.decode) + self.task

    @property
    def payload(self) -> float:
        # Dense payloads are the values as they are; the measured curve is that of float32.
        return self.share * self.count * self.itemsize if self.spec == DENSE_NAME else self.of(self.codec.payload_bytes)

    def message(self, kind: Kind, nbytes: float, messages: int, encode: float = 0.0, decode: float = 0.0,
                aside: float = 0.0) -> Leg:  # fmt: skip
        """A leg of messages with a body of so many bytes. Tasks of send and recv count as encoding and decoding."""
        link, nbytes = self.costs.slowest, self.costs.frame_bytes + self.bundle * nbytes
        # The transport sends one frame and receives another while the link carries them both ways.
        wire = max(link.busy(nbytes), 2 * self.costs.frame(nbytes)) / self.bundle
        return Leg(kind, encode + self.task, wire, decode + self.task, link.latency, messages, aside)

    def merge(self, payloads: int) -> float:
        """Decode so many payloads and add this rank's own gradient."""
        return payloads * self.of(self.codec.merge) + self.of(self.costs.add) + self.task

    def accumulate(self, payloads: int, aggregates: int = 0) -> float:
        """Add payloads, and accumulators as they arrive, to an accumulator."""
        return payloads * self.of(self.codec.accumulate) + aggregates * self.of(self.costs.add) + self.task

    @property
    def finalize(self) -> float:
        return self.of(self.costs.add) + self.of(self.codec.finalize) + self.task

    def stats(self, ranges: int) -> list[Leg]:
        """The preliminary round of so many ranges: each rank tells every other."""
        if not self.codec.needs_stats:
            return []
        peers = self.costs.world_size - 1
        each = self.message("fan", self.of(self.codec.stats_bytes), peers)
        told = peers * (each.encode + each.decode) + self.task
        return [Leg("fan", self.of(self.codec.stats) + told, each.busy, self.task, each.latency, ranges)]


def _scatter_reduce(at: _Range, W: int) -> list[Leg]:
    """To each owner its range, and the mean back from it. The owner's own range is not encoded to be merged."""
    if at.codec.summable:
        total = at.of(at.codec.accumulator_bytes)
        owner = Leg("work", encode=at.encode, decode=at.accumulate(W))
        gather = at.message("fan", total, W - 1, decode=at.finalize, aside=at.finalize)
    else:
        owner = Leg("work", encode=at.encode, decode=at.merge(W - 1))
        gather = at.message("fan", at.payload, W - 1, decode=at.decode, aside=at.decode)
    return [*at.stats(W), at.message("fan", at.payload, W - 1, encode=at.encode), owner, gather]


def _ring(at: _Range, W: int) -> list[Leg]:
    """W − 1 hops of decode, merge and encode, then W − 1 hops of the mean."""
    if at.codec.summable:
        total = at.of(at.codec.accumulator_bytes)
        round_one = [
            at.message("chain", at.payload, 1, at.encode, at.accumulate(2)),
            at.message("chain", total, W - 2, at.encode, at.accumulate(1, 1)),
        ]
        round_two = at.message("relay", total, W - 1, decode=at.finalize, aside=at.finalize)
    else:
        round_one = [at.message("chain", at.payload, W - 1, at.encode, at.merge(1))]
        round_two = at.message("relay", at.payload, W - 1, decode=at.decode, aside=at.decode)
    return [*at.stats(W), *round_one, Leg("work", encode=at.encode), round_two]


def _allgather(at: _Range, W: int) -> list[Leg]:
    """One encode, a payload to every other rank, and the sum of all."""
    if at.codec.summable:
        total = at.accumulate(W) + at.of(at.codec.finalize)
    else:
        total = W * at.of(at.codec.merge) + at.task
    fan = at.message("fan", at.payload, W - 1)
    return [*at.stats(1), Leg("work", encode=at.encode), fan, Leg("work", decode=total)]


FORMS: dict[str, Callable[[_Range, int], list[Leg]]] = {
    "allgather": _allgather,
    "ring": _ring,
    "scatter_reduce": _scatter_reduce,
}
"""By strategy; a range's costs and the number of ranks."""


def route(
    spec: str, strategy: str, partitions: int, numel: int, costs: Costs, itemsize: int = 4, bundle: int = 1
) -> Route:
    """A tensor's way.

    Args:
        spec: a compressor of `costs`.
        strategy: one of `FORMS`.
        partitions: ranges a rank's share is cut into.
        numel: elements of the tensor.
        costs: of this job.
        itemsize: bytes an element of the tensor.
        bundle: of how many like tensors, itself included, that travel in bundles (`gradwire.sync.fusion`): the way is
            then its share of theirs, but for latencies, which they all wait for.

    Raises:
        UnknownNameError: a strategy without a closed form, or a compressor that was not measured.
    """
    if strategy not in FORMS:
        raise UnknownNameError("strategy", strategy, FORMS)
    W, codec = costs.world_size, costs.codec(spec)
    if W == 1 or numel == 0:
        return Route(())
    shares = 1 if strategy == "allgather" else W
    if bundle > 1:  # whole tensors, dealt out to the owners
        return Route(tuple(FORMS[strategy](_Range(numel, itemsize, spec, codec, costs, 1 / shares, bundle), W)))
    blocks = -(-numel // RANGE_ALIGNMENT)  # as `item.split` cuts: the longest range counts, and none is empty
    batches = min(partitions, -(-blocks // shares))
    count = min(numel, -(-blocks // (shares * batches)) * RANGE_ALIGNMENT)
    legs = FORMS[strategy](_Range(count, itemsize, spec, codec, costs), W)
    return Route(tuple(leg for leg in legs if leg.messages), batches)


def native_seconds(nbytes: float, costs: Costs) -> float:
    """The framework's own ring all-reduce of so many bytes, DRAGONN's 2 (W − 1) (α + m / (W B))."""
    link = costs.native or costs.slowest
    return 2 * (costs.world_size - 1) * link(nbytes / costs.world_size)
