"""The contract of `gradwire.compressors.base` as checks that run over any compressor, also a user's own.

`gradwire check` runs them from an installed package; the tests run them over every registered compressor. A check is a
function that takes a codec and raises `AssertionError` with what was expected, what was found and for which tensor.
Random cases come from fixed seeds, so that a failure is there again at the next run.
"""

from gradwire.contracts import accumulators, algebra, edges, language, residuals, robustness, same_bytes, sizes, states
from gradwire.contracts.checks import CHECKS, Check, Outcome, run

__all__ = [
    "CHECKS",
    "Check",
    "Outcome",
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
