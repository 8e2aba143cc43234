"""IEEE half precision: every element rounded to 10 bits of mantissa and 5 bits of exponent.

Biased by rounding only: the relative error is at most 2⁻¹¹ between 2⁻¹⁴ and 65504, and elements below 2⁻²⁵ become 0. An
element beyond 65504 marks the payload as non-finite.

Body: the elements, 2 bytes each.

Source: PyTorch's `fp16_compress_hook`. Differences: the hook casts first, and divides by the world size and adds in 16
bits; here gradients are scaled before the cast, and decoded values are added in float32. An overflow is marked, and all
ranks get NaN: a GradScaler then skips the step, and without one the optimizer applies it, as with the hook.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gradwire.compressors.base.registry import register
from gradwire.compressors.support.casts import CastCompressor


@register
class Fp16(CastCompressor):
    """IEEE half precision: 10 bits of mantissa, range ±65504."""

    name: ClassVar[str] = "fp16"
    element: ClassVar[type[np.generic]] = np.float16
