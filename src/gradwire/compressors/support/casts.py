"""Base of the compressors that round every element to a 16-bit float: `fp16` and `bf16`.

Rounds to nearest even from float32. A payload is marked as non-finite if a *rounded* element is: a finite element
beyond the 16-bit range becomes an infinity, as in PyTorch's hooks of the same names, and the step is skipped before it
reaches the model. Elements are not checked on receipt: any 16 bits are a number.
"""
# Shapes: N = elements of the tensor or range, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gradwire.compressors.base import FeedbackName
from gradwire.compressors.base.array import ArrayCompressor, EncodeArguments, expect_bytes, start_residual
from gradwire.compressors.none import write_sum
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.wire.fields import Reader


class CastCompressor(ArrayCompressor):
    """A compressor that rounds to `element`, a NumPy type of 16 bits; uint16 stands for bfloat16."""

    element: ClassVar[type[np.generic]]
    elementwise = True
    unique_encoding = True
    default_feedback: FeedbackName = "none"

    def max_encoded_bytes(self, spec: TensorSpec) -> int:
        """Two bytes per element."""
        return 2 * spec.numel

    def _encode(self, x: np.ndarray, ctx: Context, args: EncodeArguments) -> np.ndarray | None:
        body = buffers.empty(2 * x.size)
        rounded = body.view(self.element)
        kernels.cast(x, rounded, args.scale)
        if args.residual_out is None:
            return None if kernels.count_nonfinite(rounded) else body
        start_residual(x, args.residual_out)
        return body if np.isfinite(kernels.compensate(rounded, -1.0, args.residual_out, args.residual_out)) else None

    def _decode(
        self, body: np.ndarray, ctx: Context, stats: Sequence[np.ndarray], out: np.ndarray, accumulate: bool
    ) -> None:
        rounded = self._elements(body, out.size)
        if accumulate:
            kernels.accumulate(rounded, out)
        else:
            kernels.cast(rounded, out)

    def _decode_sum(
        self, bodies: Sequence[np.ndarray], ctxs: Sequence[Context], stats: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        write_sum([self._elements(body, out.size) for body in bodies], out)

    def _elements(self, body: np.ndarray, size: int) -> np.ndarray:
        expect_bytes(body, 2 * size, self.name)
        return Reader(body).array(self.element, size)
