"""Confidence intervals of a few trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Student's t for a 95 % interval, by number of values.
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}

MAX_VALUES = max(_T_95)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by Student's t, which is NaN for fewer than two values. NaN if one is NaN."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    if len(values) < 2:
        return sum(values) / len(values) if values else math.nan, math.nan
    return statistics.fmean(values), _T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
