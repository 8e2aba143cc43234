"""The warm-up of a kept fraction: of so many steps a quarter with 25 % kept, then 6.25 %, 1.6 % and 0.4 %.

A fraction below the one that is asked for is never reached on the way.

Source: DGC (Lin et al. 2018), section 3.3. Differences: counted in steps, for there are no epochs here.
"""

from __future__ import annotations

from typing import Any

from gradwire.lang import step, where

_QUARTERS = (4, 3, 2, 1)


def warmed(ratio: float, warmup: int) -> Any:
    """The kept fraction of this step, for an algorithm in the language: `ratio` from step `warmup` on."""
    now: Any = ratio
    for quarter in _QUARTERS if warmup else ():
        now = where(4 * step() < quarter * warmup, max(ratio, 0.25**quarter), now)
    return now


def ratio_at(ratio: float, warmup: int, at_step: int) -> float:
    """The same number for one step."""
    quarter = next((each for each in reversed(_QUARTERS) if 4 * at_step < each * warmup), 0)
    return max(ratio, 0.25**quarter) if quarter else ratio
