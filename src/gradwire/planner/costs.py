"""Costs of synchronization on one machine and network: measured constants, as plain data.

Units are seconds, bytes and elements. Calibration fills these classes in, the planner and the simulator read them, and
`Costs.to_json` keeps them in a file that a person can read and correct.

A link is a straight line, of latency and rate. A codec has curves.

Source: HiPress (SOSP 2021), section 3.3. Differences: ranks may have different links.
"""

# Shapes: W = ranks.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from gradwire.compressors.base.registry import DENSE_NAME
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.planner.curves import FREE, Cost, Curve, LinearCost, expect_numbers, lowered
from gradwire.planner.documents import CORRECT, expect_fields, read_document
from gradwire.wire.frame import HEADER_BYTES

FORMAT, VERSION = "gradwire costs", 3
SHARED = ("shared_encode", "shared_decode", "shared_merge")
"""Fields of `CodecCosts` that are seconds, whatever the number of elements."""


@dataclass(frozen=True)
class LinkCosts:
    """One direction of a rank's link.

    Attributes:
        latency: Seconds from the last byte's departure to its arrival. Overlaps with other messages.
        seconds_per_byte: Inverse of the link's rate.
        per_message: Seconds that the sending end is busy with an empty message.
    """

    latency: float
    seconds_per_byte: float
    per_message: float = 0.0

    def __post_init__(self) -> None:
        expect_numbers("Costs of a link", asdict(self).values())

    def busy(self, nbytes: float) -> float:
        """Seconds that a message of `nbytes` occupies the link."""
        return self.per_message + self.seconds_per_byte * nbytes

    def __call__(self, nbytes: float) -> float:
        """Seconds from the start of one message to its arrival: HiPress's T_send, DRAGONN's α + m/B."""
        return self.latency + self.busy(nbytes)


def slowest(links: Sequence[LinkCosts]) -> LinkCosts:
    """Return the worst of each figure."""
    return LinkCosts(
        max(link.latency for link in links),
        max(link.seconds_per_byte for link in links),
        max(link.per_message for link in links),
    )


@dataclass(frozen=True)
class CodecCosts:
    """One compressor on one device. All costs are functions of the number of elements.

    Attributes:
        encode: Seconds to compensate, encode and stage the residual.
        decode: Seconds to decode a payload.
        merge: Seconds to decode one of several payloads and add it to a sum.
        payload_bytes: Bytes of a payload, without the frame's header.
        stats: Seconds to compute what the preliminary round reduces; None if there is none.
        stats_bytes: Bytes that a rank sends for it.
        accumulate: Seconds to add a payload to an accumulator; None if payloads cannot be summed.
        finalize: Seconds to decode the sum.
        accumulator_bytes: Bytes of the accumulator of the sum over all ranks.
        squares: Whether these are costs of square matrices, because the compressor's bytes depend on the shape.
        shared_encode, shared_decode, shared_merge: Seconds of `encode`, `decode` and `merge` that the tensors of a
            fusion group share, because one compiled call is for all of them.
    """

    encode: Cost
    decode: Cost
    merge: Cost
    payload_bytes: Cost
    stats: Cost | None = None
    stats_bytes: Cost | None = None
    accumulate: Cost | None = None
    finalize: Cost | None = None
    accumulator_bytes: Cost | None = None
    squares: bool = False
    shared_encode: float = 0.0
    shared_decode: float = 0.0
    shared_merge: float = 0.0

    def __post_init__(self) -> None:
        expect_numbers("Shared seconds", (self.shared_encode, self.shared_decode, self.shared_merge))
        for group in (("stats", "stats_bytes"), ("accumulate", "finalize", "accumulator_bytes")):
            if len({getattr(self, name) is None for name in group}) > 1:
                raise OptionError(f"Only some of {', '.join(group)} are given. Pass all of them, or none.")

    @property
    def summable(self) -> bool:
        return self.accumulate is not None

    @property
    def needs_stats(self) -> bool:
        return self.stats is not None

    @property
    def stats_at_owner(self) -> bool:
        """See `Compressor`. The statistics that grow with a tensor are those whose size depends on its shape."""
        return self.needs_stats and self.squares

    def fused(self, num_tensors: float) -> CodecCosts:
        """Return the costs of each of `num_tensors` tensors that are encoded, decoded or merged in one call."""
        share = 1 - 1 / num_tensors
        return replace(
            self,
            encode=lowered(self.encode, share * self.shared_encode),
            decode=lowered(self.decode, share * self.shared_decode),
            merge=lowered(self.merge, share * self.shared_merge),
        )


@dataclass(frozen=True)
class Costs:
    """Everything that the planner and the simulator know about a job's machines.

    Attributes:
        world_size: Number of ranks.
        links: One link for all ranks, or one per rank: to another node, while all ranks of the node use it.
        codecs: Costs by spec, such as ``"none"`` or ``"threelc:sparsity=1.5"``. ``"none"`` must be among them.
        native: One hop of the framework's own ring all-reduce. None means that it uses the link fully.
        add: Seconds to add a rank's own gradient to a sum, by elements.
        task: Seconds of the engine itself per task.
        frame: Processor seconds (transport and kernel) at each end of a frame, by its bytes.
        frame_bytes: Bytes of a frame's header.
        ranks_per_node: Ranks that share a node.
        within: Link between two ranks of a node; None where nodes have one rank.
        overlap: How far ranks send the same positions, where payloads list positions: from 0, if they are independent,
            to 1, if they are equal.
        in_place: Whether dense gradients are where they can be added. If not, as on an accelerator, the costs of
            ``"none"`` include copies to the host and back.
        made_by: Where and how this was measured, for the reader.
    """

    world_size: int
    links: tuple[LinkCosts, ...]
    codecs: Mapping[str, CodecCosts]
    native: LinkCosts | None = None
    add: Cost = FREE
    task: float = 0.0
    frame: Cost = FREE
    frame_bytes: float = float(HEADER_BYTES)
    ranks_per_node: int = 1
    within: LinkCosts | None = None
    overlap: float = 0.0
    in_place: bool = True
    made_by: str = ""

    def __post_init__(self) -> None:
        expect_numbers("Costs", (self.task, self.frame_bytes, self.overlap))
        if self.overlap > 1:
            raise OptionError(f"overlap is a share from 0 to 1, not {self.overlap!r}.")
        if type(self.in_place) is not bool:
            raise OptionError(f"in_place is true or false, not {self.in_place!r}.")
        for name in ("world_size", "ranks_per_node"):
            if type(getattr(self, name)) is not int:
                raise OptionError(f"{name} is a whole number of ranks, not {getattr(self, name)!r}.")
        if self.world_size < 1 or len(self.links) not in (1, self.world_size):
            raise OptionError(
                f"{self.world_size} ranks have one link for all, or one each, not {len(self.links)}. "
                "Pass links=(link,) if all are the same."
            )
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise OptionError(
                f"{self.world_size} ranks do not fill nodes of {self.ranks_per_node}. Pass a number of ranks that is "
                "a multiple of it."
            )
        if (self.within is None) != (self.ranks_per_node == 1):
            raise OptionError(
                f"Nodes of {self.ranks_per_node} ranks and a link within nodes of {self.within} do not fit together. "
                "Pass both, or neither."
            )
        if DENSE_NAME not in self.codecs:
            raise OptionError('The costs of "none" are missing, which all others are compared with. Measure it too.')

    @cached_property
    def slowest(self) -> LinkCosts:
        """The worst of all links, which every step of a synchronization waits for. Of a single node, that within it."""
        return self.within if self.within is not None and self.is_one_node else slowest(self.links)

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks share a node."""
        return self.ranks_per_node == self.world_size

    def crossing(self, to_all: bool) -> float:
        """Return the share of a rank's messages that take `slowest`: those that leave its node, if there are several.

        Args:
            to_all: Whether they go to all other ranks, in place of the next one only, as on a ring.
        """
        if self.is_one_node:
            return 1.0
        if to_all:
            return (self.world_size - self.ranks_per_node) / max(1, self.world_size - 1)
        return 1 / self.ranks_per_node

    def codec(self, spec: str) -> CodecCosts:
        """Return the costs of one compressor.

        Raises:
            UnknownNameError: It was not measured.
        """
        if spec not in self.codecs:
            raise UnknownNameError("measured compressor", spec, self.codecs)
        return self.codecs[spec]

    def add_bytes(self, nbytes: float) -> float:
        """Return the seconds to add arrays of `nbytes`."""
        return self.add(nbytes / 4)  # which was measured with float32

    def sum_in_place(self, nbytes: float, payloads: int) -> float:
        """Return the seconds to add dense payloads of `nbytes` to a rank's own gradient, in one sweep of all of them.

        `add` is the time to read two arrays and to write one.
        """
        return (payloads + 2) / 3 * self.add_bytes(nbytes)

    # -- as a file -------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return a readable document for `from_json`."""
        known = asdict(self, dict_factory=lambda pairs: {name: value for name, value in pairs if value is not None})
        return json.dumps({"format": FORMAT, "version": VERSION, **known}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what `to_json` wrote.

        Raises:
            OptionError: It is another document or version, or has unknown or missing entries.
        """
        found = expect_fields(read_document(text, FORMAT, VERSION), cls, "costs")
        if not isinstance(found["links"], list):
            raise OptionError(f"links must be a list, not {found['links']!r}. {CORRECT}")
        found["links"] = tuple(LinkCosts(**expect_fields(link, LinkCosts, "links")) for link in found["links"])
        for name in ("native", "within"):
            if found.get(name) is not None:
                found[name] = LinkCosts(**expect_fields(found[name], LinkCosts, name))
        for name in ("add", "frame"):
            if name in found:
                found[name] = _read_cost(found[name], name)
        if not isinstance(found["codecs"], dict):
            raise OptionError(f"codecs must be an object with a codec per name, not {found['codecs']!r}. {CORRECT}")
        found["codecs"] = {spec: _read_codec(codec, spec) for spec, codec in found["codecs"].items()}
        return cls(**found)


def _read_codec(document: Any, spec: str) -> CodecCosts:
    found = expect_fields(document, CodecCosts, spec)
    costs: dict[str, Any] = {"squares": found.pop("squares", False) is True}
    costs |= {name: found.pop(name) for name in SHARED if name in found}
    costs |= {name: _read_cost(cost, f"{spec}, {name}") for name, cost in found.items()}
    return CodecCosts(**costs)


def _read_cost(document: Any, where: str) -> Cost:
    if isinstance(document, dict) and "points" in document:
        points = expect_fields(document, Curve, where)["points"]
        if not (isinstance(points, list) and all(isinstance(each, list) and len(each) == 2 for each in points)):
            raise OptionError(f"points must be a list of pairs, not {points!r} (in {where}). {CORRECT}")
        return Curve(tuple((x, y) for x, y in points))
    return LinearCost(**expect_fields(document, LinearCost, where))
