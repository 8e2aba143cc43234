"""Warm-up of a kept fraction: a quarter of the steps with 25 % kept, then 6.25 %, 1.6 % and 0.4 %.

The fraction never falls below the one that was asked for. The first step is step 1.

Source: DGC (Lin et al. 2018), section 3.3. Differences: counted in steps, not epochs.
"""

from __future__ import annotations

from typing import Any

from gradwire.lang import step, where

_QUARTERS = (4, 3, 2, 1)


def warmed(ratio: float, warmup: int) -> Any:
    """Kept fraction of this step, for an algorithm in the language: `ratio` after step `warmup`."""
    now: Any = ratio
    for quarter in _QUARTERS if warmup else ():
        now = where(4 * step() < quarter * warmup + 4, max(ratio, 0.25**quarter), now)
    return now


def ratio_at(ratio: float, warmup: int, at_step: int) -> float:
    """Kept fraction of one step, as a number."""
    quarter = next((each for each in reversed(_QUARTERS) if warmup and 4 * at_step < each * warmup + 4), 0)
    return max(ratio, 0.25**quarter) if quarter else ratio
