"""What is computed from measured figures: percentiles, intervals, ideal steps, predictions, the split of a step."""
# Shapes: S = timed steps, W = ranks

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

HEADER_BYTES = 66
"""What a full TCP segment carries besides payload: Ethernet 14, IPv4 20, TCP with timestamps 32."""

# Student's t for a 95 % interval, by values.
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True)
class Spread:
    """Median with 20th and 80th percentile."""

    median: float
    p20: float
    p80: float
    size: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of a sample; NaN where it is empty."""
        return cls(percentile(values, 0.5), percentile(values, 0.2), percentile(values, 0.8), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of the sample lies below, interpolated linearly; NaN of an empty sample."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of an empty sample."""
    return sum(values) / len(values) if values else math.nan


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by Student's t; NaN where there are too few values for one."""
    if len(values) < 2:
        return mean(values), math.nan
    return mean(values), _T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def across_ranks(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Mean over ranks, step by step (W rows of S values to S)."""
    return [mean(step) for step in zip(*by_rank, strict=True)]


def wire_seconds(num_bytes: float, rate_bits: int | None) -> float:
    """How long a link takes for so many bytes; 0 where it has no rate."""
    return 0.0 if rate_bits is None else 8 * num_bytes / rate_bits


def ideal_step(compute_seconds: float, num_bytes: float, rate_bits: int | None) -> float:
    """The larger of the step without communication and the bytes of one rank over the link's rate."""
    return max(compute_seconds, wire_seconds(num_bytes, rate_bits))


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """What each rank sends in a ring all-reduce of so many bytes."""
    return 2 * (world_size - 1) * num_bytes // world_size


@dataclass(frozen=True)
class Split:
    """A step's time by cause, in seconds. The parts add up to the step.

    Attributes:
        compute: the step without communication, measured in the same job.
        encode: encodes and merges that the step waited for.
        decode: the same of decodes.
        wire: the rest, in which the step waited for the network.
    """

    compute: float
    encode: float
    wire: float
    decode: float

    @classmethod
    def of(cls, step: float, compute: float, encode: float, decode: float) -> Split:
        """From measured times.

        Codecs may run beside the backward. What of them does not fit between compute and the step is hidden, so
        that it is taken from encode and decode in proportion.
        """
        compute = min(compute, step)
        codec, rest = encode + decode, step - compute
        share = min(1.0, rest / codec) if codec > 0 else 0.0
        return cls(compute, encode * share, max(0.0, rest - codec * share), decode * share)


def relative_difference(measured: float, reference: float) -> float:
    """(measured - reference) / reference; NaN where there is no reference."""
    return (measured - reference) / reference if reference else math.nan
