"""The choice of granularity and lanes as ranks are added: the rule that `thc` follows where no granularity is given.

Sums of n values of a table with granularity g need lanes that hold n g. The paper's choice, 4 bits and g = 30, fills
lanes of 8 bits at 8 ranks. The rule: all the bits that are allowed, in the narrowest lanes that hold their sums at all,
with the least error that a table has that fits. So g falls as ranks are added, down to evenly spaced values, where
lanes widen and g rises again: with 4 bits at 18 ranks.

Fewer bits are for lanes that are asked for and hold no more. An average of n copies would bear them, since what it
loses to rounding falls with n; but where ranks' gradients have nothing in common, as those of small batches, their
mean shrinks as fast, and the relative error stays that of one rank. A bit less would save a twentieth of the bytes on
both ways, in lanes of 16 bits.

Source: THC (Li et al. 2024), section 8.4, which says what trades against what and leaves the choice open.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gradwire.compressors.support.thc_tables import Table, optimal
from gradwire.core.errors import OptionError

LANE_BITS = (8, 16, 32)


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
        bits: of an index; fewer where lanes that are asked for hold no more.
        p: see `Table`.
        lane_bits: the only lanes to take; None for any.

    Raises:
        OptionError: not even 1 bit fits the lanes.
    """
    lanes = LANE_BITS if lane_bits is None else (lane_bits,)
    for each in range(bits, 0, -1):
        for lane in lanes:
            if table := _best(each, (2**lane - 1) // world_size, p):
                return Choice(table, np.dtype(f"u{lane // 8}"))
    raise OptionError(
        f"Expected room for {world_size} ranks in lanes of {lanes[-1]} bits, got none even for 1 bit. "
        "Do: leave lane_bits to be chosen."
    )


@functools.lru_cache(maxsize=1024)
def _best(bits: int, most: int, p: float) -> Table | None:
    """The finest table within half a percent of the least error, of granularities up to `most`; None if there is none.

    Errors do not fall evenly with the granularity: with 4 bits and p = 1/32, 17 beats all from 18 to 31. So all are
    tried, up to four times as many integers as there are values, beyond which little is gained. Half a percent, since
    errors are those of normal coordinates: gradients of rare words rotate into others, and means of these erred 8 to 21
    % more with 53, the least, than with 59 (benchmark `thc-scale` at commit fccffa8, which chose 53). With more
    than 6 bits it takes long to find a table, and errors differ little: evenly spaced values and the finest.
    """
    evenly_spaced, finest = 2**bits - 1, min(most, 4 * 2**bits - 1)
    if finest < evenly_spaced:
        return None
    tried = range(evenly_spaced, finest + 1) if bits <= 6 else (evenly_spaced, finest)
    tables = [optimal(bits, granularity, p) for granularity in tried]
    least = min(table.cost for table in tables)
    return max((table for table in tables if table.cost <= 1.005 * least), key=lambda table: table.granularity)
