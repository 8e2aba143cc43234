"""THC: tensor homomorphic compression, 4 bits per element to an aggregator that only looks up values and adds them.

Biased, because coordinates beyond t_p, a fraction p of them, are clamped; so it needs error feedback. Quantization adds
no bias. No contraction: a rank whose block is small compared to another's may lose more than it has. Payloads add up:
the sum of n payloads is at most n · granularity per coordinate, and decodes to the sum of the decoded payloads, up to
the rounding of float32. Plans whose sums float32 would round are refused, except with `rotate="full"`
(`support.homomorphic`). Blocks with a root mean square below 2^-100 are not sent.

Body: see `support.homomorphic`; the block statistic is the root mean square.

Source: THC (Li et al. 2024), algorithms 2 and 3, sections 5.1 to 5.3. Differences: each block of `block` elements has
its own norm; with one norm for all, blocks of small gradients vanish in the rounding of large ones. `rotate="full"` has
up to 16 blocks, because a single one would be padded to the next power of two. Norms travel as root mean squares, which
never exceed the largest element and so fit a float32. Values of the quantizer lie at m + T (M − m) / g, as in algorithm
3, not g + 1. The paper chooses p for each experiment; here it is 1/32, and p=None chooses it for the number of ranks,
from 1/32 down to 1/256. That makes the mean of copies more accurate, but costs accuracy in trainings whose ranks agree
little, so it is not the default (`support.thc_choice`). Norms are known before the transform starts, which is fused
with quantization; other tensors are processed while norms are reduced.
"""
# Shapes: N elements of the range, B elements a block, G blocks, W ranks

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.compressors.base import LookupTable, Reduction, options
from gradwire.compressors.base.registry import register
from gradwire.compressors.support import thc_choice, thc_tables
from gradwire.compressors.support.homomorphic import Grid, Homomorphic, narrowed, spread, table_of
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.blocks import BlockLayout

_SMALLEST = 2.0**-100


@register
class THC(Homomorphic):
    """THC: rotated blocks as indices into a table, which an aggregator looks up and adds, with error feedback.

    Args:
        bits: Bits of an index, from 2 to 8. With 1, the error is larger than the gradient, and residuals would grow.
        granularity: Largest value of the table; None chooses it for the number of ranks, see `support.thc_choice`.
        p: Fraction of coordinates that are clamped; None chooses it likewise, as if ranks held copies.
        block: Elements that are rotated together and share a scale; a power of two from 64 to 2^20.
        rotate: "block"; "full" for the longest blocks that hardly need padding; "none".
        accumulator_bits: Bits of an accumulator, 8, 16 or 32; None for the fewest that hold the sum.
    """

    name: ClassVar[str] = "thc"
    reductions: ClassVar[tuple[Reduction, ...]] = ("max",)

    def __init__(
        self,
        bits: int = 4,
        granularity: int | None = None,
        p: float | None = 1 / 32,
        block: int = 1024,
        rotate: str = "block",
        accumulator_bits: int | None = None,
    ) -> None:
        super().__init__(options.integer("bits", bits, 2, 8), block, rotate, accumulator_bits)
        self.p = None if p is None else options.real("p", p, thc_tables.MIN_P, 0.5)
        self.granularity = granularity
        if granularity is not None:
            most = thc_tables.MAX_GRANULARITY
            self.granularity = options.integer("granularity", granularity, 1, most)
            thc_tables.check(self.bits, self.granularity, self.p or thc_choice.CLAMPED[0])

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {**super().options, "granularity": self.granularity, "p": self.p}

    def variance(self, spec: TensorSpec) -> float:
        """A coordinate is off by at most M, or by itself if it is clamped; no element decodes to more than M √B."""
        t = thc_tables.threshold(self.p or thc_choice.CLAMPED[-1])
        longest = min(self._block(spec.numel), self._padded(spec.numel))
        return max(1 + t * t, t * math.sqrt(longest))

    def table(self, world_size: int) -> thc_tables.Table:
        """Table for this number of ranks."""
        if self.granularity is None:
            return thc_choice.choose(world_size, self.bits, self.p, self.accumulator_bits).table
        p = thc_choice.choose_p(world_size, self.bits, self.granularity) if self.p is None else self.p
        return thc_tables.optimal(self.bits, self.granularity, p)

    def derived_config(self, world_size: int) -> dict[str, Any]:
        """See `Compressor`; and p, if it is chosen: tables of evenly spaced values are the same for any p."""
        chosen = {"p": self.table(world_size).p} if self.p is None else {}
        return {**super().derived_config(world_size), **chosen}

    def lookup_table(self, world_size: int) -> LookupTable:
        """See `LookupCompressor`."""
        table = self.table(world_size)
        return table_of(table.values, table.bits)

    def _block_stats(self, x: np.ndarray, blocks: BlockLayout, buffer: np.ndarray, scale: float) -> list[np.ndarray]:
        """Algorithm 3, line 7: norm of each block, divided by the square root of its length."""
        sums = np.empty(blocks.num_blocks)
        kernels.block_square_sums(x, blocks.block, sums)
        means = np.sqrt(sums / blocks.lengths()).astype(np.float32) * np.float32(scale)
        means[~np.isfinite(means)] = np.inf
        return [means]

    def _grid(self, stats: Sequence[np.ndarray], blocks: BlockLayout, world_size: int, scale: float) -> Grid:
        """Lines 11 to 15: on the rank with the largest norm, coordinates have variance 1, and M is t_p."""
        means, longer, table = stats[0].astype(np.float64), spread(blocks), self.table(world_size)
        t, granularity = table.threshold, table.granularity
        sent = means >= _SMALLEST
        units = scale / np.where(sent, means * longer, np.inf)
        factors = np.where(sent, means / longer, 0) * (2 * t / granularity)
        same = np.ones(blocks.num_blocks)
        return Grid(*map(narrowed, (units, -t * same, granularity / (2 * t) * same, factors, 0 * same)))

    def _are_valid(self, stats: Sequence[np.ndarray]) -> bool:
        return bool(((stats[0] >= 0) & (stats[0] < np.inf)).all())  # not so for NaN
