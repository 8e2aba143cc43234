"""What every backend shares: the constants of the formats, and the checks of buffer lengths.

The checks raise, also under ``python -O``: a compiled loop does not look at bounds, so a wrong length that
passed here would be a write outside the buffer.
"""

from __future__ import annotations

import numpy as np

# The canonical order of a sum: blocks, and lanes in a block. Part of the bytes that every backend must give.
SUM_BLOCK = 1024
SUM_LANES = 64

# The random streams: a group is what 128 consecutive Philox counters give.
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


def expect_bits(kernel: str, bits: int) -> int:
    """Elements in a byte, for `bits` bits each."""
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"Expected bits to be 1, 2, 4 or 8, got {bits} (in {kernel}).")
    return 8 // bits


def expect_same_ranks(kernel: str, *lists: object) -> int:
    """Number of ranks, which every list must agree on."""
    sizes = {len(entries) for entries in lists}  # type: ignore[arg-type]
    if len(sizes) != 1:
        raise ValueError(f"Expected one entry a rank in every list, got {sorted(sizes)} (in {kernel}).")
    return sizes.pop()


def half_of(M: float) -> np.float32:
    """The largest float32 that is not above M / 2, so that |x| > half exactly where |x| / M > 1/2.

    M / 2 is itself a float32 except where M is subnormal and odd; there the nearest one may lie above.
    """
    half = np.float32(float(M) * 0.5)
    return np.nextafter(half, np.float32(0)) if float(half) > float(M) * 0.5 else half
