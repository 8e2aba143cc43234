"""Uniform THC: evenly spaced levels between the smallest and the largest coordinate of all ranks, which add up.

Unbiased. Payloads add up as those of `thc` do, of which this is the simple form: the table is 0, 1, ... 2^bits − 1, and
nothing is clamped. Body: see `homomorphic`; what is shared is the smallest and the largest
coordinate of each block, over 2^20.

Source: THC (Li et al. 2024), algorithm 1; with rotation and feedback, which can be switched off, as in appendix D.3.
Differences: a smallest and a largest for each block; `rotate="full"` has one of all.
"""
# Shapes: N elements of the range, B elements a block, G blocks, W ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gradwire.compressors.base import FeedbackName, Reduction
from gradwire.compressors.base.registry import register
from gradwire.compressors.support import thc_choice
from gradwire.compressors.support.homomorphic import Coding, Grid, Homomorphic, coding_of, narrowed, spread
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import Blocks

# What is shared is in these units, so that the coordinates of a block of the largest floats are floats too.
_UNIT = 2.0**20
_SMALLEST = 2.0**-120


@register
class UTHC(Homomorphic):
    """Uniform THC: evenly spaced levels between the smallest and largest coordinate of all ranks, which add up.

    Args:
        bits: of an element, from 1 to 8.
        block: elements that are rotated together and share levels; a power of two from 64 to 2^20.
        rotate: "block"; "full" for ranges as they come, whatever `block` is; "none".
        lane_bits: 8, 16 or 32 for lanes of that width or an error; None for the narrowest that hold the sum.
    """

    name: ClassVar[str] = "uthc"
    reductions: ClassVar[tuple[Reduction, ...]] = ("min", "max")
    unbiased = True
    default_feedback: FeedbackName = "none"

    def __init__(self, bits: int = 4, block: int = 1024, rotate: str = "block", lane_bits: int | None = None) -> None:
        super().__init__(bits, block, rotate, lane_bits)

    def variance(self, spec: TensorSpec) -> float:
        """A level is 2 / (2^bits − 1) of the largest coordinate at most, and a coordinate as long as the block."""
        longest = min(self._block(spec.numel), self._padded(spec.numel))
        return float(2 * longest / (2**self.bits - 1))

    def coding(self, world_size: int) -> Coding:
        """The same for any number of ranks."""
        return coding_of(tuple(range(2**self.bits)), self.bits)

    def lane_dtype(self, world_size: int) -> np.dtype:
        """See `thc_choice.lane_for`."""
        return thc_choice.lane_for(world_size, 2**self.bits - 1, self.lane_bits)

    def _sides(self, x: np.ndarray, blocks: Blocks, work: np.ndarray, scale: float) -> list[np.ndarray]:
        """Lines 1 and 2, of rotated blocks."""
        low, high = np.empty(blocks.num_blocks, np.float32), np.empty(blocks.num_blocks, np.float32)
        if x.size and not np.isfinite(kernels.abs_max(x)):
            low.fill(-np.inf)
            high.fill(np.inf)
            return [low, high]
        kernels.block_extremes(x, blocks, narrowed(scale / _UNIT / spread(blocks)), work, low, high)
        return [low, high]

    def _grid(self, sides: Sequence[np.ndarray], blocks: Blocks, granularity: int, scale: float) -> Grid:
        """Line 5: the level below and above."""
        low, high = (side.astype(np.float64) for side in sides)
        longer, gaps = spread(blocks), (high - low) / granularity
        rates = 1 / np.where(gaps >= _SMALLEST, gaps, np.inf)
        factors, bases = gaps * (_UNIT / longer), (low + high) * (_UNIT / 2 * longer)
        return Grid(*map(narrowed, (scale / _UNIT / longer, low, rates, factors, bases)))

    def _possible(self, sides: Sequence[np.ndarray]) -> bool:
        low, high = sides
        return bool((np.isfinite(low) & np.isfinite(high) & (low <= high)).all())
