"""Base of compressors whose algorithm is a pair of functions over arrays of one dimension.

It converts tensors to arrays and other element types to float32, handles the non-finite mark, and checks buffers. An
algorithm writes `_encode` and `_decode`, and `_decode_sum` if a kernel decodes and adds all ranks in one sweep.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from gradwire.compressors.base.contract import Compressor
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.wire.payload import Payload

SCAN_ELEMENTS = 4096  # read at a time, by scans that may stop early
SMALLEST = np.finfo(np.float32).smallest_subnormal
_NOTHING = np.empty(0, np.uint8)
_threads = threading.local()
NONFINITE = Payload(_NOTHING, nonfinite=True)


class EncodeArguments(NamedTuple):
    """Arguments of `ArrayCompressor._encode` in addition to the elements and the context.

    Attributes:
        stats: Reduced stats, or nothing.
        scale: Positive factor; 1 if `residual_out` is given. Homogeneous algorithms scale their side information.
        abs_max: Largest magnitude of x, if the caller knows it.
        residual_in: None, except for compressors that override `encode`.
        residual_out: float32[N] that receives x − decode(body), or None. May be x itself.
    """

    stats: Sequence[np.ndarray] = ()
    scale: float = 1.0
    abs_max: float | None = None
    residual_in: np.ndarray | None = None
    residual_out: np.ndarray | None = None


class ArrayCompressor(Compressor):
    """A compressor over arrays; see `Compressor` for the contract."""

    @abstractmethod
    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        """Encode scale · x into the body of a payload.

        Args:
            x: N elements of any element type, as `as_array` returns them.
            ctx: Context of the encode.
            args: All other arguments.

        Returns:
            The body, uint8; None if x contains NaN or infinity.
        """

    @abstractmethod
    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        """Decode untrusted bytes, and write them or add them to float32 `out`. Raises `PayloadError`."""

    def _decode_sum(
        self, bodies: Sequence[np.ndarray], ctxs: Sequence[Context], stats: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        """Write the sum of all decoded bodies, added to 0.0 in their order, to float32 `out`."""
        clear(out)
        for body, ctx in zip(bodies, ctxs, strict=True):
            self._decode(body, ctx, stats, out, accumulate=True)

    # -- the contract ----------------------------------------------------------------------------------------

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        *,
        scale: float = 1.0,
        residual_in: np.ndarray | None = None,
        residual_out: np.ndarray | None = None,
    ) -> Payload:
        """Encode scale · grad + residual_in."""
        x, ctx = as_array(grad), self._with_shape(ctx, grad)
        if residual_out is None or (residual_in is None and scale == 1.0):
            assert residual_in is None, "without residual_out, the error of this encode would be lost"
            return _payload(self._encode(x, ctx, EncodeArguments(stats, scale, residual_out=residual_out)))
        abs_max = float(kernels.compensate(x, scale, residual_in, residual_out))
        if not math.isfinite(abs_max):
            return NONFINITE
        args = EncodeArguments(stats, abs_max=abs_max, residual_out=residual_out)
        return _payload(self._encode(residual_out, ctx, args))

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
                f"accumulate=True needs a float32 out, not {None if out is None else out.dtype}. "
                "Pass out=torch.zeros(shape)."
            )
        out = self._output(ctx, out)
        ctx = self._with_shape(ctx, out)
        if payload.nonfinite:
            self._expect_bytes(payload, 0)
            return out.fill_(torch.nan)
        if out.dtype == torch.float32:
            self._decode(payload.body, ctx, stats, as_array(out), accumulate)
        else:
            values = buffers.empty(out.numel(), np.float32)
            self._decode(payload.body, ctx, stats, values, False)
            kernels.cast(values, as_array(out))
        return out

    def decode_sum(
        self, payloads: Sequence[Payload], ctxs: Sequence[Context], out: torch.Tensor, stats: Sequence[np.ndarray] = ()
    ) -> torch.Tensor:
        """Decode and add the payloads of several ranks."""
        if out.dtype != torch.float32:
            raise ValueError(f"decode_sum needs a float32 out, not {out.dtype}. Pass out=torch.empty(shape).")
        for ctx in ctxs:
            self._output(ctx, out)
        if len(payloads) != len(ctxs):
            raise ValueError(f"decode_sum got {len(payloads)} payloads, but {len(ctxs)} contexts. Pass one each.")
        marked = [payload for payload in payloads if payload.nonfinite]
        for payload in marked:
            self._expect_bytes(payload, 0)
        if marked:
            return out.fill_(torch.nan)
        shaped = [self._with_shape(ctx, out) for ctx in ctxs]
        self._decode_sum([payload.body for payload in payloads], shaped, stats, as_array(out))
        return out

    def _with_shape(self, ctx: Context, tensor: torch.Tensor) -> Context:
        """The context; with the shape of `tensor`, if the algorithm needs it and the context has none."""
        if ctx.spec is not None or not self.requires_full_tensor:
            return ctx
        return replace(ctx, spec=TensorSpec.of(tensor))


def _payload(body: np.ndarray | None) -> Payload:
    return NONFINITE if body is None else Payload(body)


def start_residual(x: np.ndarray, residual_out: np.ndarray) -> None:
    """Copy x to `residual_out` as float32, unless it is there already."""
    if x.dtype != np.float32 or x.ctypes.data != residual_out.ctypes.data:
        kernels.cast(x, residual_out)


def scaled(value: float, scale: float) -> float:
    """Scale a value of the side information to a float32. Only zero becomes zero: underflow must not change meaning."""
    found = float(np.float32(value * scale))
    return math.copysign(SMALLEST, value) if found == 0 and value != 0 else found


def scratch(num_bytes: int) -> np.ndarray:
    """Memory of this thread for the duration of one call: uint8[num_bytes] with arbitrary contents.

    It is kept for the next call, so that large encodes and decodes do not fault in new pages each time.
    """
    kept: np.ndarray = getattr(_threads, "scratch", _NOTHING)
    if kept.size < num_bytes:
        kept = _threads.scratch = np.empty(num_bytes, np.uint8)
    return kept[:num_bytes]


def clear(out: np.ndarray) -> None:
    """Set a contiguous array to zeros. NumPy fills bytes by memset, which need not read them first."""
    out.view(np.uint8).fill(0)


def any_other(array: np.ndarray, value: int) -> bool:
    """Whether any element differs from `value`. Stops early if one does."""
    return any(
        bool((array[start : start + SCAN_ELEMENTS] != value).any()) for start in range(0, array.size, SCAN_ELEMENTS)
    )


def expect_bytes(body: np.ndarray, num_bytes: int, compressor: str) -> None:
    """Raise `PayloadError` unless the body has this size."""
    expect(body.nbytes == num_bytes, f"{num_bytes} bytes", body.nbytes, compressor)


def expect(condition: bool | np.bool_, expected: str, got: object, compressor: str) -> None:
    """Raise `PayloadError` unless `condition` holds."""
    if not condition:
        raise PayloadError(f"Expected {expected}, got {got} (in a {compressor} payload).")
