"""Base of compressors whose algorithm is a pair of functions over one-dimensional arrays.

It does what is the same for all of them: tensors to arrays, other element types to float32, the non-finite
mark, the choice of the fused path, and the checks of buffers. An algorithm writes `_encode` and `_decode`,
and `_decode_sum` where a kernel decodes and adds all ranks in one sweep.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.wire.payload import Payload

PIECE = 4096
SMALLEST = np.finfo(np.float32).smallest_subnormal
_NOTHING = np.empty(0, np.uint8)
_threads = threading.local()
NONFINITE = Payload(_NOTHING, nonfinite=True)


class ArrayCompressor(Compressor):
    """Compressor over 1-D arrays; see `Compressor` for the contract."""

    @abstractmethod
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
        """Encode scale · x into a body; None where x holds a NaN or an infinity.

        Args:
            x: N elements of any element type, as `as_array` gives them.
            ctx: context of the encode.
            scale: above 0; 1 wherever `residual` is given. Algorithms that are homogeneous scale the side
                values.
            largest: the largest magnitude of x where the caller knows it already.
            stats: reduced statistics, or nothing.
            residual: float32[N] that takes x − decode(body), or None. May be x itself.
        """

    @abstractmethod
    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        """Decode a body of untrusted bytes into (or onto) float32 `out`. Raises `PayloadError`."""

    def _decode_sum(
        self,
        bodies: Sequence[np.ndarray],
        ctxs: Sequence[Context],
        stats: Sequence[np.ndarray],
        out: np.ndarray,
    ) -> None:
        """Write the sum of what all bodies decode to, added from 0.0 in their order, to float32 `out`."""
        clear(out)
        for body, ctx in zip(bodies, ctxs, strict=True):
            self._decode(body, ctx, stats, out, accumulate=True)

    # -- the contract ----------------------------------------------------------------------------------------

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> Payload:
        """Encode `grad`."""
        return _payload(self._encode(as_array(grad), ctx, stats=stats, residual=residual))

    def encode_compensated(
        self,
        grad: torch.Tensor,
        ctx: Context,
        work: np.ndarray | None,
        *,
        scale: float = 1.0,
        residual: np.ndarray | None = None,
        stats: Sequence[np.ndarray] = (),
    ) -> Payload:
        """Encode scale · grad + residual; see `Compressor`."""
        if work is None:
            assert residual is None, "a residual without a place for the next one would be lost"
            return _payload(self._encode(as_array(grad), ctx, scale=scale, stats=stats))
        largest = float(kernels.compensate(as_array(grad), scale, residual, work))
        if not math.isfinite(largest):
            return NONFINITE
        return _payload(self._encode(work, ctx, largest=largest, stats=stats, residual=work))

    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode `payload`."""
        if accumulate and (out is None or out.dtype != torch.float32):
            raise ValueError(
                f"Expected a float32 out to accumulate in, got {None if out is None else out.dtype}. "
                "Do: pass out=torch.zeros(shape)."
            )
        out = self._output(ctx, out)
        if payload.nonfinite:
            self._expect_bytes(payload, 0)
            return out.fill_(torch.nan)
        if out.dtype == torch.float32:
            self._decode(payload.body, ctx, stats, as_array(out), accumulate)
        else:
            values = np.empty(out.numel(), np.float32)
            self._decode(payload.body, ctx, stats, values, False)
            kernels.cast(values, as_array(out))
        return out

    def decode_sum(
        self,
        payloads: Sequence[Payload],
        ctxs: Sequence[Context],
        out: torch.Tensor,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Decode and add the payloads of several ranks."""
        if out.dtype != torch.float32:
            raise ValueError(f"Expected a float32 out for a sum, got {out.dtype}. Do: pass out=torch.empty(shape).")
        for ctx in ctxs:
            self._output(ctx, out)
        if len(payloads) != len(ctxs):
            raise ValueError(f"Expected one context a payload, got {len(ctxs)} for {len(payloads)}. Do: pass one each.")
        marked = [payload for payload in payloads if payload.nonfinite]
        for payload in marked:
            self._expect_bytes(payload, 0)
        if marked:
            return out.fill_(torch.nan)
        self._decode_sum([payload.body for payload in payloads], ctxs, stats, as_array(out))
        return out


def _payload(body: np.ndarray | None) -> Payload:
    return NONFINITE if body is None else Payload(body)


def start_residual(x: np.ndarray, residual: np.ndarray) -> None:
    """Copy x to `residual` as float32, unless it is there already."""
    if x.dtype != np.float32 or x.ctypes.data != residual.ctypes.data:
        kernels.cast(x, residual)


def scaled(side_value: float, scale: float) -> float:
    """Scale a side value to a float32. Only zero becomes zero: underflow must not change what it means."""
    found = float(np.float32(side_value * scale))
    return math.copysign(SMALLEST, side_value) if found == 0 and side_value != 0 else found


def scratch(num_bytes: int) -> np.ndarray:
    """Memory of this thread for the time of one call: uint8[num_bytes], with any contents.

    It is kept for the next call, so that large encodes and decodes do not fault in fresh pages each time.
    """
    kept: np.ndarray = getattr(_threads, "scratch", _NOTHING)
    if kept.size < num_bytes:
        kept = _threads.scratch = np.empty(num_bytes, np.uint8)
    return kept[:num_bytes]


def clear(out: np.ndarray) -> None:
    """Zeros for all of a contiguous array. As bytes: these NumPy fills by memset, which need not read them before."""
    out.view(np.uint8).fill(0)


def any_other(array: np.ndarray, value: int) -> bool:
    """Whether any element differs from `value`. Looks in pieces, and no further than the first that does."""
    return any(bool((array[start : start + PIECE] != value).any()) for start in range(0, array.size, PIECE))


def expect_bytes(body: np.ndarray, num_bytes: int, compressor: str) -> None:
    """Raise the decoders' one error unless the body has this size."""
    expect(body.nbytes == num_bytes, f"{num_bytes} bytes", body.nbytes, compressor)


def expect(condition: bool | np.bool_, expected: str, got: object, compressor: str) -> None:
    """Raise the decoders' one error unless `condition` holds."""
    if not condition:
        raise PayloadError(f"Expected {expected}, got {got} (in a {compressor} payload).")
