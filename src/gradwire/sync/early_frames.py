"""Frames that come before their run has begun: they are kept, up to a limit for each rank."""

from __future__ import annotations

from gradwire.core.errors import FrameError
from gradwire.sync.operations import FrameKey
from gradwire.wire.frame import HEADER_BYTES, Header
from gradwire.wire.payload import Payload


class EarlyFrames:
    """Frames that nothing waits for yet, by round.

    Args:
        world_size: Number of ranks.
        limit: Most bytes, headers included, of one rank's frames.

    Attributes:
        limit: See above; may be raised later.
        nbytes: Bytes that are kept of each rank.
    """

    def __init__(self, world_size: int, limit: int) -> None:
        self.limit = limit
        self.nbytes = [0] * world_size
        self._frames: dict[int, dict[FrameKey, Payload]] = {}

    def check(self, peer: int, header: Header) -> None:
        """Check that a frame could be kept.

        Raises:
            FrameError: It could not.
        """
        total = self.nbytes[peer] + HEADER_BYTES + header.length
        if total > self.limit:
            raise FrameError(
                f"Rank {peer} is more than a step ahead: it has sent {total} bytes in frames that nothing waits for "
                f"(limit {self.limit}). Submit the same tensors in the same order on every rank."
            )

    def keep(self, round: int, key: FrameKey, payload: Payload) -> bool:
        """Keep a frame. Returns False, and does nothing, if it has come before."""
        frames = self._frames.setdefault(round, {})
        if key in frames:
            return False
        frames[key] = payload
        self.nbytes[key.peer] += _nbytes(payload)
        return True

    def take(self, round: int) -> dict[FrameKey, Payload]:
        """Return the frames of a round, and keep them no longer."""
        frames = self._frames.pop(round, {})
        for key, payload in frames.items():
            self.nbytes[key.peer] -= _nbytes(payload)
        return frames

    def clear(self) -> None:
        """Drop all frames."""
        self._frames.clear()


def _nbytes(payload: Payload) -> int:
    return HEADER_BYTES + payload.body.nbytes  # an empty body costs memory too
