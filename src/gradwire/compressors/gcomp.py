"""GCOMP: `lossless`, after the bits of each gradient that its update would not notice have been cut off.

Needs the parameter and the state of its optimizer beside the gradient, as `attach(ddp, "gcomp", optimizer=opt)` hands
them over. `gcomp_metric` says which bits those are and what that guarantees. Without them, as in a context with nothing
in `aux`, nothing is cut off and every bit is kept.

Biased: magnitudes are cut, never rounded up. What is cut is not kept as a residual; it is below what an update shows.

`ctx.aux` has the range's elements of ``parameter``, ``first`` and ``second`` (the moments, where there are any),
``numbers`` (see `kernels.update_limits`) and ``loss_scale``. Body: that of `lossless`.

Source: GCOMP (SoCC 2024). Differences: those of `gcomp_metric`, `kernels.float_format` and `kernels.prefix_code`.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from gradwire.compressors.array import NONFINITE, scratch, start_residual
from gradwire.compressors.base import as_array
from gradwire.compressors.gcomp_metric import guard
from gradwire.compressors.lossless import FloatPacking
from gradwire.compressors.none import ARRAY_DTYPES, convert
from gradwire.compressors.registry import register
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.wire.payload import Payload

# Elements that stay in a core's cache while they are scaled, their limits found, and cut.
_PIECE = 1 << 15


@register
class GComp(FloatPacking):
    """`lossless`, without the bits that the optimizer's update would not notice.

    Args:
        table: another prefix code than the default, all ranks the same; see `FloatPacking`.
    """

    name: ClassVar[str] = "gcomp"
    exact = False
    unbiased = False
    needs_optimizer = True

    def contraction(self, spec: TensorSpec) -> float | None:
        """None: subnormal numbers may be cut to nothing."""
        return None

    def encode(
        self,
        grad: torch.Tensor,
        ctx: Context,
        stats: Sequence[np.ndarray] = (),
        residual: np.ndarray | None = None,
    ) -> Payload:
        """Truncate and pack `grad`; ctx.spec, where given, says in which element type."""
        return self._encode(grad, ctx, 1.0, residual)

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
        """Truncate and pack scale · grad + residual."""
        if work is not None:
            return super().encode_compensated(grad, ctx, work, scale=scale, residual=residual)
        assert residual is None, "a residual without a place for the next one would be lost"
        return self._encode(grad, ctx, scale, None)

    def decode(
        self,
        payload: Payload,
        ctx: Context,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        stats: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Unpack the elements, or add them."""
        if not payload.nonfinite:
            return super().decode(payload, ctx, out, accumulate)
        self._expect_bytes(payload, 0)
        return self._output(ctx, out).fill_(torch.nan)

    def _encode(self, grad: torch.Tensor, ctx: Context, scale: float, residual: np.ndarray | None) -> Payload:
        dtype = grad.dtype if ctx.spec is None else ctx.spec.dtype
        x = as_array(grad)
        if "numbers" in ctx.aux and dtype != torch.float64:
            elements, finite = _truncated(x, dtype, scale, ctx)
        else:
            elements, finite = self._elements_to_send(x, dtype, scale)
        if not finite:
            return NONFINITE
        payload = Payload(self._body(elements, dtype))
        if residual is not None:
            start_residual(x, residual)
            kernels.compensate(elements, -1.0, residual, residual)
        return payload


def _truncated(x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context) -> tuple[np.ndarray, bool]:
    """Scale · x without what the update does not notice, in memory of this thread, and whether all of it is finite."""
    memory = scratch(4 * _PIECE + dtype.itemsize * x.size)
    limits, elements = memory[: 4 * _PIECE].view(np.float32), memory[4 * _PIECE :].view(ARRAY_DTYPES[dtype])
    parameter, numbers = as_array(ctx.aux["parameter"]), as_array(ctx.aux["numbers"])
    moments = [as_array(ctx.aux[name]) if name in ctx.aux else None for name in ("first", "second")]
    least = guard(ctx.world_size) / float(ctx.aux["loss_scale"])
    for start in range(0, x.size, _PIECE):
        piece = slice(start, start + _PIECE)
        part = elements[piece]
        if not convert(x[piece], part, scale):
            return elements, False
        first, second = (None if moment is None else moment[piece] for moment in moments)
        kernels.update_limits(parameter[piece], first, second, numbers, limits[: part.size])
        kernels.truncate_floats(part, limits[: part.size], least, part)
    return elements, True
