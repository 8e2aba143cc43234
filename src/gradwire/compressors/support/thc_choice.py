"""The granularity and the accumulator that `thc` uses for a number of ranks, if no granularity is given; p, if asked.

The sum of n values of a table with granularity g needs an accumulator that holds n g. The paper's choice, 4 bits and
g = 30, fills accumulators of 8 bits at 8 ranks. The rule: use all bits that are allowed, the narrowest accumulator that
holds their sums, and of the tables that fit it the one with the least error. So g falls as ranks are added, down to
evenly spaced values; then the accumulator widens and g rises again, with 4 bits at 18 ranks.

Fewer bits are used only if `accumulator_bits` asks for an accumulator that holds no more. An average of n copies could
do with fewer, since its rounding error falls with n. But if ranks' gradients have nothing in common, as with small
batches, their mean shrinks as fast, and the relative error stays that of one rank. One bit less would save a twentieth
of the bytes in both directions, with accumulators of 16 bits.

p=None chooses p for the number of ranks, too. With copies of one gradient, rounding errors average out: the error of
the mean is the table's cost over n, plus the error of clamping, which all ranks have in common and which falls with p.
So more copies want a smaller p. The rule: of 1/32, 1/64, 1/128 and 1/256, the p with the least error for copies, but
none below 1/(16 n). So p is 1/64 at 4 ranks, 1/128 at 8, and 1/256 from 16 on. p is chosen for the finest table that
fits, then the granularity for this p. It is not the default, because trainings whose ranks agree little do not confirm
it: a wider range is rounded more coarsely at every rank, and the mean shrinks as fast as its error. With 16 workers and
trained word vectors, accuracy fell from 1.58 points below dense to 2.49 (benchmark `thc-scale`).

Source: THC (Li et al. 2024), section 8.4, which explains the trade-off and leaves the choice open; the paper takes
p = 1/32 at 4 ranks, and 1/512 and 1/1024 at 10.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gradwire.compressors.support.thc_tables import Table, clamping_error, optimal
from gradwire.core.errors import OptionError

ACCUMULATOR_BITS = (8, 16, 32)
# Fractions of clamped coordinates that p=None chooses from, the largest first.
CLAMPED = (2.0**-5, 2.0**-6, 2.0**-7, 2.0**-8)


class Choice(NamedTuple):
    """A table, and the type of an accumulator that holds its sums."""

    table: Table
    accumulator: np.dtype


def accumulator_for(world_size: int, granularity: int, accumulator_bits: int | None = None) -> np.dtype:
    """Type of an accumulator that holds the sum of `world_size` values of at most `granularity`.

    It is the narrowest, or has `accumulator_bits`.

    Raises:
        OptionError: No such accumulator holds the sum.
    """
    largest = world_size * granularity
    wide_enough = [bits for bits in ACCUMULATOR_BITS if largest < 1 << bits]
    if accumulator_bits in wide_enough or (accumulator_bits is None and wide_enough):
        return np.dtype(f"u{(accumulator_bits or wide_enough[0]) // 8}")
    widest = accumulator_bits or ACCUMULATOR_BITS[-1]
    wider = f"accumulator_bits={wide_enough[0]}, or " if wide_enough else ""
    raise OptionError(
        f"Accumulators of {widest} bits do not hold the sum of {world_size} ranks with a granularity of {granularity}. "
        f"Pass {wider}a granularity of at most {(2**widest - 1) // world_size}, or leave both out."
    )


@functools.lru_cache(maxsize=1024)
def choose_p(world_size: int, bits: int, granularity: int) -> float:
    """Choose the fraction of clamped coordinates for a number of ranks and a granularity; see the module."""

    def error(p: float) -> float:
        return optimal(bits, granularity, p).cost / world_size + clamping_error(p)

    return min((p for p in CLAMPED if p == CLAMPED[0] or 16 * world_size * p >= 1), key=error)


@functools.lru_cache(maxsize=1024)
def choose(world_size: int, bits: int, p: float | None, accumulator_bits: int | None = None) -> Choice:
    """Choose for a number of ranks; see the module.

    Args:
        world_size: Number of ranks whose values are added.
        bits: Bits of an index; fewer are used if `accumulator_bits` does not hold their sums.
        p: See `Table`; None to choose it, too.
        accumulator_bits: Bits of the accumulator, or None to choose them.

    Raises:
        OptionError: Not even 2 bits fit the accumulator.
    """
    widths = ACCUMULATOR_BITS if accumulator_bits is None else (accumulator_bits,)
    for each in range(bits, 1, -1):
        for width in widths:
            if table := _best(each, (2**width - 1) // world_size, p, world_size):
                return Choice(table, np.dtype(f"u{width // 8}"))
    raise OptionError(
        f"Accumulators of {widths[-1]} bits do not hold the sum of {world_size} ranks, even with 2 bits per index. "
        "Leave accumulator_bits out."
    )


@functools.lru_cache(maxsize=1024)
def _best(bits: int, most: int, p: float | None, world_size: int) -> Table | None:
    """Finest table within half a percent of the least error, of granularities up to `most`; None without one.

    Errors do not fall steadily with the granularity: with 4 bits and p = 1/32, 17 beats all from 18 to 31. So all are
    tried, up to four times as many integers as there are values, beyond which little is gained. Why half a percent:
    errors are those of normal coordinates, but gradients of rare words rotate into others, and their means had errors
    8 to 21 % larger with 53, the least, than with 59 (benchmark `thc-scale`, with a rule that chose 53). With
    more than 6 bits a table takes long to find, and errors differ little: only evenly spaced values and the finest
    table are tried.
    """
    evenly_spaced, finest = 2**bits - 1, min(most, 4 * 2**bits - 1)
    if finest < evenly_spaced:
        return None
    p = choose_p(world_size, bits, finest) if p is None else p
    tried = range(evenly_spaced, finest + 1) if bits <= 6 else (evenly_spaced, finest)
    tables = [optimal(bits, granularity, p) for granularity in tried]
    least = min(table.cost for table in tables)
    return max((table for table in tables if table.cost <= 1.005 * least), key=lambda table: table.granularity)
