"""Constants of the formats and checks of buffer lengths, shared by all backends.

The checks also raise under ``python -O``: compiled loops do not check bounds, so a wrong length would make them write
outside the buffer.
"""

from __future__ import annotations

import numpy as np

# Canonical order of a sum: blocks, and lanes within a block. It determines bytes that all backends must agree on.
SUM_BLOCK = 1024
SUM_LANES = 64

# Random streams: a group holds the output of 128 consecutive Philox counters.
RANDOM_COUNTERS = 128
RANDOM16_GROUP = 8 * RANDOM_COUNTERS
RANDOM32_GROUP = 4 * RANDOM_COUNTERS

# Quartic (3^5) and zero-run encoding. ZERO_BYTE is five digits of value 0; run bytes stand for 2 to 14 of it.
TERNARY_DIGITS = 5
NUM_QUARTIC = 243
ZERO_BYTE = 121
MAX_RUN = 14

INT8_MAX = 127


def ceil_div(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def expect_size(kernel: str, what: str, array: np.ndarray, size: int) -> None:
    """Raise unless `array` has exactly `size` elements."""
    if array.size != size:
        raise ValueError(f"Expected {what} of {size} elements, got {array.size} (in {kernel}).")


def expect_room(kernel: str, x: np.ndarray, out: np.ndarray) -> None:
    """Raise unless `out`, uint8, has room for the bytes of `x`."""
    if out.size < x.nbytes:
        raise ValueError(f"Expected out of at least {x.nbytes} bytes, got {out.size} (in {kernel}).")


def expect_bits(kernel: str, bits: int) -> int:
    """Elements per byte, of `bits` bits each."""
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"Expected bits to be 1, 2, 4 or 8, got {bits} (in {kernel}).")
    return 8 // bits


def expect_same_ranks(kernel: str, *lists: object) -> int:
    """Number of ranks. Raise unless all lists agree on it."""
    sizes = {len(entries) for entries in lists}  # type: ignore[arg-type]
    if len(sizes) != 1:
        raise ValueError(f"Expected one entry per rank in every list, got {sorted(sizes)} (in {kernel}).")
    return sizes.pop()


def half_of(M: float) -> np.float32:
    """The largest float32 not above M / 2, so that |x| > half if and only if |x| / M > 1/2.

    M / 2 itself is a float32 unless M is subnormal and odd. Then the nearest float32 may be above it.
    """
    half = np.float32(float(M) * 0.5)
    return np.nextafter(half, np.float32(0)) if float(half) > float(M) * 0.5 else half
