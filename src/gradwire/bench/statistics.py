"""Figures computed from measurements: percentiles, ideal steps, predictions, the split of a step."""
# Shapes: S = timed steps, W = ranks

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

HEADER_BYTES = 66
"""Header bytes of a full TCP segment: Ethernet 14, IPv4 20, TCP with timestamps 32."""


@dataclass(frozen=True)
class Spread:
    """Median with 20th and 80th percentile."""

    median: float
    p20: float
    p80: float
    size: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of a sample; NaN if it is empty."""
        p20, median, p80 = np.percentile(values, (20, 50, 80)).tolist() if values else (math.nan,) * 3
        return cls(median, p20, p80, len(values))


def across_ranks(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Mean over ranks for each step (W rows of S values to S values)."""
    return [fmean(step) for step in zip(*by_rank, strict=True)]


def wire_seconds(num_bytes: float, rate_bits: int | None) -> float:
    """Time of a link for these bytes; 0 if it has no rate."""
    return 0.0 if rate_bits is None else 8 * num_bytes / rate_bits


def ideal_step(compute_seconds: float, num_bytes: float, rate_bits: int | None) -> float:
    """The larger of the step without communication and the bytes of one rank over the rate of its link."""
    return max(compute_seconds, wire_seconds(num_bytes, rate_bits))


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `num_bytes` bytes."""
    return 2 * (world_size - 1) * num_bytes // world_size


@dataclass(frozen=True)
class Split:
    """Shares of a step time, in seconds. They add up to the step.

    Attributes:
        compute: Step without communication, measured in the same job.
        encode: Encodes and merges that the step waited for.
        wire: Remaining time, in which the step waited for the network.
        decode: Decodes that the step waited for.
    """

    compute: float
    encode: float
    wire: float
    decode: float

    @classmethod
    def of(cls, step: float, compute: float, encode: float, decode: float) -> Split:
        """Split a measured step.

        Codecs may run during the backward pass. Codec time that exceeds the difference between the step and compute was
        hidden; it is subtracted from encode and decode in proportion.
        """
        compute = min(compute, step)
        codec, rest = encode + decode, step - compute
        share = min(1.0, rest / codec) if codec > 0 else 0.0
        return cls(compute, encode * share, max(0.0, rest - codec * share), decode * share)


def relative_difference(measured: float, reference: float) -> float:
    """(measured - reference) / reference; NaN if the reference is 0."""
    return (measured - reference) / reference if reference else math.nan
