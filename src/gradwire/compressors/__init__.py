"""One file an algorithm, a base class and a registry."""

from gradwire.compressors import bf16, fp16, int8, minmax, none, onebit, tbq, threelc, topk
from gradwire.compressors.base import Compressor, Stat
from gradwire.compressors.registry import Description, code, describe, make, names, register

__all__ = [
    "Compressor",
    "Description",
    "Stat",
    "bf16",
    "code",
    "describe",
    "fp16",
    "int8",
    "make",
    "minmax",
    "names",
    "none",
    "onebit",
    "register",
    "tbq",
    "threelc",
    "topk",
]
