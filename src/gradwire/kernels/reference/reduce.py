"""Reductions of a gradient to a few numbers.

Sums are float64 in a fixed order, so that every backend and every number of threads computes the same bits. The input
is divided into blocks of 1,024 elements, the last one padded with zeros. In each block, lane j of 64 adds elements j,
64 + j, 128 + j, ...; then the lanes are added by halving (lane j += lane j + 32, then + 16, ... + 1). The results of
the blocks are summed in the same way, until one is left. Maxima compare bits as integers, so their order is irrelevant.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import SUM_BLOCK, SUM_LANES, ceil_div, expect_size
from gradwire.kernels.reference.elements import as_float32

_INFINITY_BITS = np.int32(0x7F800000)
_NAN = np.float32(np.nan)


def block_sum64(values: np.ndarray) -> np.float64:
    """Sum of float64 in the canonical order, or 0.0 of nothing."""
    with np.errstate(all="ignore"):
        while True:
            num_blocks = max(1, ceil_div(values.size, SUM_BLOCK))
            padded = np.zeros(num_blocks * SUM_BLOCK)
            padded[: values.size] = values
            rows = padded.reshape(num_blocks, SUM_BLOCK // SUM_LANES, SUM_LANES)
            lanes = np.zeros((num_blocks, SUM_LANES))
            for row in range(rows.shape[1]):
                lanes = lanes + rows[:, row]
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = lanes[:, :half] + lanes[:, half:]
            values = lanes[:, 0]
            if values.size == 1:
                return np.float64(values[0])


def abs_max(x: np.ndarray) -> np.float32:
    """Largest magnitude. NaN if an element is not finite, 0 if there are no elements."""
    bits = as_float32(x).view(np.int32) & np.int32(0x7FFFFFFF)
    largest = bits.max(initial=np.int32(0))
    return _NAN if largest >= _INFINITY_BITS else largest.view(np.float32)


def count_nonfinite(x: np.ndarray) -> int:
    """Number of elements that are infinite or NaN as float32."""
    return int(np.count_nonzero(~np.isfinite(as_float32(x))))


def block_abs_max(x: np.ndarray, block: int, out: np.ndarray) -> None:
    """Largest magnitude of each block of `block` elements. NaN for a block with an element that is not finite."""
    expect_size("block_abs_max", "out", out, ceil_div(x.size, block))
    for b in range(out.size):
        out[b] = abs_max(x[b * block : (b + 1) * block])
