"""GCOMP: `lossless`, after cutting off the bits of each gradient that the parameter update would not notice.

Needs the parameter and the state of its optimizer in addition to the gradient; `attach(ddp, "gcomp", optimizer=opt)`
provides them. `support.gcomp_metric` explains which bits are cut, and what that guarantees. If a context has no such
state in `aux`, all bits are kept.

Biased: magnitudes are cut, never rounded up. The cut bits are not kept as a residual, since no update would show them.

`ctx.aux` has these entries for the elements of the range: ``parameter``; ``first`` and ``second``, the moments of the
optimizer, if it has any; ``numbers``, see `kernels.update_limits`; ``loss_scale``; and ``clipped``, which has the same
meaning as the option.

Body: as for `lossless`.

Source: GCOMP (SoCC 2024). Differences: those of `support.gcomp_metric` and `support.float_packing`.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base.array import NONFINITE, scratch
from gradwire.compressors.base.options import flag
from gradwire.compressors.base.registry import register
from gradwire.compressors.none import ARRAY_DTYPES, convert
from gradwire.compressors.support.float_packing import FloatPacking
from gradwire.compressors.support.gcomp_metric import guard
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.float_format import LEVELS
from gradwire.wire.payload import Payload

# Elements that stay in a core's cache while they are scaled and cut.
_CHUNK = 1 << 15


@register
class GComp(FloatPacking):
    """`lossless`, without the bits that the optimizer's update would not notice.

    Args:
        table: Prefix code to begin with, the same on all ranks; see `FloatPacking`. By default a built-in one.
        refresh: Number of steps after which each tensor gets a new code, made from its averaged gradient; 0 for never.
        clipped: Whether `clip_grad_norm_` scales gradients before the optimizer's step. If true, at most 6 bits are
            cut, and none of 16-bit elements, so that the norm stays the same.
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
        """None: subnormal numbers may be cut to zero."""
        return None

    def _elements(
        self, payload: Payload, ctx: Context, dtype: torch.dtype, target: np.ndarray, fits: bool = False
    ) -> np.ndarray:
        if not payload.nonfinite:
            return super()._elements(payload, ctx, dtype, target, fits)
        self._expect_bytes(payload, 0)
        return as_array(torch.full((target.size,), torch.nan, dtype=dtype))

    def _pack(self, x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context) -> tuple[Payload, np.ndarray]:
        clipped = self.clipped or bool(ctx.aux.get("clipped", False))
        levels = (1 if dtype == torch.float32 else 0) if clipped else LEVELS - 1
        if "numbers" in ctx.aux and dtype != torch.float64 and levels:
            elements, finite = _truncated(x, dtype, scale, ctx, levels)
        else:
            elements, finite = self._elements_to_send(x, dtype, scale)
        return (Payload(self._body(elements, dtype, ctx)) if finite else NONFINITE), elements


def _truncated(x: np.ndarray, dtype: torch.dtype, scale: float, ctx: Context, levels: int) -> tuple[np.ndarray, bool]:
    """Scale · x without the bits that the update does not notice, in scratch memory, and whether it is finite."""
    memory = scratch(4 * _CHUNK + dtype.itemsize * x.size)
    limits, elements = memory[: 4 * _CHUNK].view(np.float32), memory[4 * _CHUNK :].view(ARRAY_DTYPES[dtype])
    parameter, numbers = as_array(ctx.aux["parameter"]), as_array(ctx.aux["numbers"])
    moments = [as_array(ctx.aux[name]) if name in ctx.aux else None for name in ("first", "second")]
    least = guard(ctx.world_size) / float(ctx.aux["loss_scale"])
    for start in range(0, x.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        values = elements[chunk]
        if not convert(x[chunk], values, scale):
            return elements, False
        first, second = (None if moment is None else moment[chunk] for moment in moments)
        kernels.update_limits(parameter[chunk], first, second, numbers, limits[: values.size])
        kernels.truncate_floats(values, limits[: values.size], least, values, levels)
    return elements, True
