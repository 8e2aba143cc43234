"""What compressors are made of: the contract, the registry, and the classes that algorithms derive from."""

from gradwire.compressors.base.contract import (
    Compiled,
    Compressor,
    FeedbackName,
    LookupCompressor,
    LookupTable,
    Reduction,
    Stat,
    StatefulCompressor,
    StateSource,
    SummableCompressor,
)

__all__ = [
    "Compiled",
    "Compressor",
    "FeedbackName",
    "LookupCompressor",
    "LookupTable",
    "Reduction",
    "Stat",
    "StateSource",
    "StatefulCompressor",
    "SummableCompressor",
]
