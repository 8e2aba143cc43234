"""Tags of frames, so that nobody but the holders of a connection's keys can change, repeat, reorder or drop them.

An authenticated frame has version 2: its header has no checksum, and a tag of 16 bytes follows the header. The tag
covers the number of the frame in its direction of the connection, the header with the length, and the body. The number
is not sent. Each direction has a key of its own, so that a frame that is sent back to its sender is refused, too.

Guarantees: compared in constant time. The key is in no repr and no pickle. Does not encrypt.

Source: HMAC-SHA256 (RFC 2104), truncated to 16 bytes. Differences: not keyed BLAKE2b, since common CPUs have
instructions for SHA-256, and Python's BLAKE2b is an eighth as fast there.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn

import numpy as np

TAG_BYTES = 16
_NUMBER_BYTES = 8


class FrameMac:
    """The key of one direction of one connection.

    Args:
        key: 32 bytes that both ends have derived, for this direction only.
    """

    __slots__ = ("_hmac",)

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)

    def tag(self, number: int, header: bytes, body: np.ndarray) -> bytes:
        """Return the 16 bytes for a frame.

        Args:
            number: Frames sent before in this direction.
            header: The 72 bytes of the header.
            body: Contiguous uint8 array.
        """
        mac = self._hmac.copy()
        mac.update(number.to_bytes(_NUMBER_BYTES, "little") + header)
        mac.update(body.data)  # without Python's lock, if it is long
        return mac.digest()[:TAG_BYTES]

    def matches(self, tag: bytes, number: int, header: bytes, body: np.ndarray) -> bool:
        """Whether a received tag is that of the frame."""
        return hmac.compare_digest(tag, self.tag(number, header, body))

    def __repr__(self) -> str:
        return "FrameMac(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("The key of a connection is not pickled: the pickle would end up unprotected.")
