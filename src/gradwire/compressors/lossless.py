"""Lossless compression: exponents in a prefix code, signs and mantissas packed tightly, every bit kept.

Exact for every input, including NaN payloads, subnormal numbers and -0. A payload decodes to the bits that `none` would
have sent, and is at most 12 bytes longer. The table of the prefix code is adapted to each tensor during training.

Body: see `support.float_packing`.

Source: GCOMP (SoCC 2024), sections 4 and 6, without the truncation of section 5, for which see `gcomp`. Differences:
those of `support.float_packing`. The lengths that begin the paper's block (figure 7) are in the frame and in the
kernels' own table of chunks.
"""

from __future__ import annotations

from typing import ClassVar

from gradwire.compressors.base.registry import register
from gradwire.compressors.support.float_packing import FloatPacking


@register
class Lossless(FloatPacking):
    """Exponents in a prefix code, signs and mantissas packed tightly: exact.

    Args:
        table: Prefix code to begin with, the same on all ranks; see `FloatPacking`. By default a built-in one.
        refresh: Number of steps after which each tensor gets a new code, made from its averaged gradient; 0 for never.
    """

    name: ClassVar[str] = "lossless"
