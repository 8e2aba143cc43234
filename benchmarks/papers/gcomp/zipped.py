"""zlib and zstd as compressors of gradwire, for comparisons under equal conditions: figure 10 of GCOMP's paper.

They pack the bytes of the elements as they are. zstd needs `pip install 'gradwire[bench]'`. `add` registers both: they
are not among gradwire's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base.registry import register
from gradwire.compressors.support.float_packing import FloatPacking, Packing
from gradwire.kernels import active as kernels

_KIND = 200
Squeeze = Callable[[bytes], bytes]


def packing(squeeze: Squeeze, expand: Squeeze) -> Packing:
    """A packing of bytes."""

    def pack(x: np.ndarray, out: np.ndarray) -> tuple[int, bool]:
        found, finite = squeeze(x.tobytes()), kernels.count_nonfinite(x) == 0
        if len(found) >= x.nbytes:
            return -1, finite
        out[: len(found)] = np.frombuffer(found, np.uint8)
        return len(found), finite

    def unpack(body: np.ndarray, out: np.ndarray) -> bool:
        found = expand(body.tobytes())
        if len(found) == out.nbytes:
            out.view(np.uint8)[:] = np.frombuffer(found, np.uint8)
        return len(found) == out.nbytes

    return Packing(_KIND, 0, pack, unpack, lambda x: len(squeeze(x.tobytes())) < x.nbytes)


class _Zipped(FloatPacking):
    """Base of both. There are no tables."""

    exact = True

    def __init__(self) -> None:
        super().__init__(refresh=0)

    @property
    def options(self) -> dict[str, Any]:
        """None."""
        return {}


class Zlib(_Zipped):
    """zlib at its fastest level."""

    name: ClassVar[str] = "zlib1"

    def packing(self, dtype: torch.dtype, state: np.ndarray | None) -> Packing:
        """See `FloatPacking`."""
        return packing(lambda data: zlib.compress(data, 1), zlib.decompress)


class Zstd(_Zipped):
    """zstd at level 1."""

    name: ClassVar[str] = "zstd1"

    def packing(self, dtype: torch.dtype, state: np.ndarray | None) -> Packing:
        """See `FloatPacking`."""
        import zstandard

        return packing(
            lambda data: zstandard.ZstdCompressor(1).compress(data),
            lambda data: zstandard.ZstdDecompressor().decompress(data),
        )


def add() -> None:
    """Register both compressors in this process."""
    for compressor in (Zlib, Zstd):
        register(compressor)
