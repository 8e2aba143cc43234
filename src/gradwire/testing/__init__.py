"""The contract of `gradwire.compressors.base` as checks that run on any compressor, including a user's own.

`gradwire check` runs them; the tests run them on every registered compressor. A check is a function that takes a
compressor and raises `AssertionError` with what was expected, what was found, and for which tensor. Random cases have
fixed seeds, so failures repeat.
"""

from gradwire.testing import accumulators, algebra, edges, language, residuals, robustness, same_bytes, sizes, states
from gradwire.testing.checks import CHECKS, Check, CheckOutcome, run

__all__ = [
    "CHECKS",
    "Check",
    "CheckOutcome",
    "accumulators",
    "algebra",
    "edges",
    "language",
    "residuals",
    "robustness",
    "run",
    "same_bytes",
    "sizes",
    "states",
]
