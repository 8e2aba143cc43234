"""Closed forms: how long one tensor takes with a given compressor, strategy and number of partitions.

Each strategy is described once, by the *legs* of a batch of partitions: one range of every rank, or, in an all-gather,
one range. A leg is a number of equal messages, with what is encoded before and decoded after each. The legs give the
seconds of a batch alone, the time it occupies a rank's link and codec, and (in `schedule`) how it overlaps with other
tensors and the backward pass. Several batches form a pipeline.

With fewer partitions than ranks, the legs are those of a rank that owns one. The others have less to do: their encodes
and decodes run at the same time, and as owners rotate, a rank does as a mean only its share of it all, its *load*.

Guarantees: no time falls when a tensor grows, or when a link or a codec slows down (tests).

Source: HiPress (SOSP 2021), section 3.3, equations 1 and 2; DRAGONN (ICML 2022), section 4.2. Differences: counts are
those of our operations. In scatter-reduce a rank encodes a payload while it sends the one before, so the longer of the
two counts; HiPress counts all K encodes. Our ring has HiPress's counts: 2 (W − 1) sends, W encodes, W decodes. The
latency of a message overlaps with other messages, its time on the link does not. With the latency in
`LinkCosts.per_message`, the forms are those of HiPress and DRAGONN, but DRAGONN's printed difference of its two forms
lacks a factor: (K − 1)(α + (1/K − γ) d A / B) has 1/K where the forms give 2/K. Preliminary rounds,
accumulators, engine tasks and frame headers are counted, too.
"""

# Shapes: N = elements of a range, W = ranks, K = partitions of a tensor.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from gradwire.compressors.base.registry import DENSE_NAME
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.planner import pairs
from gradwire.planner.costs import CodecCosts, Costs
from gradwire.planner.curves import Cost
from gradwire.sync.chunk import RANGE_ALIGNMENT
from gradwire.sync.plan_entry import IN_PLACE
from gradwire.sync.strategies import STRATEGIES

Kind = Literal["work", "fan", "relay", "chain"]


@dataclass(frozen=True)
class Leg:
    """Equal messages of a batch of partitions, as an owner sees them. Times are in seconds per message.

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
        by_all: Whether every rank has the messages of each range, whoever owns it. There is one for each owner then.
    """

    kind: Kind
    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0
    latency: float = 0.0
    messages: int = 1
    aside: float = 0.0
    by_all: bool = False

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

    def seconds(self, load: float = 1.0) -> float:
        """From the first encode to the last decode.

        Args:
            load: Share of the encodes and decodes of all messages that one rank does.
        """
        if self.messages == 0:
            return 0.0
        if self.by_all:
            others = max(0.0, load * self.messages - 1) * max(self.wire, self.encode + self.decode)
            return self.encode + self.wire + self.latency + self.decode + others
        if self.kind in ("work", "chain"):
            return self.messages * (self.encode + self.wire + self.latency + self.decode) + self.aside
        if self.kind == "fan":
            step = max(self.wire, load * (self.encode + self.decode))
        else:
            step = max(self.encode + self.wire + self.latency, load * self.decode)
        exposed = max(0.0, self.aside - self.wire - self.latency)
        return self.encode + self.wire + self.latency + self.decode + (self.messages - 1) * step + exposed


@dataclass(frozen=True, eq=False)  # by identity, so that its tasks are found quickly
class Route:
    """A tensor's way through codec and link, with one compressor and strategy. Two of them are never equal.

    Attributes:
        legs: Legs of one batch.
        batches: Number of batches that follow each other.
        load: Share of the legs that a rank has as a mean over tensors, since not every rank owns a partition of each.
        alone: Legs of a tensor, or of a fused group, that has the links of the nodes to itself; None if they are the
            same.
    """

    legs: tuple[Leg, ...]
    batches: int = 1
    load: float = 1.0
    alone: tuple[Leg, ...] | None = None

    def scaled(self, factor: float) -> Route:
        """Return a route whose times on codec and link are `factor` times as long. Latencies stay."""
        names = ("encode", "wire", "decode", "aside")

        def longer(legs: tuple[Leg, ...]) -> tuple[Leg, ...]:
            return tuple(replace(leg, **{name: factor * getattr(leg, name) for name in names}) for leg in legs)

        return Route(longer(self.legs), self.batches, self.load, None if self.alone is None else longer(self.alone))

    @cached_property
    def encode(self) -> float:
        """Seconds in which a rank encodes."""
        return self.load * self.batches * sum(leg.messages * leg.encode for leg in self.legs)

    @cached_property
    def decode(self) -> float:
        """Seconds in which a rank decodes and merges."""
        return self.load * self.batches * sum(leg.messages * leg.decode + leg.aside for leg in self.legs)

    @cached_property
    def wire(self) -> float:
        """Seconds in which a rank's link is busy."""
        return self.load * self.batches * sum(leg.busy for leg in self.legs)

    @cached_property
    def busy(self) -> float:
        """Seconds in which the busier of link and codec is."""
        return max(self.encode + self.decode, self.wire)

    @cached_property
    def seconds(self) -> float:
        """From the gradient to its mean, with link and codec otherwise idle.

        While one batch is on the link, another uses the codec. Only the beginning of the first and the end of the last
        do not overlap: with n turns from codec to link, 1/n of a batch.
        """
        load = self.load if self.batches == 1 else 1.0  # some rank is in every batch
        legs = self.legs if self.alone is None else self.alone
        busy = sum(leg.busy * (load if leg.by_all else 1.0) for leg in legs)
        busier = max(load * sum(leg.coding for leg in legs), busy)
        alone = max(sum(leg.seconds(load) for leg in legs), busier)
        turns = sum(leg.messages if leg.kind == "chain" else leg.kind != "work" for leg in legs)
        if self.batches == 1:
            return alone
        return max(alone, self.batches * busier + (alone - busier) / max(1, turns))


@dataclass(frozen=True)
class _Range:
    """Costs of one range of N elements."""

    count: float
    itemsize: int
    spec: str
    codec: CodecCosts
    costs: Costs
    fused: float = 1.0  # number of tensors that share a task and a frame
    group: float = 1.0  # number of tensors that share a preliminary round
    in_place: bool = False  # whether gradients are dense, and added where they are
    owners: int = 0  # ranks that own a range of what has the links of the nodes to itself; 0 for all

    def of(self, cost: Cost | None) -> float:
        assert cost is not None, "summable compressors and those with statistics say what these cost"
        return cost(self.count)

    @property
    def task(self) -> float:
        return self.costs.task / self.fused

    @property
    def encode(self) -> float:
        return self.task if self.in_place else self.of(self.codec.encode) + self.task

    @property
    def decode(self) -> float:
        return self.task if self.in_place else self.of(self.codec.decode) + self.task

    @property
    def payload(self) -> float:
        # A dense payload holds the values themselves; the measured curve is that of float32.
        return self.count * self.itemsize if self.spec == DENSE_NAME else self.of(self.codec.payload_bytes)

    def message(self, kind: Kind, nbytes: float, messages: int, encode: float = 0.0, decode: float = 0.0,
                aside: float = 0.0, crossing: float | None = None) -> Leg:  # fmt: skip
        """Return a leg of messages with `nbytes` of body. Send and recv tasks count as encoding and decoding.

        `crossing` is the share of them that leaves the node; None for what follows from the kind.
        """
        costs, nbytes = self.costs, self.costs.frame_bytes + self.fused * nbytes
        # The transport sends one frame and receives another while the link carries them both ways.
        crossing = costs.crossing(to_all=kind == "fan") if crossing is None else crossing
        wire = self._contention(kind) * crossing * costs.slowest.busy(nbytes)
        wire = max(wire, 2 * costs.frame(nbytes)) / self.fused
        latency = costs.slowest.latency
        if kind != "fan" and costs.within is not None:  # messages follow each other, and most stay within a node
            latency = crossing * latency + (1 - crossing) * costs.within.latency
        return Leg(kind, encode + self.task, wire, decode + self.task, latency, messages, aside)

    def _contention(self, kind: Kind) -> float:
        """Return how long a rank's link takes, relative to when all ranks of its node use theirs.

        On a ring, a node sends one of its ranges at a time to the next node. m owners on one node receive one after the
        other, while the means of those before leave: m + 1 turns of the node's link in place of 2 m.
        """
        L, W = self.costs.ranks_per_node, self.costs.world_size
        if not self.owners:
            return 1.0
        if kind == "fan":
            return (min(self.owners, L) + 1) / (2 * L)
        return max(1 / L, self.owners / W)

    def within(self, messages: int) -> Leg:
        """Return a leg of dense messages from and to ranks of the same node, which keep processors busy."""
        link, dense = self.costs.within, self.costs.codec(DENSE_NAME)
        assert link is not None, "nodes have several ranks"
        nbytes = self.costs.frame_bytes + self.count * self.itemsize
        sending = self.of(dense.encode) + link.busy(nbytes) + 2 * self.task
        return Leg("work", messages * sending, decode=messages * (self.of(dense.merge) + 2 * self.task) + link.latency)

    def merge(self, payloads: int) -> float:
        """Seconds to decode payloads and add this rank's own gradient."""
        if self.in_place:
            return self.costs.sum_in_place(self.count * self.itemsize, payloads) + self.task
        return payloads * self.of(self.codec.merge) + self.of(self.costs.add) + self.task

    def accumulate(self, payloads: int, aggregates: int = 0) -> float:
        """Seconds to add payloads and other accumulators to an accumulator."""
        return payloads * self.of(self.codec.accumulate) + aggregates * self.add_accumulator + self.task

    @property
    def add_accumulator(self) -> float:
        return self.costs.add_bytes(self.of(self.codec.accumulator_bytes))

    @property
    def finalize(self) -> float:
        return self.add_accumulator + self.of(self.codec.finalize) + self.task

    def stats(self, ranges: int, members: int | None = None) -> list[Leg]:
        """Return the preliminary round of several ranges, in which each member (every rank) sends to all others.

        Or to the owners of the ranges, if there are several, which send the result to all.
        """
        if not self.codec.needs_stats:
            return []
        nbytes, peers = self.of(self.codec.stats_bytes), (members or self.costs.world_size) - 1
        crossing = None if members is None else 1.0
        if self.codec.stats_at_owner and ranges > 1:
            encode = self.of(self.codec.stats)
            to_owners = self.message("fan", nbytes, peers, encode, crossing=crossing)
            return [to_owners, self.message("fan", nbytes, peers, crossing=crossing)]
        shared = replace(self, fused=self.group)
        each = shared.message("fan", nbytes, peers, crossing=crossing)
        sending = peers * (each.encode + each.decode) + shared.task
        encode = self.of(self.codec.stats) + sending
        return [Leg("fan", encode, each.busy, shared.task, each.latency, ranges, by_all=True)]


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


def _sparse_reduce(cost: _Range, W: int) -> list[Leg]:
    """Encode once, send each owner its part, add up as an owner, and send the sum of the owned positions to all.

    To split and to read pairs is taken to cost as much as to merge them.
    """
    overlap, payload = cost.costs.overlap, cost.payload
    total = pairs.sum_bytes(payload, cost.count, W, overlap)
    own, merged = cost.of(cost.codec.merge), pairs.growth(payload, cost.count, W, overlap)
    start = Leg("work", encode=cost.encode + own)
    scatter = cost.message("fan", payload / W, W - 1, encode=own / W + cost.task)
    owner = Leg("work", decode=own + cost.of(cost.costs.add) / W + cost.task)
    gather = cost.message("fan", total / W, W - 1)
    return [*cost.stats(1), start, scatter, owner, gather, Leg("work", decode=merged * own + cost.task)]


def _hierarchical(cost: _Range, W: int) -> list[Leg]:
    """Add up within each node, scatter-reduce between the M owners of a range, and spread the mean within the node.

    Of W ranges, a rank owns M on its node, and merges one of them for all nodes.
    """
    L = cost.costs.ranks_per_node
    M = W // L
    if L == 1:
        return _scatter_reduce(cost, W)
    within = cost.within(W - M if not cost.owners else -(-cost.owners // L) * (L - 1))
    if cost.codec.summable:
        total = cost.of(cost.codec.accumulator_bytes)
        owner = Leg("work", encode=cost.encode, decode=cost.accumulate(M))
        gather = cost.message("fan", total, M - 1, decode=cost.finalize, aside=cost.finalize, crossing=1.0)
    else:
        owner = Leg("work", encode=cost.encode, decode=cost.merge(M - 1))
        gather = cost.message("fan", cost.payload, M - 1, decode=cost.decode, aside=cost.decode, crossing=1.0)
    scatter = cost.message("fan", cost.payload, M - 1, encode=cost.encode, crossing=1.0)
    return [within, *cost.stats(M, M), scatter, owner, gather, within]


FORMS: dict[str, Callable[[_Range, int], list[Leg]]] = {
    "allgather": _allgather,
    "hierarchical": _hierarchical,
    "ring": _ring,
    "scatter_reduce": _scatter_reduce,
    "sparse_reduce": _sparse_reduce,
}
"""By strategy: a function of a range's costs and the number of ranks."""


def route(
    spec: str, strategy: str, partitions: int, numel: int, costs: Costs, itemsize: int = 4, fused: int = 1,
    codec: CodecCosts | None = None, in_place: bool = True,
) -> Route:  # fmt: skip
    """Return the route of a tensor.

    Args:
        spec: A compressor of `costs`.
        strategy: One of `FORMS`.
        partitions: Number of ranges that the tensor is cut into.
        numel: Elements of the tensor.
        costs: Costs of this job.
        itemsize: Bytes per element of the tensor.
        fused: Number of equal tensors, including this one, that are fused (`gradwire.sync.fusion`). Of what those with
            the same owner share, and of the preliminary round that all share, the route has the tensor's part.
        codec: Costs of the compressor for this tensor, where they depend on its shape.
        in_place: Whether dense gradients may be added where they are. Velocities are not (see `PlanEntry`).

    Raises:
        OptionError: The strategy needs a server.
        UnknownNameError: The strategy is unknown, or the compressor was not measured.
    """
    if strategy not in FORMS and strategy in STRATEGIES:
        raise OptionError(
            f"The planner knows no times of strategy={strategy!r}: its server has a link and a processor that are not "
            f"among the costs. Simulate it with gradwire simulate --strategy {strategy}, and name it in gradwire.Plan."
        )
    if strategy not in FORMS:
        raise UnknownNameError("strategy", strategy, FORMS)
    W, codec = costs.world_size, codec or costs.codec(spec)
    if W == 1 or numel == 0:
        return Route(())
    shares = W if STRATEGIES[strategy].has_owners else 1
    blocks = -(-numel // RANGE_ALIGNMENT)  # as a job is split: the longest range counts, and none is empty
    partitions = min(partitions, blocks)
    batches = -(-partitions // shares)
    count = min(numel, -(-blocks // partitions) * RANGE_ALIGNMENT)
    group = fused if partitions == 1 else 1
    together = max(1.0, group / shares)
    in_place = in_place and costs.in_place and spec == DENSE_NAME and strategy in IN_PLACE

    def legs(owners: int) -> tuple[Leg, ...]:
        each = _Range(count, itemsize, spec, codec.fused(together), costs, together, group, in_place, owners)
        return tuple(leg for leg in FORMS[strategy](each, W) if leg.messages)

    owners, load = partitions * group, partitions / (batches * shares)
    has_links_alone = 1 < costs.ranks_per_node < W and owners < shares
    return Route(legs(0), batches, load, legs(owners) if has_links_alone else None)


def native_seconds(nbytes: float, costs: Costs) -> float:
    """Seconds of the framework's own ring all-reduce: DRAGONN's 2 (W − 1) (α + m / (W B))."""
    hops, message = 2 * (costs.world_size - 1), nbytes / costs.world_size
    if costs.native is not None:
        return hops * costs.native(message)
    return hops * (costs.slowest.latency + costs.crossing(False) * costs.slowest.busy(message))
