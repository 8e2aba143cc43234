"""Uniform THC: evenly spaced levels between the smallest and the largest coordinate of all ranks, which add up.

Unbiased, except for blocks whose levels would be less than 2^-100 apart but are not the same: they decode to zeros.
Payloads add up like those of `thc`, of which this is the simple form: the table is 0, 1, ... 2^bits − 1, and nothing is
clamped.

Body: see `support.homomorphic`; the block statistics are the smallest and the largest coordinate, divided by 2^20.

Source: THC (Li et al. 2024), algorithm 1; with rotation and feedback, which can be switched off, as in appendix D.3.
Differences: each block has its own smallest and largest coordinate; `rotate="full"` has up to 16 blocks, because a
single one would be padded to the next power of two.
"""
# Shapes: N elements of the range, B elements a block, G blocks, W ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gradwire.compressors.base import FeedbackName, LookupTable, Reduction
from gradwire.compressors.base.registry import register
from gradwire.compressors.support.homomorphic import Grid, Homomorphic, narrowed, spread, table_of
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import BlockLayout

# Unit of the block statistics: coordinates of a block of the largest floats are then floats, too.
_UNIT = 2.0**20
_SMALLEST = 2.0**-120  # distance of levels, in that unit, of which there is an inverse


@register
class UTHC(Homomorphic):
    """Uniform THC: evenly spaced levels between the smallest and the largest coordinate of all ranks, which add up.

    Args:
        bits: Bits of an element, from 1 to 8.
        block: Elements that are rotated together and share levels; a power of two from 64 to 2^20.
        rotate: "block"; "full" for the longest blocks that hardly need padding; "none".
        accumulator_bits: Bits of an accumulator, 8, 16 or 32; None for the fewest that hold the sum.
    """

    name: ClassVar[str] = "uthc"
    reductions: ClassVar[tuple[Reduction, ...]] = ("min", "max")
    unbiased = True
    default_feedback: FeedbackName = "none"

    def __init__(
        self, bits: int = 4, block: int = 1024, rotate: str = "block", accumulator_bits: int | None = None
    ) -> None:
        super().__init__(bits, block, rotate, accumulator_bits)

    def variance(self, spec: TensorSpec) -> float:
        """A level is at most 2 / (2^bits − 1) of the largest coordinate, which is at most the norm of the block."""
        longest = min(self._block(spec.numel), self._padded(spec.numel))
        return float(2 * longest / (2**self.bits - 1))

    def lookup_table(self, world_size: int) -> LookupTable:
        """The same for any number of ranks."""
        return table_of(tuple(range(2**self.bits)), self.bits)

    def _block_stats(self, x: np.ndarray, blocks: BlockLayout, buffer: np.ndarray, scale: float) -> list[np.ndarray]:
        """Lines 1 and 2, after the rotation."""
        low, high = np.empty(blocks.num_blocks, np.float32), np.empty(blocks.num_blocks, np.float32)
        if x.size and not np.isfinite(kernels.abs_max(x)):
            low.fill(-np.inf)
            high.fill(np.inf)
            return [low, high]
        kernels.block_extremes(x, blocks, narrowed(scale / _UNIT / spread(blocks)), buffer, low, high)
        return [low, high]

    def _grid(self, stats: Sequence[np.ndarray], blocks: BlockLayout, world_size: int, scale: float) -> Grid:
        """Line 5: the level below and above."""
        low, high = (each.astype(np.float64) for each in stats)
        longer, gaps = spread(blocks), (high - low) / self.max_contribution(world_size)
        is_tiny = (gaps > 0) & (gaps < _SMALLEST)
        gaps, middles = np.where(is_tiny, 0, gaps), np.where(is_tiny, 0, low + high)
        rates = 1 / np.where(gaps > 0, gaps, np.inf)
        factors, bases = gaps * (_UNIT / longer), middles * (_UNIT / 2 * longer)
        return Grid(*map(narrowed, (scale / _UNIT / longer, low, rates, factors, bases)))

    def _are_valid(self, stats: Sequence[np.ndarray]) -> bool:
        low, high = stats
        return bool((np.isfinite(low) & np.isfinite(high) & (low <= high)).all())
