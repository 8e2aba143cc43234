"""Expected sizes of lists of (position, value) pairs, and of their sums over ranks, for the sparse-reduce strategy.

Positions are random: those of a rank are drawn uniformly. Where ranks draw independently, W K pairs of N elements have
N (1 − (1 − K/N)^W) different positions. With an overlap of 1, all ranks have the same K positions. An overlap between
is a mean of both.
"""

# Shapes: N = elements, K = pairs of a rank, U = different positions of all ranks, W = ranks.

from __future__ import annotations

import math
from functools import lru_cache

VALUE_BYTES = 4
BITMAP_BYTES = 1 / 8  # an element
_HALVINGS = 40  # of the interval in which a density is searched


def list_bytes(density: float) -> float:
    """Bytes of a list, for each element, in which a share of `density` of the elements is."""
    if density <= 0:
        return 0.0
    return VALUE_BYTES * density + min(BITMAP_BYTES, density * (2 + math.log2(1 / density)) / 8)


@lru_cache(maxsize=4096)
def density(bytes_per_element: float) -> float:
    """K / N of a list with these bytes for each element: the inverse of `list_bytes`."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if list_bytes(middle) >= bytes_per_element else (middle, high)
    return high


def density_of_sum(of_one: float, world_size: int, overlap: float) -> float:
    """U / N, if each rank sends a share of `of_one` of the elements."""
    return overlap * of_one + (1 - overlap) * -math.expm1(world_size * math.log1p(-min(of_one, 1 - 1e-12)))


def sum_bytes(payload_bytes: float, count: float, world_size: int, overlap: float) -> float:
    """Bytes of the sum of all ranks' payloads, for `count` elements, and however many owners it is cut for."""
    if count <= 0:
        return 0.0
    return count * list_bytes(density_of_sum(density(payload_bytes / count), world_size, overlap))


def growth(payload_bytes: float, count: float, world_size: int, overlap: float) -> float:
    """U / K: how many times the pairs of one rank the sum has."""
    if count <= 0 or payload_bytes <= 0:
        return 1.0
    one = density(payload_bytes / count)
    return density_of_sum(one, world_size, overlap) / one
