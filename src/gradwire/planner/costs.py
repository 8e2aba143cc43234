"""What synchronization costs on one machine and network: measured constants, as plain data.

Seconds, bytes and elements throughout. Nothing is measured here: a profiler fills these classes in, the planner and
the simulator read them, and `Costs.to_json` keeps them in a file that a person can read and correct.

A codec is described by a `Curve`, a link by a straight line. Links are straight: a latency and a rate. Codecs are
not: measured on one core, an element of `onebit` takes 0.26 ns to encode in a tensor of a million and 0.69 ns in one
of sixteen million, which no longer fits the caches; a line that fits both is wrong by a factor of two.

Source: HiPress (SOSP 2021), section 3.3, which fits such curves too. Differences: links may differ from rank to rank.
"""

# Shapes: W = ranks.

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import numpy as np

from gradwire.compressors.base.registry import DENSE_NAME
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.wire.frame import HEADER_BYTES

FORMAT, VERSION = "gradwire costs", 2


def _expect_numbers(what: str, values: Iterable[float]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise OptionError(f"Expected {what} of finite numbers of at least 0, got {value!r}. Do: measure it anew.")


def _pairs(xs: Sequence[float], ys: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    sound = x.shape == y.shape and x.ndim == 1 and len(np.unique(x)) >= 2
    if not (sound and np.isfinite([x, y]).all() and (x > 0).all() and (y > 0).all()):
        raise OptionError(
            f"Expected positive measurements at two or more different sizes, got {list(xs)} and {list(ys)}. "
            "Do: measure at least a small and a large size."
        )
    return x, y


@dataclass(frozen=True)
class LinearCost:
    """fixed + slope · x."""

    fixed: float
    slope: float

    def __post_init__(self) -> None:
        _expect_numbers("a line", asdict(self).values())

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    @classmethod
    def fit(cls, xs: Sequence[float], ys: Sequence[float]) -> LinearCost:
        """The line of non-negative parts with the least squares of *relative* errors, so that small sizes count too.

        Raises:
            OptionError: fewer than two different sizes, or a figure that is not positive and finite.
        """
        x, y = _pairs(xs, ys)
        weighted = np.stack([1 / y, x / y], axis=1)
        fixed, slope = np.linalg.lstsq(weighted, np.ones(len(y)), rcond=None)[0]
        if fixed < 0:  # the best of one part alone
            ratio = x / y
            fixed, slope = 0.0, ratio.sum() / (ratio * ratio).sum()
        elif slope < 0:
            fixed, slope = (1 / y).sum() / (1 / y**2).sum(), 0.0
        return cls(float(fixed), float(slope))


@dataclass(frozen=True)
class Curve:
    """Straight pieces through measured points, the outer pieces prolonged; never falling and never below zero.

    Attributes:
        points: (x, y), x rising, y not falling.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        _expect_numbers("a curve", itertools.chain.from_iterable(self.points))
        xs, ys = [x for x, _ in self.points], [y for _, y in self.points]
        if len(xs) < 2 or any(a >= b for a, b in itertools.pairwise(xs)) or ys != sorted(ys):
            raise OptionError(
                f"Expected two or more points, x rising and y not falling, got {self.points}. "
                "Do: Curve.through(xs, ys)."
            )

    def __call__(self, x: float) -> float:
        right = min(max(bisect_right(self.points, (x, math.inf)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> Curve:
        """The curve through measurements: the least at each size, and nowhere more than at a larger size.

        Noise only adds time, so where two points fall it is the earlier one that is wrong.

        Raises:
            OptionError: fewer than two different sizes, or a figure that is not positive and finite.
        """
        x, y = _pairs(xs, ys)
        least: dict[float, float] = {}
        for size, seconds in zip(x.tolist(), y.tolist()):
            least[size] = min(seconds, least.get(size, math.inf))
        sizes = sorted(least)
        lowered = list(itertools.accumulate((least[size] for size in reversed(sizes)), min))[::-1]
        return cls(tuple(zip(sizes, lowered)))


Cost = LinearCost | Curve
FREE = LinearCost(0.0, 0.0)


@dataclass(frozen=True)
class LinkCosts:
    """One direction of a rank's link.

    Attributes:
        latency: seconds from the last byte's departure to its arrival; passes beside other messages.
        seconds_per_byte: of the link, one divided by its rate.
        per_message: seconds that the sending end is busy with a message of no bytes.
    """

    latency: float
    seconds_per_byte: float
    per_message: float = 0.0

    def __post_init__(self) -> None:
        _expect_numbers("link costs", asdict(self).values())

    def busy(self, nbytes: float, messages: float = 1) -> float:
        """Seconds that messages of so many bytes in all occupy the link."""
        return self.per_message * messages + self.seconds_per_byte * nbytes

    def __call__(self, nbytes: float) -> float:
        """Seconds from the start of one message to its arrival: HiPress's T_send, DRAGONN's α + m/B."""
        return self.latency + self.busy(nbytes)


@dataclass(frozen=True)
class CodecCosts:
    """One compressor on one device. All are functions of the number of elements.

    Attributes:
        encode: compensate, encode and stage the residual.
        decode: write what one payload holds.
        merge: decode one of several payloads and add it to a sum.
        payload_bytes: body of a payload, without the frame's header.
        stats: compute what the preliminary round reduces; None where there is none.
        stats_bytes: what a rank sends for it.
        accumulate: add one payload to an accumulator; None for payloads that cannot be summed.
        finalize: decode the sum.
        accumulator_bytes: accumulator of the sum over all ranks.
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

    def __post_init__(self) -> None:
        for group in (("stats", "stats_bytes"), ("accumulate", "finalize", "accumulator_bytes")):
            if len({getattr(self, name) is None for name in group}) > 1:
                raise OptionError(f"Expected {' and '.join(group)} all given or all left out. Do: give the others too.")

    @property
    def summable(self) -> bool:
        return self.accumulate is not None

    @property
    def needs_stats(self) -> bool:
        return self.stats is not None


@dataclass(frozen=True)
class Costs:
    """Everything that the planner and the simulator know of a job's machines.

    Attributes:
        world_size: ranks.
        links: one for all ranks, or one a rank.
        codecs: by spec, ``"none"`` or ``"threelc:sparsity=1.5"``; ``"none"`` is always among them.
        native: a hop of the framework's own ring all-reduce; None where it was not measured: then it is taken to use
            the link as well as can be.
        add: adding a rank's own gradient to a sum, by elements.
        task: the engine's own seconds for each task.
        frame: seconds of the processor (transport and kernel) at each end of a frame, by its bytes.
        frame_bytes: header of a frame.
        made_by: where and how this was measured, for the reader.
    """

    world_size: int
    links: tuple[LinkCosts, ...]
    codecs: Mapping[str, CodecCosts]
    native: LinkCosts | None = None
    add: Cost = FREE
    task: float = 0.0
    frame: Cost = FREE
    frame_bytes: float = float(HEADER_BYTES)
    made_by: str = ""

    def __post_init__(self) -> None:
        _expect_numbers("costs", (self.world_size, self.task, self.frame_bytes))
        if self.world_size < 1 or len(self.links) not in (1, self.world_size):
            raise OptionError(
                f"Expected one link or one for each of {self.world_size} ranks, got {len(self.links)}. "
                "Do: pass links=(link,) where all are alike."
            )
        if DENSE_NAME not in self.codecs:
            raise OptionError('Expected the costs of "none", which all else is compared with. Do: measure it too.')

    def link(self, rank: int) -> LinkCosts:
        """The link of one rank."""
        return self.links[rank % len(self.links)]

    @property
    def slowest(self) -> LinkCosts:
        """What closed forms reckon with: every step of a synchronization waits for the slowest link."""
        return LinkCosts(
            max(link.latency for link in self.links),
            max(link.seconds_per_byte for link in self.links),
            max(link.per_message for link in self.links),
        )

    def codec(self, spec: str) -> CodecCosts:
        """The costs of one compressor.

        Raises:
            UnknownNameError: it was not measured.
        """
        if spec not in self.codecs:
            raise UnknownNameError("measured compressor", spec, self.codecs)
        return self.codecs[spec]

    # -- as a file -------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """A readable document that `from_json` takes back."""
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for field in fields(self):
            document[field.name] = _plain(getattr(self, field.name))
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what `to_json` wrote.

        Raises:
            OptionError: it is no such document, of another version, or has unknown or missing entries.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise OptionError(f"Expected costs as JSON, got something else ({error}). Do: measure them anew.") from None
        document = expect_document(document, FORMAT, VERSION)
        return _read_costs(document)


def expect_document(document: Any, format: str, version: int) -> dict[str, Any]:
    """The content of a JSON document of ours, after a look at what it says it is.

    Raises:
        OptionError: it is something else, or of another version.
    """
    if not isinstance(document, dict) or document.get("format") != format:
        raise OptionError(f"Expected a document of format {format!r}, got another. Do: check which file this is.")
    if document.get("version") != version:
        raise OptionError(
            f"Expected {format} of version {version}, got {document.get('version')!r}. Do: make the file anew with "
            "this release of gradwire."
        )
    return {key: value for key, value in document.items() if key not in ("format", "version")}


def _plain(value: Any) -> Any:
    """Dataclasses as objects and lines of numbers as lists, two levels down."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, (LinearCost, Curve, LinkCosts, CodecCosts)):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: _plain(part) for name, part in parts.items() if part is not None}
    return value


def _read_costs(document: dict[str, Any]) -> Costs:
    found = _expect_fields(document, Costs, "costs")
    found["links"] = tuple(LinkCosts(**_expect_fields(link, LinkCosts, "links")) for link in found["links"])
    if found.get("native") is not None:
        found["native"] = LinkCosts(**_expect_fields(found["native"], LinkCosts, "native"))
    for name in ("add", "frame"):
        if name in found:
            found[name] = _read_cost(found[name], name)
    if not isinstance(found["codecs"], dict):
        raise OptionError(f"Expected codecs by name, got {found['codecs']!r}. Do: measure the costs anew.")
    found["codecs"] = {spec: _read_codec(codec, spec) for spec, codec in found["codecs"].items()}
    return Costs(**found)


def _read_codec(document: Any, spec: str) -> CodecCosts:
    found = _expect_fields(document, CodecCosts, spec)
    return CodecCosts(**{name: _read_cost(cost, f"{spec}, {name}") for name, cost in found.items()})


def _read_cost(document: Any, where: str) -> Cost:
    if isinstance(document, dict) and "points" in document:
        points = _expect_fields(document, Curve, where)["points"]
        return Curve(tuple((float(x), float(y)) for x, y in points))
    return LinearCost(**_expect_fields(document, LinearCost, where))


def _expect_fields(document: Any, cls: type, where: str) -> dict[str, Any]:
    """The entries of a JSON object, none unknown and none missing."""
    known = {field.name for field in fields(cls)}
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    entries = set(document) if isinstance(document, dict) else set()
    if not isinstance(document, dict) or entries - known or needed - entries:
        others = ", ".join(sorted(known - needed)) or "no more"
        raise OptionError(
            f"Expected {', '.join(sorted(needed))} (in {where}) and perhaps {others}, "
            f"got {', '.join(sorted(entries)) or document!r}. Do: correct the file, or measure the costs anew."
        )
    return dict(document)
