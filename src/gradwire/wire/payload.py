"""The payload: one encoded tensor or range, without a frame header."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwire.wire.frame import HEADER_BYTES, FrameFlags

_FLAGS = {
    (nonfinite, used): FrameFlags.PRESENT | FrameFlags.USED * used | FrameFlags.NONFINITE * nonfinite
    for nonfinite in (False, True)
    for used in (False, True)
}
_NONFINITE, _USED = int(FrameFlags.NONFINITE), int(FrameFlags.USED)


@dataclass(frozen=True, eq=False)
class Payload:
    """Encoded bytes, made here or received.

    Attributes:
        body: 1-D uint8 array.
        nonfinite: Whether the gradient held a NaN or an infinity. Travels as a flag of the frame.
        used: Whether the sender's backward pass used the parameter. If not, there is no body. Travels as a flag.
        sender: Rank that sent it; None if it was made here.
    """

    body: np.ndarray
    nonfinite: bool = False
    used: bool = True
    sender: int | None = None

    @classmethod
    def received(cls, body: np.ndarray, flags: FrameFlags, sender: int) -> Payload:
        """Return the payload of a frame."""
        bits = int(flags)
        return cls(body, bits & _NONFINITE != 0, bits & _USED != 0, sender)

    @property
    def nbytes(self) -> int:
        """Exact bytes on the wire: header and body."""
        return HEADER_BYTES + self.body.nbytes

    @property
    def flags(self) -> FrameFlags:
        """Flags of its frame."""
        return _FLAGS[self.nonfinite, self.used]
