"""bfloat16: every element rounded to 7 bits of mantissa, with the range of float32.

Biased by rounding only: the relative error is at most 2⁻⁸ for normal numbers. An element that rounds past the largest
bfloat16, 3.39e38, marks the payload as non-finite.

Body: the elements, 2 bytes each.

Source: PyTorch's `bf16_compress_hook`. Differences: as for `fp16`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gradwire.compressors.base.registry import register
from gradwire.compressors.support.casts import CastCompressor


@register
class Bf16(CastCompressor):
    """bfloat16: 7 bits of mantissa, the range of float32."""

    name: ClassVar[str] = "bf16"
    element: ClassVar[type[np.generic]] = np.uint16  # the bits, which is how kernels take bfloat16
