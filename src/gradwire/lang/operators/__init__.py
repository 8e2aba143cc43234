"""The operators, one file each, and the registry, which user-defined operators join."""

from gradwire.lang.operators import (
    arithmetic,
    extract,
    filter,
    hash,
    random,
    ranks,
    reduce,
    sample,
    scatter,
    sort,
    zero_runs,
)
from gradwire.lang.operators.arithmetic import Arithmetic, Text
from gradwire.lang.operators.base import (
    Coding,
    DeviceEmission,
    Emission,
    FitError,
    Operator,
    Sink,
    Statement,
    lookup,
    names,
    register,
)

__all__ = [
    "Arithmetic",
    "Coding",
    "DeviceEmission",
    "Emission",
    "FitError",
    "Operator",
    "Sink",
    "Statement",
    "Text",
    "arithmetic",
    "extract",
    "filter",
    "hash",
    "lookup",
    "names",
    "random",
    "ranks",
    "reduce",
    "register",
    "sample",
    "scatter",
    "sort",
    "zero_runs",
]
