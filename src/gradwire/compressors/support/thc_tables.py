"""Optimal lookup tables for THC: which 2^b of the integers 0 to g stand for a normal coordinate clamped at t_p.

Between two neighboring values stochastic quantization is optimal (Ben Basat et al. 2020), and the expected error of a
table is a sum over its neighbors, each a closed-form integral. So the best table is a shortest path over the nodes 0 to
g with 2^b stops, found exactly for every (b, g, p) in milliseconds. Costs are compared as integers and ties go to the
first table in lexicographic order, so that all machines find the same one; a table and its mirror image cost the same.

Source: THC (Li et al. 2024), section 5.2 and appendix B. Differences: no enumeration, and tables need not be symmetric:
optimal ones often are not. The best symmetric one for (4, 30, 1/32) costs 0.0130746, the optimum 0.0130625; there are
also cases with odd g, such as (2, 7, 1/32).
"""
# Shapes: g = granularity

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.core.files import write_whole
from gradwire.lang import cache

MAX_BITS = 8
MAX_GRANULARITY = 1023
MIN_P = 2.0**-40
# Costs of pairs are rounded to multiples of this. Their sum, at most t_p^2, stays below the cost of no path.
_UNIT = 2.0**-52
_NO_PATH = 1 << 60
_LARGEST_FAST = 127


@dataclass(frozen=True)
class Table:
    """A lookup table.

    Attributes:
        bits: Bits b of an index.
        granularity: Largest value g.
        p: Fraction of normal coordinates that are clamped.
        values: T[z] for each index z, ascending from 0 to g.
        cost: Expected squared error of a coordinate of variance 1 within the clamp, times their fraction.
    """

    bits: int
    granularity: int
    p: float
    values: tuple[int, ...]
    cost: float

    @property
    def threshold(self) -> float:
        """Clamp t_p, in standard deviations."""
        return threshold(self.p)


def threshold(p: float) -> float:
    """t_p = Φ⁻¹(1 − p/2), in standard deviations: a fraction p of a normal distribution lies beyond it."""
    return -NormalDist().inv_cdf(p / 2)


def clamping_error(p: float) -> float:
    """Expected squared error of a standard normal coordinate that is clamped at ±t_p: of those beyond, a fraction p."""
    t = threshold(p)
    return (1 + t * t) * p - 2 * t * math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def check(bits: int, granularity: int, p: float) -> None:
    """Raise unless there is such a table.

    Raises:
        OptionError: A number is out of range, or there are too few integers for 2^b values.
    """
    if not 1 <= bits <= MAX_BITS:
        raise OptionError(f"bits must be from 1 to {MAX_BITS}, not {bits}.")
    if not MIN_P <= p < 1:
        raise OptionError(f"p must be in the range {MIN_P:.1g} <= p < 1, but is {p}. Pass p=1/32, for example.")
    if not 2**bits - 1 <= granularity <= MAX_GRANULARITY:
        raise OptionError(
            f"granularity must be from {2**bits - 1} (2^bits - 1) to {MAX_GRANULARITY}, not {granularity}. Pass such a "
            "granularity, or fewer bits."
        )


@functools.lru_cache(maxsize=1024)
def optimal(bits: int, granularity: int, p: float) -> Table:
    """Return the optimal table: from memory, or large ones from disk and small ones by `solve`, which is faster.

    Raises:
        OptionError: See `check`.
    """
    return stored(bits, granularity, p) if granularity > _LARGEST_FAST else solve(bits, granularity, p)


def stored(bits: int, granularity: int, p: float) -> Table:
    """Return the optimal table from disk, or by `solve` and store it."""
    check(bits, granularity, p)
    path = cached(bits, granularity, p)
    found = _read(path, bits, granularity, p)
    if found is None:
        found = solve(bits, granularity, p)
        with contextlib.suppress(OSError):  # if nothing can be written, the table is found again later
            write_whole(path, json.dumps(asdict(found)))
    return found


def solve(bits: int, granularity: int, p: float) -> Table:
    """Find the optimal table."""
    check(bits, granularity, p)
    costs = pair_costs(granularity, p)
    steps = _integers(costs)
    # left[k][i]: least cost from node i to node g in k steps.
    left = [np.full(granularity + 1, _NO_PATH, np.int64)]
    left[0][granularity] = 0
    for _ in range(2**bits - 1):
        left.append(np.minimum((steps + left[-1]).min(axis=1), _NO_PATH))
    values = [0]
    for num_steps in range(2**bits - 2, -1, -1):
        # argmin takes the first of equals: the nearest node, so the first table in lexicographic order.
        values.append(int(np.argmin(steps[values[-1]] + left[num_steps])))
    return Table(bits, granularity, p, tuple(values), _cost(costs, values))


def cost(values: tuple[int, ...], granularity: int, p: float) -> float:
    """Cost of any table; see `Table.cost`."""
    return _cost(pair_costs(granularity, p), values)


def _cost(costs: np.ndarray, values: list[int] | tuple[int, ...]) -> float:
    return math.fsum(costs[low, high] for low, high in itertools.pairwise(values))


def pair_costs(granularity: int, p: float) -> np.ndarray:
    """Cost of having i < j as neighbors, otherwise infinity: float64[g + 1, g + 1].

    Stochastic quantization of a between l and r has the variance (a − l)(r − a); its integral with the normal density
    is (l + r) I₁ − l r I₀ − I₂, of the density's moments between l and r.
    """
    t = threshold(p)
    at = 2 * t / granularity * np.arange(granularity + 1) - t
    at = (at - at[::-1]) / 2  # symmetric to the last bit
    density = np.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erf(each / math.sqrt(2)) / 2 for each in at])
    low, high = at[:, None], at[None, :]
    zeroth = below[None, :] - below[:, None]
    first = density[:, None] - density[None, :]
    second = zeroth + low * density[:, None] - high * density[None, :]
    costs = (low + high) * first - low * high * zeroth - second
    costs = np.where(np.triu(np.ones_like(costs), 1) > 0, np.maximum(costs, 0), np.inf)
    return np.asarray(np.minimum(costs, costs[::-1, ::-1].T))


def _integers(costs: np.ndarray) -> np.ndarray:
    return np.minimum(np.rint(costs / _UNIT), _NO_PATH).astype(np.int64)


# -- on disk -------------------------------------------------------------------------------------------------------


def cached(bits: int, granularity: int, p: float) -> Path:
    """Path of a table on disk, by its parameters and a hash of this module."""
    digest = hashlib.blake2b(Path(__file__).read_bytes() + repr(p).encode(), digest_size=8).hexdigest()
    return cache.folder("tables") / f"thc_{bits}_{granularity}_{digest}.json"


def _read(path: Path, bits: int, granularity: int, p: float) -> Table | None:
    """Table from disk, or None if there is no complete one."""
    try:
        data = json.loads(path.read_text())
        found = Table(data["bits"], data["granularity"], data["p"], tuple(data["values"]), data["cost"])
        known = (found.bits, found.granularity, found.p, len(found.values)) == (bits, granularity, p, 2**bits)
        ascends = all(low < high for low, high in itertools.pairwise(found.values))
        ends = (found.values[0], found.values[-1]) == (0, granularity)
        return found if known and ascends and ends and cost(found.values, granularity, p) == found.cost else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
