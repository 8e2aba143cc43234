"""THC: tensor homomorphic compression, 4 bits an element to an aggregator that only looks up and adds.

Biased by the clamp at t_p, which takes a fraction p of the coordinates, so it needs error feedback; what quantisation
adds has no bias. No contraction: a rank whose block is small beside another's loses more than it has. Payloads add up:
the aggregate of n payloads is n · granularity at most in each lane, and decodes to exactly the mean of what they decode
to. Its centred lanes are exact in float32, before and after the transform, for n · granularity · block up to 2^24.

Blocks below 2^-100 in root mean square are not sent. Body: see `homomorphic`; what is shared is the root mean square of
each block.

Source: THC (Li et al. 2024), algorithms 2 and 3, sections 5.1 to 5.3. Differences: a norm for each block of `block`
elements, not one for all; with one, blocks of small gradients drown in the rounding of large ones. Norms travel as root
mean squares, which are never larger than the largest element and so fit a float32. The quantiser's values are at
m + T (M − m) / g, as in algorithm 3, not g + 1. Norms are known before the transform starts, which is fused with
quantisation; while they are reduced other tensors are worked on.
"""
# Shapes: N elements of the range, B elements a block, G blocks, W ranks

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.compressors.base import Reduction, options
from gradwire.compressors.base.registry import register
from gradwire.compressors.support import thc_choice, thc_tables
from gradwire.compressors.support.homomorphic import Coding, Grid, Homomorphic, coding_of, narrowed, spread
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import Blocks

_SMALLEST = 2.0**-100


@register
class THC(Homomorphic):
    """THC: rotated blocks as indices into a table, which an aggregator looks up and adds, with error feedback.

    Args:
        bits: of an index, from 1 to 8.
        granularity: the largest value of the table; None chooses it for the number of ranks: see `thc_choice`.
        p: the fraction of coordinates that are clamped.
        block: elements that are rotated together and share a scale; a power of two from 64 to 2^20.
        rotate: "block"; "full" for ranges as they come, whatever `block` is; "none".
        lane_bits: 8, 16 or 32 for lanes of that width or an error; None for the narrowest that hold the sum.
    """

    name: ClassVar[str] = "thc"
    reductions: ClassVar[tuple[Reduction, ...]] = ("max",)

    def __init__(
        self,
        bits: int = 4,
        granularity: int | None = None,
        p: float = 1 / 32,
        block: int = 1024,
        rotate: str = "block",
        lane_bits: int | None = None,
    ) -> None:
        super().__init__(bits, block, rotate, lane_bits)
        self.p = options.real("p", p, thc_tables.MIN_P, 0.5)
        self.granularity = granularity
        if granularity is not None:
            most = thc_tables.MAX_GRANULARITY
            self.granularity = options.integer("granularity", granularity, 1, most)
            thc_tables.check(self.bits, self.granularity, self.p)

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {**super().options, "granularity": self.granularity, "p": self.p}

    def variance(self, spec: TensorSpec) -> float:
        """A coordinate is off by M at most, or if it is cut by itself; no element decodes to more than M √B."""
        t, longest = thc_tables.threshold(self.p), min(self._block(spec.numel), self._padded(spec.numel))
        return max(1 + t * t, t * math.sqrt(longest))

    def table(self, world_size: int) -> thc_tables.Table:
        """The table for so many ranks."""
        if self.granularity is None:
            return thc_choice.choose(world_size, self.bits, self.p, self.lane_bits).table
        return thc_tables.optimal(self.bits, self.granularity, self.p)

    def coding(self, world_size: int) -> Coding:
        """See `Homomorphic`."""
        table = self.table(world_size)
        return coding_of(table.values, table.bits)

    def lane_dtype(self, world_size: int) -> np.dtype:
        """See `thc_choice.lane_for`."""
        if self.granularity is None:
            return thc_choice.choose(world_size, self.bits, self.p, self.lane_bits).lane
        return thc_choice.lane_for(world_size, self.granularity, self.lane_bits)

    def _sides(self, x: np.ndarray, blocks: Blocks, work: np.ndarray, scale: float) -> list[np.ndarray]:
        """Algorithm 3, line 7: the norm of each block, over the root of its length."""
        sums = np.empty(blocks.num_blocks)
        kernels.block_square_sums(x, blocks.block, sums)
        means = np.sqrt(sums / blocks.lengths()).astype(np.float32) * np.float32(scale)
        means[~np.isfinite(means)] = np.inf
        return [means]

    def _grid(self, sides: Sequence[np.ndarray], blocks: Blocks, granularity: int, scale: float) -> Grid:
        """Lines 11 to 15: coordinates have variance 1 where a rank's norm is the largest, and M is t_p there."""
        means, longer, t = sides[0].astype(np.float64), spread(blocks), thc_tables.threshold(self.p)
        sent = means >= _SMALLEST
        units = scale / np.where(sent, means * longer, np.inf)
        factors = np.where(sent, means / longer, 0) * (2 * t / granularity)
        same = np.ones(blocks.num_blocks)
        return Grid(*map(narrowed, (units, -t * same, granularity / (2 * t) * same, factors, 0 * same)))

    def _possible(self, sides: Sequence[np.ndarray]) -> bool:
        return bool(((sides[0] >= 0) & (sides[0] < np.inf)).all())  # not so for NaN
