"""No compression: the elements as they are, little-endian, in the tensor's own element type.

Exact. A gradient with NaN or infinity travels whole, with the mark. With feedback, a residual remains only if the
element type is narrower than the compensated float32 gradient.

Source: none. Differences: none.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from gradwire.compressors.base import Compressor, FeedbackName
from gradwire.compressors.base.array import start_residual
from gradwire.compressors.base.contract import compensate
from gradwire.compressors.base.registry import register
from gradwire.core import buffers, host
from gradwire.core.context import Context
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

_CHUNK = 1 << 15  # elements of a sum that stay in a core's cache while all ranks are added
ARRAY_DTYPES = {dtype: as_array(host.empty(0, dtype)).dtype for dtype in ELEMENT_TYPES}


@register
class NoCompression(Compressor):
    """No compression: the elements as they are."""

    name: ClassVar[str] = "none"
    unbiased = True
    exact = True
    dense = True
    elementwise = True
    unique_encoding = True
    default_feedback: FeedbackName = "none"

    def contraction(self, spec: TensorSpec) -> float | None:
        """1: nothing is lost."""
        return 1.0

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Size of the tensor."""
        return spec.nbytes

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
        """Copy scale · grad + residual_in, in the element type of `ctx.spec`, or of `grad` without one."""
        dtype = grad.dtype if ctx.spec is None else ctx.spec.dtype
        if residual_in is not None or (residual_out is not None and scale != 1.0):
            grad, scale = compensate(grad, scale, residual_in, residual_out), 1.0
        x = as_array(grad)
        payload, elements = self._pack(x, dtype, scale, ctx)
        if residual_out is not None:
            start_residual(x, residual_out)
            kernels.compensate(elements, -1.0, residual_out, residual_out)
        return payload

    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Copy the elements, or add them; to add, `out` may also be float64."""
        out = self._output(ctx, out)
        dtype, target = out.dtype if ctx.spec is None else ctx.spec.dtype, as_array(out)
        elements = self._elements(payload, ctx, dtype, target, fits=out.dtype == dtype and not accumulate)
        if accumulate:
            add(elements, target)
        elif elements is not target:
            convert(elements, target, 1.0)
        return out

    def decode_sum(
        self, payloads: Sequence[Payload], ctxs: Sequence[Context], out: torch.Tensor, stats: Sequence[np.ndarray] = ()
    ) -> torch.Tensor:
        """Add the elements of all ranks; `out` may also be float64."""
        target, ranks = as_array(out), []
        for payload, ctx in zip(payloads, ctxs, strict=True):
            self._output(ctx, out)  # checks it
            dtype = out.dtype if ctx.spec is None else ctx.spec.dtype
            ranks.append(self._elements(payload, ctx, dtype, target))
        write_sum(ranks, target)
        return out

    def _elements(
        self, payload: Payload, ctx: Context, dtype: torch.dtype, target: np.ndarray, fits: bool = False
    ) -> np.ndarray:
        """Elements of a payload of untrusted bytes, as many as `target` has; may be `target` itself if it `fits`."""
        body = self._expect_bytes(payload, target.size * dtype.itemsize)
        return Reader(body).array(ARRAY_DTYPES[dtype], target.size)

    def _pack(self, x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context) -> tuple[Payload, np.ndarray]:
        """Payload of scale · x, and the elements that it decodes to."""
        body = buffers.empty(x.size * dtype.itemsize)
        elements = body.view(ARRAY_DTYPES[dtype])
        return Payload(body, nonfinite=not convert(x, elements, scale)), elements


def convert(x: np.ndarray, out: np.ndarray, scale: float) -> bool:
    """Write scale · x to `out` in its element type, and return whether the result is finite."""
    if out.dtype == np.float64:  # kernels calculate in float32
        if x.dtype == np.uint16:
            kernels.cast(x, out, scale)
        else:
            np.multiply(x, scale, out=out, dtype=np.float64)
        return out.size == 0 or bool(np.isfinite(out.min()) and np.isfinite(out.max()))
    both_float32 = out.dtype == np.float32 and x.dtype == np.float32
    if both_float32 and np.isfinite(kernels.compensate(x, scale, None, out)):  # copy and check in one sweep
        return True
    kernels.cast(x, out, scale)  # keeps every bit of a NaN if the types are equal
    return kernels.count_nonfinite(out) == 0


def write_sum(ranks: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write the sum of arrays of any element type to float32 or float64 `out`."""
    for start in range(0, out.size, _CHUNK):
        chunk = out[start : start + _CHUNK]
        chunk.fill(0)
        for elements in ranks:
            add(elements[start : start + _CHUNK], chunk)


def add(elements: np.ndarray, out: np.ndarray) -> None:
    """Add elements of any type to float32 or float64 `out`."""
    if out.dtype == np.float64 and elements.dtype != np.uint16:
        np.add(out, elements, out=out)
    elif out.dtype == np.float32:
        kernels.accumulate(elements, out)
    else:
        raise ValueError(f"accumulate=True needs a float32 out, not {out.dtype}. Pass out=torch.zeros(shape).")
