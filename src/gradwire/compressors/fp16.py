"""IEEE half precision: every element rounded to 10 bits of mantissa and 5 of exponent.

Biased by rounding alone: relative error at most 2^-11 between 2^-14 and 65504, nothing is kept below 2^-25.
An element beyond 65504 marks the payload as non-finite.

Source: PyTorch's `fp16_compress_hook`. Differences: the caller scales by 1/W before the cast, which is where
the hook divides; the overflow is marked, not left to be found in the model.
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
