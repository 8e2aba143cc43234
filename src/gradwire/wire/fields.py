"""Bounded reader of little-endian numbers and arrays: how compressors take a payload's body apart.

Guarantees: a read beyond the end raises `PayloadError` and allocates nothing. No received value is used as a size
before it has been compared with the bytes that are there.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from gradwire.core.errors import PayloadError

_F32 = struct.Struct("<f")


class Reader:
    """Reads a body from front to back.

    Args:
        body: 1-D uint8 array, as received. Never changed.
    """

    def __init__(self, body: np.ndarray) -> None:
        if body.dtype != np.uint8 or body.ndim != 1:
            raise TypeError(f"Expected a 1-D uint8 body, got {body.dtype} of shape {body.shape}.")
        self._body = np.ascontiguousarray(body)
        self._at = 0

    @property
    def remaining(self) -> int:
        """Bytes that have not been read."""
        return self._body.nbytes - self._at

    def take(self, num_bytes: int) -> np.ndarray:
        """Return the next `num_bytes` bytes as a view."""
        if num_bytes < 0 or num_bytes > self.remaining:
            raise PayloadError(f"Expected {num_bytes} more bytes in the payload, got {self.remaining}.")
        start = self._at
        self._at += num_bytes
        return self._body[start : self._at]

    def f32(self, *, finite: bool = False) -> float:
        """Read one float32. With `finite`, a NaN or an infinity is a `PayloadError`."""
        value: float = _F32.unpack(self.take(_F32.size).data)[0]
        if finite and not math.isfinite(value):
            raise PayloadError(f"Expected a finite number in the payload, got {value}.")
        return value

    def array(self, dtype: np.dtype | type, count: int) -> np.ndarray:
        """Return the next `count` elements: a view if the bytes are aligned, else a copy.

        Kernels may rely on alignment (Numba compiles unaligned arrays separately), so formats put wide fields first.
        """
        element = np.dtype(dtype).newbyteorder("<")
        if count < 0 or count > self.remaining // element.itemsize:
            raise PayloadError(
                f"Expected {count} more elements of {element} in the payload, got {self.remaining} bytes."
            )
        found = self.take(count * element.itemsize).view(element)
        return found if found.flags.aligned else found.copy()

    def end(self) -> None:
        """Check that everything was read.

        Raises:
            PayloadError: Bytes are left over.
        """
        if self.remaining:
            raise PayloadError(f"Expected the end of the payload, got {self.remaining} more bytes.")
