"""GCOMP: `lossless`, after the bits of each gradient that its update would not notice have been cut off.

Needs the parameter and the state of its optimizer beside the gradient, as `attach(ddp, "gcomp", optimizer=opt)` hands
them over. `gcomp_metric` says which bits those are and what that guarantees. Without them, as in a context with nothing
in `aux`, nothing is cut off and every bit is kept.

Biased: magnitudes are cut, never rounded up. What is cut is not kept as a residual; it is below what an update shows.

`ctx.aux` has the range's elements of ``parameter``, ``first`` and ``second`` (the moments, where there are any),
``numbers`` (see `kernels.update_limits`), ``loss_scale``, and ``clipped``, which stands for the option. Body: that of
`lossless`.

Source: GCOMP (SoCC 2024). Differences: those of `gcomp_metric`, `kernels.float_format` and `kernels.prefix_code`.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base.array import NONFINITE, scratch, start_residual
from gradwire.compressors.base.options import flag
from gradwire.compressors.base.registry import register
from gradwire.compressors.lossless import FloatPacking
from gradwire.compressors.none import ARRAY_DTYPES, convert
from gradwire.compressors.support.gcomp_metric import guard
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.float_format import LEVELS
from gradwire.wire.payload import Payload

# Elements that stay in a core's cache while they are scaled, their limits found, and cut.
_PIECE = 1 << 15


@register
class GComp(FloatPacking):
    """`lossless`, without the bits that the optimizer's update would not notice.

    Args:
        table: another prefix code to begin with than the default, all ranks the same; see `FloatPacking`.
        refresh: every so many steps each tensor gets a code of its own gradients; 0 for never.
        clipped: whether gradients are multiplied by a factor of their norm before the optimizer's step
            (`clip_grad_norm_`): then at most 6 bits are cut, and none of 16-bit elements, so that the norm stays.
    """

    name: ClassVar[str] = "gcomp"
    exact = False
    unbiased = False
    needs_optimizer = True

    def __init__(self, table: str = "", refresh: int = 50, clipped: bool = False) -> None:
        super().__init__(table, refresh)
        self.clipped = flag("clipped", clipped)

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {**super().options, "clipped": self.clipped}

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
        clipped = self.clipped or bool(ctx.aux.get("clipped", False))
        levels = (1 if dtype == torch.float32 else 0) if clipped else LEVELS - 1
        if "numbers" in ctx.aux and dtype != torch.float64 and levels:
            elements, finite = _truncated(x, dtype, scale, ctx, levels)
        else:
            elements, finite = self._elements_to_send(x, dtype, scale)
        if not finite:
            return NONFINITE
        payload = Payload(self._body(elements, dtype, ctx))
        if residual is not None:
            start_residual(x, residual)
            kernels.compensate(elements, -1.0, residual, residual)
        return payload


def _truncated(x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context, levels: int) -> tuple[np.ndarray, bool]:
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
        kernels.truncate_floats(part, limits[: part.size], least, part, levels)
    return elements, True
