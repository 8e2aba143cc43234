"""Hadamard transform of blocks: sums and differences of elements 1, 2, 4, ... apart, in that order.

Not normalized: applying it twice multiplies by the block length.
"""
# Shapes: N elements, B elements per block

from __future__ import annotations

import numpy as np


def hadamard(x: np.ndarray, block: int) -> None:
    """Transform each block of float32 x in place.

    Args:
        x: float32[N], N a multiple of B.
        block: B, a power of two.
    """
    if block < 1 or block & (block - 1) or x.size % block:
        raise ValueError(f"Expected whole blocks of a power of two, got {x.size} elements in {block} (in hadamard).")
    apart = 1
    with np.errstate(all="ignore"):
        while apart < block:
            pairs = x.reshape(-1, 2, apart)
            low, high = pairs[:, 0].copy(), pairs[:, 1].copy()
            pairs[:, 0], pairs[:, 1] = low + high, low - high
            apart *= 2
