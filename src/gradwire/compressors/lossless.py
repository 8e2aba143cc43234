"""Lossless compression: exponents in short codes, signs and mantissas packed tightly, every bit kept.

Exact for every input, including NaN payloads, subnormal numbers and -0. A payload decodes to the bits that `none` would
have sent, and is at most 8 bytes longer. A prefix code, whose table is adapted to each tensor during training, makes
shorter payloads; codes of fixed width are faster.

Body: see `support.float_packing`.

Source: GCOMP (SoCC 2024), sections 4 and 6, without the truncation of section 5, for which see `gcomp`. Differences:
those of `support.float_packing`. The lengths that begin the paper's block (figure 7) are in the frame and in the
kernels' own table of chunks. Codes of fixed width are not the paper's, see `kernels.fixed_format`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.compressors.base.registry import register
from gradwire.compressors.support.float_packing import FloatPacking, Packing
from gradwire.core.context import Context
from gradwire.core.errors import OptionError

CODES = ("prefix", "fixed")


@register
class Lossless(FloatPacking):
    """Exponents in short codes, signs and mantissas packed tightly: exact.

    Args:
        table: Prefix code to begin with, the same on all ranks; see `FloatPacking`. By default a built-in one.
        refresh: Number of steps after which each tensor gets a new code, made from its averaged gradient; 0 for never.
        code: ``"prefix"``, the shortest payloads, or ``"fixed"``, four bits for each exponent, which is faster. A fixed
            code has no table.

    Raises:
        OptionError: There is no such code, or a table for a fixed code.
    """

    name: ClassVar[str] = "lossless"

    def __init__(self, table: str = "", refresh: int = 50, code: str = "prefix") -> None:
        super().__init__(table, refresh)
        if code not in CODES:
            raise OptionError(f'code must be "prefix" or "fixed", not {code!r}.')
        self.exponent_code = code
        if table and self.exponent_code == "fixed":
            raise OptionError('code="fixed" has no table. Leave one of these options out.')

    @property
    def options(self) -> dict[str, Any]:
        """See `Compressor`."""
        return {**super().options, "code": self.exponent_code}

    def packing(self, dtype: torch.dtype, state: np.ndarray | None) -> Packing:
        """See `FloatPacking`."""
        return Packing.fixed() if self.exponent_code == "fixed" else super().packing(dtype, state)

    def next_state(self, source: np.ndarray, ctx: Context) -> np.ndarray | None:
        """Table of the averaged gradient, unless the code is fixed."""
        return None if self.exponent_code == "fixed" else super().next_state(source, ctx)
