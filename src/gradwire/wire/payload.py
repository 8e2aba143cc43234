"""The payload: the bytes of one encoded tensor or range, without a frame header."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwire.wire.frame import HEADER_BYTES


@dataclass(frozen=True, eq=False)
class Payload:
    """Encoded bytes.

    Attributes:
        body: 1-D uint8 array.
        nonfinite: Whether the gradient held a NaN or an infinity. Travels as a flag of the frame.
    """

    body: np.ndarray
    nonfinite: bool = False

    @property
    def nbytes(self) -> int:
        """Exact bytes on the wire: header and body."""
        return HEADER_BYTES + self.body.nbytes
