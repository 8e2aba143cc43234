"""3LC: three values {-M, 0, M} an element, five of them in a byte, runs of zero bytes in one.

Biased; a contraction with delta >= s (2 - s) / N, so it needs error feedback. Payloads cannot be summed.
Body: M as float32, then the bytes of quartic encoding, shortened (option `zero_run`) by zero-run encoding.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3; the step numbers are those of its figure 3.
Differences: M = 0 (all elements zero) is defined, and decodes to zeros. M is at most the largest float32, and
falls back to the largest magnitude where s times it cannot be told from twice (subnormals), so that the
largest element is never rounded to zero. The last byte is filled up with zeros, not with -1, so that it can
be part of a run.
"""
# Shapes: N = elements of the tensor or range, S = ceil(N/5), W = ranks

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.compressors import options
from gradwire.compressors.array import ArrayCompressor, any_other, expect, scaled, scratch
from gradwire.compressors.registry import register
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.layout import ZERO_BYTE, half_of
from gradwire.wire.fields import Reader

_SCALE_BYTES = 4
_LARGEST = float(np.finfo(np.float32).max)


@register
class ThreeLC(ArrayCompressor):
    """3LC: three values an element, five of them in a byte, runs of zeros in one.

    Args:
        sparsity: the sparsity multiplier s, 1 <= s < 2; a larger one sends fewer elements.
        zero_run: whether zero-run encoding follows.
    """

    name: ClassVar[str] = "threelc"
    canonical = True

    def __init__(self, sparsity: float = 1.0, zero_run: bool = True) -> None:
        self.sparsity = options.real("sparsity", sparsity, 1.0, 2.0, high_open=True)
        self.zero_run = options.flag("zero_run", zero_run)

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"sparsity": self.sparsity, "zero_run": self.zero_run}

    def contraction(self, spec: TensorSpec) -> float:
        """An element's error is at most itself, that of the largest (s - 1) of it."""
        return self.sparsity * (2 - self.sparsity) / max(1, spec.numel)

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """The size without any run."""
        return _SCALE_BYTES + _packed_bytes(spec.numel)

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
        # Step 1, the accumulation of the input into the buffer, is `encode_compensated`.
        M = self._scale(float(kernels.abs_max(x)) if largest is None else largest)
        sent_M = scaled(M, scale)
        if not math.isfinite(sent_M):
            return None
        body = np.empty(_SCALE_BYTES + _packed_bytes(x.size), np.uint8)
        body[:_SCALE_BYTES].view("<f4")[0] = sent_M
        packed = body[_SCALE_BYTES:]
        # Steps 2 and 3, and steps a and b in the same sweep: quantise, pack, dequantise, remaining error.
        if not self.zero_run:
            kernels.pack_ternary(x, M, packed, residual)
            return body
        quartic = scratch(packed.size)
        kernels.pack_ternary(x, M, quartic, residual)
        return body[: _SCALE_BYTES + kernels.zero_run_encode(quartic, packed)]  # step 4

    def _scale(self, largest: float) -> float:
        """M, from the largest magnitude; NaN from NaN."""
        M = float(np.float32(min(largest * self.sparsity, _LARGEST)))
        return M if largest > half_of(M) else largest

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        M, quartic = self._parse(body, out.size, scratch(_packed_bytes(out.size)))
        expect(kernels.unpack_ternary(quartic, M, out, accumulate), *_CANONICAL, self.name)

    def _decode_sum(
        self,
        bodies: Sequence[np.ndarray],
        ctxs: Sequence[Context],
        stats: Sequence[np.ndarray],
        out: np.ndarray,
    ) -> None:
        size = _packed_bytes(out.size)
        rooms = scratch(len(bodies) * size).reshape(len(bodies), size)
        parsed = [self._parse(body, out.size, room) for body, room in zip(bodies, rooms, strict=True)]
        scales = np.array([M for M, _ in parsed], np.float32)
        expect(
            kernels.unpack_ternary_sum([quartic for _, quartic in parsed], scales, out),
            *_CANONICAL,
            self.name,
        )

    def _parse(self, body: np.ndarray, size: int, room: np.ndarray) -> tuple[float, np.ndarray]:
        """M and the bytes of quartic encoding, which are yet to be checked one by one. May use `room` for them."""
        reader = Reader(body)
        M = reader.f32(finite=True)
        if self.zero_run:
            quartic = room
            expect(
                kernels.zero_run_decode(reader.rest(), quartic) == quartic.size,
                f"zero-run encoding of {quartic.size} bytes", "something else", self.name,
            )  # fmt: skip
        else:
            quartic = reader.take(_packed_bytes(size))
            reader.end()
        expect(not np.signbit(M), "M of at least 0", M, self.name)
        expect(
            (M > 0) == any_other(quartic, ZERO_BYTE),
            "M above 0 exactly where an element is not 0",
            M,
            self.name,
        )
        return M, quartic


_CANONICAL = ("bytes below 243 and padding of zeros", "others")


def _packed_bytes(size: int) -> int:
    return -(-size // 5)
