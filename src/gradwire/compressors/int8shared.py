"""8-bit integers with a scale per block that all ranks share, so that payloads add up; see `int8`.

The scales come from the largest magnitudes over all ranks, which a preliminary round finds. Payloads carry no scales,
and their integers add up in an accumulator wide enough for the world size. With stochastic rounding, the default, it is
unbiased and needs no feedback. With rounding to nearest it is biased, and not a contraction, because all elements of
one rank may be small compared to those of another.

Body: ceil(N/B) scales as float32, unless they were shared, then N integers.

Source: SwitchML (Sapio et al. 2021), section 3, shared scales; 3LC (Lim, Andersen, Kaminsky 2019), section 5.1, "8-bit
int" (255 values, -128 unused). Differences: scales are real numbers, not powers of two. Elements are multiplied by
1 / scale, which is faster than a division, so a block decodes to zeros if its largest magnitude over all ranks is below
127 · 2⁻¹²⁸, 3.7e-37. Not written in `gradwire.lang`, which has no accumulators yet.
"""
# Shapes: N = elements of the tensor or range, B = block, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base import FeedbackName, Reduction, Stat, SummableCompressor, options
from gradwire.compressors.base.array import ArrayCompressor, EncodeArguments, expect, expect_bytes
from gradwire.compressors.base.registry import register
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

_LEVELS = 127
# 127 times the largest scale must be a float32.
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_LEVELS), np.float32(0))


@register
class Int8Shared(ArrayCompressor, SummableCompressor):
    """8-bit integers with a scale per block that all ranks share, so that payloads can be added.

    Args:
        block: Elements that share a scale, from 8 to 2^20.
        stochastic: If true, round at random and without bias; otherwise to nearest.
    """

    name: ClassVar[str] = "int8shared"

    def __init__(self, block: int = 1024, stochastic: bool = True) -> None:
        self.block = options.integer("block", block, 8, 1 << 20)
        self.stochastic = options.flag("stochastic", stochastic)
        self.unbiased = self.stochastic
        self.default_feedback: FeedbackName = "none" if self.stochastic else "error"

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"block": self.block, "stochastic": self.stochastic}

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Scales and elements."""
        return 4 * self._num_blocks(spec.numel) + spec.numel

    # -- preliminary round -----------------------------------------------------------------------------------

    def stats(self, grad: torch.Tensor, ctx: Context, scale: float = 1.0) -> list[Stat]:
        """Largest magnitude of each block."""
        largest = self._block_maxima(as_array(grad)) * np.float32(scale)
        largest[~np.isfinite(largest)] = np.inf
        return [Stat(largest, "max")]

    def stats_spec(self, spec: TensorSpec) -> list[tuple[int, Reduction]]:
        """One value per block."""
        return [(self._num_blocks(spec.numel), "max")]

    # -- encode and decode -----------------------------------------------------------------------------------

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        stats, scale = args.stats, args.scale
        scales = self._scales(stats, x.size) if stats else _steps(self._block_maxima(x) * np.float32(scale))
        if not np.isfinite(scales).all():
            return None
        num_scale_bytes = 0 if stats else scales.nbytes
        body = buffers.empty(num_scale_bytes + x.size)
        if not stats:
            body[:num_scale_bytes].view("<f4")[:] = scales
        # scale · x / scales is x / (scales / scale): the gradient itself is not touched.
        units = scales if scale == 1.0 else scales / np.float32(scale)
        q = body[num_scale_bytes:].view(np.int8)
        kernels.quantize_int8(x, units, self.block, ctx.private_key, ctx.offset, q, self.stochastic, args.residual_out)
        return body

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        scales, q = self._parse(body, stats, out.size)
        kernels.dequantize_int8(q, scales, self.block, out, accumulate)

    def _decode_sum(
        self, bodies: Sequence[np.ndarray], ctxs: Sequence[Context], stats: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        parsed = [self._parse(body, stats, out.size) for body in bodies]
        kernels.dequantize_int8_sum([q for _, q in parsed], [scales for scales, _ in parsed], self.block, out)

    def _parse(self, body: np.ndarray, stats: Sequence[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
        num_own_scales = 0 if stats else self._num_blocks(size)
        expect_bytes(body, 4 * num_own_scales + size, self.name)
        reader = Reader(body)
        scales = reader.array(np.float32, num_own_scales)
        if stats:
            scales = self._scales(stats, size)
        else:
            possible = (scales >= 0) & (scales <= _LARGEST_SCALE)  # not so for NaN
            expect(possible.all(), f"scales from 0 to {_LARGEST_SCALE}", "others", self.name)
        q = reader.array(np.int8, size)
        expect(size == 0 or q.min() >= -_LEVELS, "integers of at least -127", -128, self.name)
        return scales, q

    # -- accumulators ----------------------------------------------------------------------------------------

    def accumulator_dtype(self, world_size: int, num_payloads: int | None = None) -> np.dtype:
        """int16 for up to 258 payloads, then int32."""
        count = world_size if num_payloads is None else num_payloads
        for dtype in (np.dtype(np.int16), np.dtype(np.int32)):
            if _LEVELS * count <= np.iinfo(dtype).max:
                return dtype
        raise OptionError(f"{count} ranks are too many to add: the limit is {2**31 // 128}. Sum in groups of ranks.")

    def max_contribution(self, world_size: int) -> int:
        """127."""
        return _LEVELS

    def accumulator_size(self, spec: TensorSpec) -> int:
        """Number of elements."""
        return spec.numel

    def accumulate(self, payload: Payload, ctx: Context, accumulator: np.ndarray) -> None:
        """Add the integers of a payload that was encoded with shared scales."""
        q = self._expect_summable(payload, accumulator.size).view(np.int8)
        expect(q.size == 0 or q.min() >= -_LEVELS, "integers of at least -127", -128, self.name)
        kernels.add_int8(q, accumulator)

    def finalize(
        self, accumulator: np.ndarray, count: int, ctx: Context, stats: Sequence[np.ndarray], out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply the sums by the shared scales."""
        kernels.finalize_int8(accumulator, self._scales(stats, accumulator.size), self.block, 1.0, as_array(out))
        return out

    # -- helpers ---------------------------------------------------------------------------------------------

    def _num_blocks(self, size: int) -> int:
        return -(-size // self.block)

    def _block_maxima(self, x: np.ndarray) -> np.ndarray:
        largest = np.empty(self._num_blocks(x.size), np.float32)
        kernels.block_abs_max(x, self.block, largest)
        return largest

    def _scales(self, stats: Sequence[np.ndarray], size: int) -> np.ndarray:
        """Steps of shared scales; infinite if a rank had a non-finite gradient."""
        (largest,) = self._check_stats(stats, TensorSpec((size,)))
        return _steps(largest)


def _steps(largest: np.ndarray) -> np.ndarray:
    steps = largest / np.float32(_LEVELS)
    return np.where(np.isfinite(steps), np.minimum(steps, _LARGEST_SCALE), steps)
