"""How a cost grows with size: lines and curves, fitted to measurements.

On one core, `onebit` encodes an element in 0.26 ns in a tensor of a million, and in 0.69 ns in one of sixteen million,
which no longer fits the caches. A line through both is wrong by a factor of two, and a `Curve` is not.

Source: HiPress (SOSP 2021), section 3.3, which fits such curves too.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from gradwire.core.errors import OptionError


def expect_numbers(what: str, values: Iterable[float]) -> None:
    """Raise an `OptionError` unless all values are finite numbers of at least 0."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise OptionError(f"{what} must be finite numbers of at least 0, not {value!r}. Measure them again.")


@dataclass(frozen=True)
class LinearCost:
    """A straight line: fixed + slope · x."""

    fixed: float
    slope: float

    def __post_init__(self) -> None:
        expect_numbers("Parts of a line", asdict(self).values())

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    @classmethod
    def fit(cls, xs: Sequence[float], ys: Sequence[float]) -> LinearCost:
        """Fit the non-negative line of least squared *relative* errors, so that small sizes count too.

        Raises:
            OptionError: There are fewer than two different sizes, or a figure is not positive and finite.
        """
        x, y = _pairs(xs, ys)
        weighted = np.stack([1 / y, x / y], axis=1)
        fixed, slope = np.linalg.lstsq(weighted, np.ones(len(y)), rcond=None)[0]
        if fixed < 0:  # the best of one part alone
            ratio = x / y
            fixed, slope = 0.0, ratio.sum() / (ratio * ratio).sum()
        elif slope < 0:
            fixed, slope = (1 / y).sum() / (1 / y**2).sum(), 0.0
        return cls(float(fixed), float(slope))


@dataclass(frozen=True)
class Curve:
    """Piecewise-linear interpolation of measured points, with linear extrapolation. Never falls, never below zero.

    Attributes:
        points: Pairs (x, y), x rising, y not falling.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        expect_numbers("Points of a curve", itertools.chain.from_iterable(self.points))
        xs, ys = [x for x, _ in self.points], [y for _, y in self.points]
        if len(xs) < 2 or any(a >= b for a, b in itertools.pairwise(xs)) or ys != sorted(ys):
            raise OptionError(
                f"A curve needs two or more points, with x rising and y not falling, not {self.points}. "
                "Call Curve.through(xs, ys)."
            )

    def __call__(self, x: float) -> float:
        right = min(max(bisect_right(self.points, (x, math.inf)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> Curve:
        """Return the curve through measurements: the least at each size, and nowhere more than at a larger size.

        Noise only adds time. Of two points that fall, the earlier one is wrong.

        Raises:
            OptionError: There are fewer than two different sizes, or a figure is not positive and finite.
        """
        x, y = _pairs(xs, ys)
        least: dict[float, float] = {}
        for size, seconds in zip(x.tolist(), y.tolist()):
            least[size] = min(seconds, least.get(size, math.inf))
        sizes = sorted(least)
        lowered = list(itertools.accumulate((least[size] for size in reversed(sizes)), min))[::-1]
        return cls(tuple(zip(sizes, lowered)))


Cost = LinearCost | Curve
FREE = LinearCost(0.0, 0.0)


def scaled(cost: Cost, factor: float) -> Cost:
    """Return a cost that is higher by a factor."""
    if isinstance(cost, LinearCost):
        return LinearCost(factor * cost.fixed, factor * cost.slope)
    return Curve(tuple((x, factor * y) for x, y in cost.points))


def lowered(cost: Cost, seconds: float) -> Cost:
    """Return a cost that is lower by `seconds`, but not below zero."""
    if isinstance(cost, LinearCost):
        return LinearCost(max(0.0, cost.fixed - seconds), cost.slope)
    return Curve(tuple((x, max(0.0, y - seconds)) for x, y in cost.points))


def _pairs(xs: Sequence[float], ys: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    sound = x.shape == y.shape and x.ndim == 1 and len(np.unique(x)) >= 2
    if not (sound and np.isfinite([x, y]).all() and (x > 0).all() and (y > 0).all()):
        raise OptionError(
            f"A fit needs positive figures at two or more different sizes, not {list(ys)} at {list(xs)}. "
            "Measure at least a small and a large size."
        )
    return x, y
