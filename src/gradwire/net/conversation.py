"""One end of an established connection, without I/O: the meaning of frames and of the connection's end.

Guarantees: a peer speaks only for itself and its epoch. Control frames are bounded and handled here. Data frames come
out in order. After BYE no frame is accepted. A closed connection is an error unless BYE came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from gradwire.core.errors import FrameError, PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.net.liveness import Liveness
from gradwire.net.stream import FrameReader
from gradwire.wire.frame import DATA_KINDS, FrameKind, Header, Outgoing, describe, prefix_bytes, without_seal
from gradwire.wire.mac import FrameMac

MAX_REASON_BYTES = 1024


@dataclass(frozen=True)
class PeerIds:
    """A rank, its peer, and the epoch of their group."""

    rank: int
    peer: int
    epoch: int


class Conversation:
    """Reads one peer's byte stream and keeps its timers and counters.

    Args:
        ids: This rank and its peer.
        timeout: Longest silence of the peer.
        now: Seconds on the caller's monotonic clock.
        reader: Reader that a handshake has used on the same stream, if any.
        heartbeat: See `Liveness`.
        mac: Key of the tags of the peer's frames; None if they have checksums.

    Attributes:
        received_bytes: Bytes of whole data frames.
        control_bytes: Bytes of whole control frames, both ways.
        departed: Whether the peer has said BYE.
        end: Error for whoever still needs the peer, once it has said BYE or its connection has ended; None until then.
    """

    def __init__(
        self,
        ids: PeerIds,
        timeout: timedelta,
        now: float,
        reader: FrameReader | None = None,
        heartbeat: timedelta | None = None,
        mac: FrameMac | None = None,
    ) -> None:
        self.ids = ids
        self.liveness = Liveness(timeout, now, heartbeat)
        self.received_bytes = 0
        self.control_bytes = 0
        self.departed = False
        self.end: PeerLostError | None = None
        self._timeout = timeout
        self._reader = reader or FrameReader(self._admit)
        self._reader.admit = self._admit
        self._prefix_bytes = prefix_bytes(mac)
        if mac is not None:
            self._reader.expect_tags(mac)
        self._admit_data: Callable[[int, Header], None] = _refuse

    def begin(
        self,
        admit: Callable[[int, Header], None],
        now: float,
        destination: Callable[[int, Header], np.ndarray | None] | None = None,
    ) -> None:
        """Accept the data frames that `admit` allows. The peer's silence counts from now.

        Args:
            admit: Raises `FrameError` for a frame that is refused.
            now: Seconds on the caller's monotonic clock.
            destination: Returns the array that receives the body of a data frame, or None for a new one.
        """
        self._admit_data = admit
        if destination is not None:
            is_data, peer = DATA_KINDS.__contains__, self.ids.peer
            self._reader.destination = lambda header: destination(peer, header) if is_data(header.kind) else None
        self.liveness.heard(now)

    def wanted(self) -> memoryview:
        """Return the buffer for the next received bytes."""
        return self._reader.wanted()

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that the body in progress still lacks."""
        return self._reader.missing_bytes

    def advance(self, num_bytes: int, now: float) -> Iterator[tuple[Header, np.ndarray]]:
        """Process received bytes and yield the data frames that are now complete.

        Raises:
            PeerFailedError: The peer sent ABORT.
            PeerLostError: The peer sent GOAWAY.
            SyncError: The peer sent something else than a frame, or a frame that was refused.
        """
        if num_bytes:
            self.liveness.heard(now)
        try:
            for header, body in self._reader.advance(num_bytes):
                frame_bytes = self._prefix_bytes + len(body)
                if header.kind in DATA_KINDS:
                    self.received_bytes += frame_bytes
                    yield header, body
                else:
                    self.control_bytes += frame_bytes
                    self._handle_control(header, body)
        except FrameError as error:
            raise self.refused(error) from error

    def control(self, kind: FrameKind, reason: str = "", blame: int | None = None) -> Outgoing:
        """Return a control frame to send. ABORT and GOAWAY carry a reason, ABORT also the rank at fault, if another."""
        body = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        header = Header(kind, sender=self.ids.rank, epoch=self.ids.epoch, count=0 if blame is None else blame + 1)
        self.control_bytes += self._prefix_bytes + len(body)
        return Outgoing(header, np.frombuffer(body, np.uint8))

    def refused(self, error: FrameError) -> SyncError:
        """Return the error of a peer that sent a refused frame."""
        return SyncError(
            f"Rank {self.ids.peer} sent a frame that rank {self.ids.rank} refuses: {error}", rank=self.ids.peer
        )

    def lost(self, cause: str) -> PeerLostError | None:
        """Return the error of a connection that ended now for `cause`, or None if the peer had said BYE."""
        if self.departed:
            return None
        where = " in the middle of a frame" if self._reader.in_frame else ""
        self.end = PeerLostError(
            f"The connection to rank {self.ids.peer} has ended without a goodbye: {cause}{where} (at rank "
            f"{self.ids.rank}). The process of rank {self.ids.peer} has ended or lost its network. Look at the log of "
            f"rank {self.ids.peer}.",
            rank=self.ids.peer,
        )
        return self.end

    def silence(self) -> PeerTimeoutError:
        """Return the error of a peer that has been silent for too long."""
        return PeerTimeoutError(
            f"Rank {self.ids.rank} got no sign of life from rank {self.ids.peer} within "
            f"{self._timeout.total_seconds():g} s. Check whether that rank is stopped, swapping or cut off; raise the "
            "timeout if such pauses are normal.",
            rank=self.ids.peer,
        )

    def _admit(self, header: Header) -> None:
        if header.sender != self.ids.peer or header.epoch != self.ids.epoch:
            raise FrameError(
                f"Expected a frame of rank {self.ids.peer} in epoch {self.ids.epoch:#x}, got "
                f"{describe(header)} in epoch {header.epoch:#x}."
            )
        if self.departed:
            raise FrameError(f"Expected nothing after BYE, got {describe(header)}.")
        if header.kind in DATA_KINDS:
            self._admit_data(self.ids.peer, header)
        elif not self._is_control(header):
            raise FrameError(f"There is no such control frame: {describe(header)}, {header.length} bytes.")

    def _is_control(self, header: Header) -> bool:
        blame = header.count if header.kind is FrameKind.ABORT else 0
        plain = Header(header.kind, sender=self.ids.peer, epoch=self.ids.epoch, count=blame)
        return header.length <= _CONTROL_LIMITS.get(header.kind, -1) and without_seal(header) == plain

    def _handle_control(self, header: Header, body: np.ndarray) -> None:
        if header.kind is FrameKind.BYE:
            self.departed = True
            self.end = PeerLostError(
                f"Rank {self.ids.peer} has left the group, but rank {self.ids.rank} still needs it. Run the same "
                f"number of steps on every rank before detach() or the end of the script. If rank {self.ids.peer} "
                "ended early, its log says why.",
                rank=self.ids.peer,
            )
        elif header.kind is FrameKind.ABORT:
            reason = body.tobytes().decode("utf-8", "replace")
            blame = header.count - 1 if 0 < header.count <= 1 << 16 else self.ids.peer
            raise PeerFailedError(f"Rank {self.ids.peer} gave up: {reason}", rank=blame)
        elif header.kind is FrameKind.GOAWAY:
            reason = body.tobytes().decode("utf-8", "replace")
            raise PeerLostError(f"Rank {self.ids.peer} went away: {reason}", rank=self.ids.peer)


_CONTROL_LIMITS = {
    FrameKind.HEARTBEAT: 0,
    FrameKind.BYE: 0,
    FrameKind.ABORT: MAX_REASON_BYTES,
    FrameKind.GOAWAY: MAX_REASON_BYTES,
}


def _refuse(peer: int, header: Header) -> None:
    raise FrameError(f"Expected no data before `start`, got {describe(header)}.")
