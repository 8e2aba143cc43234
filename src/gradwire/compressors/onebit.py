"""1-bit SGD with two means: a bit an element for the side of zero it is on, a float a side for its mean.

Biased; a contraction with delta >= 1/N, so it needs error feedback. Payloads cannot be summed. Body: low and
high as float32, then ceil(N/8) bytes, element i in bit i % 8 of byte i // 8.

Source: Seide et al. 2014, section 3; the variant of HiPress, which sends the means of the negative and of the
other elements. Differences: none in the algorithm. The decoder takes one form of each message: unused bits
and the mean of an empty side are zero.
"""
# Shapes: N = elements of the tensor or range, W = ranks, B = ceil(N/8)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gradwire.compressors.array import ArrayCompressor, any_other, expect, scaled
from gradwire.compressors.registry import register
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.wire.fields import Reader, Writer


@register
class OneBit(ArrayCompressor):
    """1-bit SGD with two means: a bit an element, the means of the negative and of the other elements."""

    name: ClassVar[str] = "onebit"
    canonical = True

    def contraction(self, spec: TensorSpec) -> float | None:
        """Each side keeps at least 1/N of its energy: (Σ|g|)² / n >= Σg² / n."""
        return 1 / max(1, spec.numel)

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Two means and the bits: the exact size of every payload."""
        return _encoded_bytes(spec.numel)

    def _encode(
        self,
        x: np.ndarray,
        ctx: Context,
        *,
        scale: float = 1.0,
        largest: float | None = None,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> np.ndarray | None:
        low, high = (scaled(float(mean), scale) for mean in kernels.sign_means(x)[:2])
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        body = Writer(_encoded_bytes(x.size))
        body.f32(low)
        body.f32(high)
        packed = body.reserve(np.uint8, _packed_bytes(x.size))
        if residual is None:
            kernels.pack_signs(x, packed)
        else:
            kernels.encode_signs(x, low, high, packed, residual)
        return body.done()

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        low, high, packed = self._parse(body, out.size)
        kernels.unpack_signs(packed, low, high, out, accumulate)

    def _decode_sum(
        self,
        bodies: Sequence[np.ndarray],
        ctxs: Sequence[Context],
        stats: Sequence[np.ndarray],
        out: np.ndarray,
    ) -> None:
        parsed = [self._parse(body, out.size) for body in bodies]
        lows, highs = (np.array([rank[side] for rank in parsed], np.float32) for side in (0, 1))
        kernels.unpack_signs_sum([packed for _, _, packed in parsed], lows, highs, out)

    def _parse(self, body: np.ndarray, size: int) -> tuple[float, float, np.ndarray]:
        reader = Reader(body)
        low, high = reader.f32(finite=True), reader.f32(finite=True)
        packed = reader.take(_packed_bytes(size))
        reader.end()
        num_padding = -size % 8
        if num_padding:
            expect(packed[-1] >> (8 - num_padding) == 0, "padding bits of 0", bin(packed[-1]), self.name)
        has_low, has_high = _sides(packed, size)
        expect(low < 0 if has_low else _is_zero(low), "a low mean below 0, or 0 if unused", low, self.name)
        expect((high > 0 and has_high) or _is_zero(high), "a high mean above 0, or 0", high, self.name)
        return low, high, packed


def _sides(packed: np.ndarray, size: int) -> tuple[bool, bool]:
    """Whether any bit is 0, and whether any is 1. Ends at the first byte that has both, as most have."""
    if size >= 8 and 0 < packed[0] < 0xFF:
        return True, True
    whole, rest = packed[: size // 8], packed[size // 8 :]
    low_rest = bool(rest.size) and int(rest[0]) != (1 << size % 8) - 1
    has_low = low_rest or any_other(whole, 0xFF)
    return has_low, bool(rest.any()) or any_other(whole, 0)


def _is_zero(mean: float) -> bool:
    return mean == 0 and not np.signbit(mean)


def _packed_bytes(size: int) -> int:
    return -(-size // 8)


def _encoded_bytes(size: int) -> int:
    return 8 + _packed_bytes(size)
