"""The choice of bits and granularity as ranks are added: the rule that `thc` follows where no granularity is given.

Sums of n values of a table with granularity g need lanes that hold n g. The paper's choice, 4 bits and g = 30, fills
lanes of 8 bits at 8 ranks. What an average loses to rounding falls with the number of ranks, so more of them can do
with a smaller g, later with fewer bits, and keep the error of the paper's choice at 8 ranks. The rule: of all (bits,
lanes) with that error or less, with the best g that fits the lanes, take the fewest bits on both ways together. Where
none has it (fewer ranks than 8, fewer bits than 4), all bits allowed, in the narrowest lanes that they fit.

Source: THC (Li et al. 2024), section 8.4, which says what trades against what and leaves the choice open.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gradwire.compressors.thc_tables import Table, optimal
from gradwire.core.errors import OptionError

LANE_BITS = (8, 16, 32)
# The paper's choice, and the ranks that its lanes have room for.
PAPER_BITS, PAPER_GRANULARITY, PAPER_RANKS = 4, 30, 8


class Choice(NamedTuple):
    """A table and lanes that hold its sums."""

    table: Table
    lane: np.dtype


def lane_for(world_size: int, granularity: int, lane_bits: int | None = None) -> np.dtype:
    """The narrowest lanes, or those of `lane_bits`, that hold the sum of `world_size` values up to `granularity`.

    Raises:
        OptionError: they do not.
    """
    largest = world_size * granularity
    wide_enough = [bits for bits in LANE_BITS if largest < 1 << bits]
    if lane_bits in wide_enough or (lane_bits is None and wide_enough):
        return np.dtype(f"u{(lane_bits or wide_enough[0]) // 8}")
    widest = lane_bits or LANE_BITS[-1]
    wider = f"lane_bits={wide_enough[0]}, or " if wide_enough else ""
    raise OptionError(
        f"Expected sums below 2^{widest}, for lanes of {widest} bits, got {world_size} ranks times a granularity of "
        f"{granularity}. Do: pass {wider}a granularity of at most {(2**widest - 1) // world_size}, or leave both to be "
        "chosen for the number of ranks."
    )


@functools.lru_cache(maxsize=1024)
def choose(world_size: int, bits: int, p: float, lane_bits: int | None = None) -> Choice:
    """The choice for so many ranks; see the module.

    Args:
        world_size: ranks whose values are added.
        bits: the most bits of an index.
        p: see `Table`.
        lane_bits: the only lanes to take; None for any.

    Raises:
        OptionError: not even 1 bit fits the lanes.
    """
    lanes = LANE_BITS if lane_bits is None else (lane_bits,)
    allowed = paper_error(p)
    found = [
        (each + lane, table.cost / world_size, table, lane)
        for lane in lanes
        for each in range(bits, 0, -1)
        if (table := _best(each, (2**lane - 1) // world_size, p)) is not None
    ]
    if not found:
        raise OptionError(
            f"Expected room for {world_size} ranks in lanes of {lanes[-1]} bits, got none even for 1 bit. "
            "Do: leave lane_bits to be chosen."
        )
    enough = [entry for entry in found if entry[1] <= allowed]
    if enough:
        _, _, table, lane = min(enough, key=lambda entry: entry[:2])
    else:
        _, _, table, lane = next((entry for entry in found if entry[2].bits == bits), found[0])
    return Choice(table, np.dtype(f"u{lane // 8}"))


def paper_error(p: float) -> float:
    """The error of a mean of coordinates of variance 1 at the paper's choice and 8 ranks."""
    return optimal(PAPER_BITS, PAPER_GRANULARITY, p).cost / PAPER_RANKS


@functools.lru_cache(maxsize=1024)
def _best(bits: int, most: int, p: float) -> Table | None:
    """A table whose granularity is at most `most`, and no more than four times as many integers as it has values.

    Beyond that little is gained. Costs fall with the granularity, but not evenly: the least of the last few.
    """
    most = min(most, 4 * 2**bits - 1)
    least = max(2**bits - 1, most - (7 if bits <= 4 else 0))
    tables = [optimal(bits, granularity, p) for granularity in range(least, most + 1)]
    return min(tables, key=lambda table: table.cost, default=None)
