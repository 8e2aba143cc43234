"""Bounded reader and writer of little-endian scalars and arrays: how compressors lay out a payload's body.

Guarantees: a read beyond the end raises `PayloadError` and allocates nothing; no field's value is trusted as
a size before it has been compared with what is there. The writer writes into one array of a capacity known
beforehand (`max_encoded_bytes`), without copies.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from gradwire.core.errors import PayloadError

_U8, _U16, _U32, _U64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_F32, _F64 = struct.Struct("<f"), struct.Struct("<d")


class Reader:
    """Reads a body from front to back.

    Args:
        body: 1-D uint8 array, as received; never changed.
    """

    def __init__(self, body: np.ndarray) -> None:
        if body.dtype != np.uint8 or body.ndim != 1:
            raise TypeError(f"Expected a 1-D uint8 body, got {body.dtype} of shape {body.shape}.")
        self._body = np.ascontiguousarray(body)
        self._view = self._body.data
        self._at = 0

    @property
    def remaining(self) -> int:
        """Bytes that have not been read."""
        return self._body.nbytes - self._at

    def u8(self) -> int:
        """Read one uint8."""
        return int(self._scalar(_U8))

    def u16(self) -> int:
        """Read one uint16."""
        return int(self._scalar(_U16))

    def u32(self) -> int:
        """Read one uint32."""
        return int(self._scalar(_U32))

    def u64(self) -> int:
        """Read one uint64."""
        return int(self._scalar(_U64))

    def f32(self, *, finite: bool = False) -> float:
        """Read one float32; with `finite`, a NaN or an infinity is a `PayloadError`."""
        return self._real(_F32, finite)

    def f64(self, *, finite: bool = False) -> float:
        """Read one float64; with `finite`, a NaN or an infinity is a `PayloadError`."""
        return self._real(_F64, finite)

    def take(self, num_bytes: int) -> np.ndarray:
        """Return the next `num_bytes` bytes as a view."""
        if num_bytes < 0 or num_bytes > self.remaining:
            raise PayloadError(f"Expected {num_bytes} more bytes in the payload, got {self.remaining}.")
        start = self._at
        self._at += num_bytes
        return self._body[start : self._at]

    def array(self, dtype: np.dtype | type, count: int) -> np.ndarray:
        """Return the next `count` elements, always aligned: a view where the bytes are aligned, else a copy.

        Kernels may assume alignment (Numba compiles unaligned arrays apart), so write wide fields first.
        """
        element = np.dtype(dtype).newbyteorder("<")
        if count < 0 or count > self.remaining // element.itemsize:
            raise PayloadError(
                f"Expected {count} more elements of {element} in the payload, got {self.remaining} bytes."
            )
        found = self.take(count * element.itemsize).view(element)
        return found if found.flags.aligned else found.copy()

    def rest(self) -> np.ndarray:
        """Return all bytes that have not been read, as a view."""
        return self.take(self.remaining)

    def align(self, to: int) -> None:
        """Skip the zero bytes up to the next multiple of `to`; other bytes there are a `PayloadError`."""
        if self.take(-self._at % to).any():
            raise PayloadError("Expected padding of zero bytes in the payload.")

    def end(self) -> None:
        """Check that everything was read.

        Raises:
            PayloadError: bytes are left over.
        """
        if self.remaining:
            raise PayloadError(f"Expected the end of the payload, got {self.remaining} more bytes.")

    def _scalar(self, layout: struct.Struct) -> int | float:
        if layout.size > self.remaining:
            raise PayloadError(f"Expected {layout.size} more bytes in the payload, got {self.remaining}.")
        value: int | float = layout.unpack_from(self._view, self._at)[0]
        self._at += layout.size
        return value

    def _real(self, layout: struct.Struct, finite: bool) -> float:
        value = float(self._scalar(layout))
        if finite and not math.isfinite(value):
            raise PayloadError(f"Expected a finite number in the payload, got {value}.")
        return value


class Writer:
    """Writes a body from front to back.

    Args:
        capacity: bytes at most; the array is allocated once.
    """

    def __init__(self, capacity: int) -> None:
        self._body = np.empty(capacity, dtype=np.uint8)
        self._view = self._body.data
        self._at = 0

    def u8(self, value: int) -> None:
        """Write one uint8."""
        self._scalar(_U8, value)

    def u16(self, value: int) -> None:
        """Write one uint16."""
        self._scalar(_U16, value)

    def u32(self, value: int) -> None:
        """Write one uint32."""
        self._scalar(_U32, value)

    def u64(self, value: int) -> None:
        """Write one uint64."""
        self._scalar(_U64, value)

    def f32(self, value: float) -> None:
        """Write one float32."""
        self._scalar(_F32, value)

    def f64(self, value: float) -> None:
        """Write one float64."""
        self._scalar(_F64, value)

    def array(self, values: np.ndarray) -> None:
        """Copy in the elements of `values`."""
        self.reserve(values.dtype, values.size)[:] = values.reshape(-1)

    def reserve(self, dtype: np.dtype | type, count: int) -> np.ndarray:
        """Return room for `count` elements, for a kernel to write in place. Aligned only if its offset is."""
        element = np.dtype(dtype).newbyteorder("<")
        start = self._advance(count * element.itemsize)
        return self._body[start : self._at].view(element)

    def align(self, to: int) -> None:
        """Write zero bytes up to the next multiple of `to`."""
        start = self._advance(-self._at % to)
        self._body[start : self._at] = 0

    def give_back(self, num_bytes: int) -> None:
        """Shorten the latest `reserve` by `num_bytes`, once a kernel knows how many it wrote."""
        assert 0 <= num_bytes <= self._at, "cannot give back more than was written"
        self._at -= num_bytes

    def done(self) -> np.ndarray:
        """Return the body: a view of what was written."""
        return self._body[: self._at]

    def _advance(self, num_bytes: int) -> int:
        start = self._at
        assert num_bytes <= self._body.nbytes - start, "max_encoded_bytes is too small for this payload"
        self._at += num_bytes
        return start

    def _scalar(self, layout: struct.Struct, value: int | float) -> None:
        layout.pack_into(self._view, self._advance(layout.size), value)
