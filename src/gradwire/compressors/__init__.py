"""One file an algorithm, a base class and a registry."""

from gradwire.compressors import bf16, fp16, int8, none, onebit, threelc, topk
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
    "names",
    "none",
    "onebit",
    "register",
    "threelc",
    "topk",
]
