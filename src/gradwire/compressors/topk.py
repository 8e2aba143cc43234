"""Top-k sparsification: the k entries of largest magnitude as (index, value) pairs.

Biased; a contraction with δ = k/N, so it needs error feedback. k = ceil(ratio · N), and at least 1. The receiver knows
k, so it is not sent.

Body: k values as float32, then k positions in few bits; see `gradwire.kernels.reference.positions`.

Source: Aji and Heafield 2017, section 3. Differences: exact top-k over the whole tensor instead of a sampled threshold.
Ties go to the lowest index, so that every backend agrees.
"""
# Shapes: N = elements of the tensor or range, K = kept elements, W = ranks

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from gradwire.compressors.base import options
from gradwire.compressors.base.array import (
    SCAN_ELEMENTS,
    SMALLEST,
    ArrayCompressor,
    EncodeArguments,
    clear,
    expect,
    scratch,
    start_residual,
)
from gradwire.compressors.base.contract import Compiled
from gradwire.compressors.base.registry import register
from gradwire.compressors.support.warmup import ratio_at
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.cpu.small import encode_top_k, sum_top_k
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload


@register
class TopK(ArrayCompressor):
    """Top-k sparsification: the entries of largest magnitude as (index, value) pairs.

    Args:
        ratio: Kept fraction, in (0, 1].
        warmup: Steps in which the kept fraction falls to `ratio`, from 25 % on; see `support.warmup`.
    """

    name: ClassVar[str] = "topk"
    unique_encoding = True
    sparse = True

    def __init__(self, ratio: float = 0.01, warmup: int = 0) -> None:
        self.ratio = options.real("ratio", ratio, 0.0, 1.0, low_open=True)
        self.warmup = options.integer("warmup", warmup, 0, 1 << 53)

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {"ratio": self.ratio, "warmup": self.warmup}

    def num_kept(self, size: int, step: int | None = None) -> int:
        """K for a tensor of `size` elements: in a step, or by default after the warm-up."""
        ratio = self.ratio if step is None else ratio_at(self.ratio, self.warmup, step)
        # In decimal, so that 7 % of 100 elements are 7 and not the 8 that 7.000000000000001 would round up to.
        return min(size, max(1, math.ceil(Fraction(repr(ratio)) * size)))

    def contraction(self, spec: TensorSpec) -> float:
        """The K largest of N hold at least K/N of the energy."""
        return self.num_kept(spec.numel) / max(1, spec.numel)

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Exact size of every payload; during the warm-up, of the first."""
        k = self.num_kept(spec.numel, 0)
        return 4 * k + kernels.positions_bytes(spec.numel, k)

    def compiled(self) -> Compiled | None:
        """Functions that count and select with one pass for each digit of the magnitudes."""
        return Compiled(
            *(encode_top_k, sum_top_k, lambda size, step: np.array([self.num_kept(size, step)], np.float64)),
            scratch_bytes=lambda size, num_payloads: 12 * size,
            uses_step=self.warmup > 0,
        )

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        k = self.num_kept(x.size, ctx.step)
        num_bytes = kernels.positions_bytes(x.size, k)
        body, indices = buffers.empty(4 * k + num_bytes), buffers.empty(k, _index_dtype(x.size))
        values, positions = body[: 4 * k].view("<f4"), body[4 * k :]
        kernels.top_k(x, k, indices)
        kernels.pack_positions(indices, x.size, positions)
        if args.residual_out is not None:
            start_residual(x, args.residual_out)
        kernels.take(x, indices, values, args.residual_out)
        if args.scale != 1.0:
            _scale(values, args.scale)
        # Non-finite entries are larger than all others, so that they are among the values if there are any.
        return None if kernels.count_nonfinite(values) else body

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        k = self.num_kept(out.size, ctx.step)
        indices, values = self._parse(body, k, out.size, scratch(_index_dtype(out.size).itemsize * k))
        if not accumulate:
            clear(out)
        kernels.scatter(indices, values, out, accumulate)  # a negative zero stays one, where sums have none

    def _decode_sum(
        self, bodies: Sequence[np.ndarray], ctxs: Sequence[Context], stats: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        width = _index_dtype(out.size).itemsize
        buffer = scratch(width * sum(self.num_kept(out.size, ctx.step) for ctx in ctxs))
        parsed = []
        for body, ctx in zip(bodies, ctxs, strict=True):
            k = self.num_kept(out.size, ctx.step)
            parsed.append(self._parse(body, k, out.size, buffer[: width * k]))
            buffer = buffer[width * k :]
        kernels.scatter_sum([indices for indices, _ in parsed], [values for _, values in parsed], out)

    def pairs(
        self, payload: Payload, ctx: Context, size: int, stats: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Compressor`."""
        k = self.num_kept(size, ctx.step)
        return self._parse(payload.body, k, size, np.empty(k * _index_dtype(size).itemsize, np.uint8))

    def _parse(self, body: np.ndarray, k: int, size: int, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions, in `buffer`, and values."""
        reader, indices = Reader(body), buffer.view(_index_dtype(size))
        values, positions = reader.array(np.float32, k), reader.array(np.uint8, kernels.positions_bytes(size, k))
        reader.end()
        is_valid = kernels.unpack_positions(positions, size, indices)
        expect(is_valid, f"{k} ascending positions below {size}", "others", self.name)
        expect(kernels.count_nonfinite(values) == 0, "finite values", "others", self.name)
        expect(_zeros_first(indices, values), "zeros at the lowest indices", "others", self.name)
        return indices, values


def _scale(values: np.ndarray, scale: float) -> None:
    """Multiply in place. Underflows become the smallest number, because zeros have a place of their own."""
    not_zero = values != 0
    np.multiply(values, np.float32(scale), out=values)
    if np.count_nonzero(values) < np.count_nonzero(not_zero):
        np.copyto(values, np.copysign(SMALLEST, values), where=not_zero & (values == 0))


def _zeros_first(indices: np.ndarray, values: np.ndarray) -> bool:
    """Whether kept zeros have the lowest indices. Zeros are kept only if fewer than K elements are not zero.

    That is so if all elements up to the last kept zero are kept, that is, if its index is its position.
    """
    for end in range(values.size, 0, -SCAN_ELEMENTS):
        start = max(0, end - SCAN_ELEMENTS)
        zeros = np.flatnonzero(values[start:end] == 0)
        if zeros.size:
            last = start + int(zeros[-1])
            return int(indices[last]) == last
    return True


def _index_dtype(size: int) -> np.dtype:
    return np.dtype(np.uint32 if size <= 1 << 32 else np.int64)
