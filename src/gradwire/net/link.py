"""One established TCP connection to one peer, non-blocking: a queue of outgoing frames, and a conversation.

Guarantees: bodies are not copied, except for up to 64 KiB of incoming ones. One system call serves many small frames. A
failed write closes only this direction: the peer's last frames, especially the reason of its end, are still read.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from gradwire.net.conversation import Conversation
from gradwire.net.tls import AnySocket, TlsSocket
from gradwire.wire.frame import Header, Outgoing, prefix_bytes
from gradwire.wire.mac import FrameMac

# More buffers per call gain nothing measurable on loopback. The kernel's own limit is 1024.
BUFFERS_PER_CALL = 64
# So that one busy peer does not starve the others of the thread.
CALLS_PER_TURN = 16
DISCARD_BYTES = 1 << 16
# The reader of a long body wakes up when this many bytes have arrived. On a slow link, every packet would wake it.
LOW_WATER_BYTES = 1 << 15
# Linux's SIOCOUTQNSD: bytes that TCP has not sent yet.
_UNSENT_BYTES = 0x894B
# tcpi_min_rtt and tcpi_busy_time of Linux's struct tcp_info (since 4.10), in microseconds.
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_MIN_RTT, _MIN_RTT_END = 148, 152
_NO_RTT = (1 << 32) - 1
_BUSY_TIME, _BUSY_TIME_END = 168, 176


class Link:
    """The connection to one peer.

    Other threads may call `enqueue` and `flush` under the owner's lock. Everything else belongs to the loop's thread.

    Args:
        sock: Connected, non-blocking socket.
        conversation: State of the frames on it.
        mac: Key of the tags of outgoing frames; None if they have checksums.

    Attributes:
        open: Whether the socket is open.
        writable: Whether frames can still be sent.
        paused: Whether reading is suspended.
        blocked: Whether the kernel holds so much that more must wait.
        watched: Events that the owner's selector looks for.
        taken_bytes: Bytes that the kernel has taken so far.
    """

    def __init__(self, sock: AnySocket, conversation: Conversation, mac: FrameMac | None = None) -> None:
        self.socket = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self.conversation = conversation
        self.open = True
        self.writable = True
        self.paused = False
        self.blocked = False
        self.watched = 0
        self.taken_bytes = 0
        self._unsent_limit: int | None = None
        self._busy_seconds = 0.0  # as last seen
        self._low_water = 1
        self._mac = mac
        self._num_enqueued = 0
        self._queue: deque[Outgoing] = deque()
        # Buffers of frames taken from the queue, each with whether a frame starts there, and what to call at its end.
        self._outgoing: deque[tuple[memoryview, bool, Callable[[], None] | None]] = deque()
        self._sent_calls: list[Callable[[], None]] = []

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.conversation.ids.peer

    def enqueue(self, frame: Outgoing) -> None:
        """Queue one frame, or drop it if the connection has failed."""
        if self.writable:
            if self._mac is not None:
                frame.protect(self._mac, self._num_enqueued)
            self._num_enqueued += 1
            self._queue.append(frame)

    def seal(self) -> None:
        """Seal frames that are about to be sent. Needs no lock, so that other threads can enqueue."""
        for frame in list(self._queue)[: BUFFERS_PER_CALL // 2]:
            frame.seal()

    def limit_unsent(self, nbytes: int) -> None:
        """Count as `blocked` while the kernel holds this many bytes that TCP has not sent. Linux only."""
        self._unsent_limit = nbytes
        # The kernel reports the socket as writable below half of it.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 2 * nbytes)

    def frame_bytes(self, body_bytes: int) -> int:
        """Bytes of a frame on this connection."""
        return prefix_bytes(self._mac) + body_bytes

    @property
    def pending(self) -> bool:
        """Whether there is something to send."""
        return self.writable and bool(self._queue or self._outgoing or (self._tls is not None and self._tls.unsent))

    @property
    def buffered(self) -> bool:
        """Whether there may be received bytes for which no selector wakes up."""
        return self.open and not self.paused and self._tls is not None and self._tls.buffered

    @property
    def pending_frames(self) -> int:
        """Number of frames that have not been sent completely."""
        begun = bool(self._outgoing) and not self._outgoing[0][1]
        return len(self._queue) + begun + sum(starts for _, starts, _ in self._outgoing)

    def busy_seconds(self) -> float:
        """Return how long bytes have been unacknowledged so far, also after the end. 0 except on Linux."""
        with contextlib.suppress(OSError):  # closed, or not Linux
            info = self.socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BUSY_TIME_END)
            if len(info) == _BUSY_TIME_END:
                self._busy_seconds = int.from_bytes(info[_BUSY_TIME:], sys.byteorder) / 1e6
        return self._busy_seconds

    def round_trip_seconds(self) -> float:
        """Return the shortest round trip that the kernel has seen on this connection; 0 if unknown."""
        with contextlib.suppress(OSError):  # closed, or not Linux
            info = self.socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _MIN_RTT_END)
            if len(info) == _MIN_RTT_END:
                micros = int.from_bytes(info[_MIN_RTT:], sys.byteorder)
                return micros / 1e6 if micros < _NO_RTT else 0.0
        return 0.0

    def undelivered_bytes(self) -> int:
        """Return the number of sent bytes that the peer's kernel has not acknowledged, or 0 if unknown."""
        with contextlib.suppress(OSError, ValueError):  # not Linux, or closed
            return int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return 0

    def flush(self, now: float) -> None:
        """Send what the kernel takes, up to a limit per turn."""
        for _ in range(CALLS_PER_TURN):
            if not self.pending:
                break
            self._fill()
            try:
                count = self.socket.sendmsg([view for view, *_ in islice(self._outgoing, BUFFERS_PER_CALL)])
            except BlockingIOError:
                self.blocked = True
                return
            except OSError:
                self.stop_sending()
                return
            self.conversation.liveness.sent(now)
            self._sent(count)
        if self._unsent_limit is not None and not self.pending:
            self.blocked = self.writable and self._unsent_bytes() >= self._unsent_limit

    def take_sent(self) -> list[Callable[[], None]]:
        """Return what to call for frames that the kernel has taken since the last time. Call it without the lock."""
        calls, self._sent_calls = self._sent_calls, []
        return calls

    def receive(self, now: float) -> Iterator[tuple[Header, np.ndarray]]:
        """Read what has arrived and yield its data frames.

        Raises:
            SyncError: The connection ended, the peer gave up, or it sent a refused frame.
        """
        for _ in range(CALLS_PER_TURN):
            room = self.conversation.wanted()
            try:
                count = self.socket.recv_into(room)
            except BlockingIOError:
                return
            except OSError as error:
                self._ended(f"{error.strerror or error}")
                return
            if count == 0:
                self._ended("the peer closed it")
                return
            yield from self.conversation.advance(count, now)
            if count < len(room) or self.conversation.departed or self.paused:
                return

    def wait_for_much(self, much: bool = True) -> None:
        """Have selectors report the socket only when much of a long body has arrived. If not `much`, any byte."""
        # Under TLS, part of the body may be buffered already: the kernel would wait for bytes that have come.
        low_water = (
            LOW_WATER_BYTES if much and self._tls is None and self.conversation.missing_bytes >= LOW_WATER_BYTES else 1
        )
        if low_water != self._low_water and self.open:
            self._low_water = low_water
            with contextlib.suppress(OSError):  # then each packet wakes the reader
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def leftover(self, now: float) -> Iterator[tuple[Header, np.ndarray]]:
        """Yield the data frames that came together with the handshake."""
        yield from self.conversation.advance(0, now)

    def depart(self) -> None:
        """Close after the peer is gone, under the owner's lock.

        Raises:
            PeerLostError: The peer has not waited for all frames.
        """
        unsent, error = self.pending_frames, self.conversation.end
        assert error is not None, "the peer is gone"
        self.close()
        if unsent:
            raise error

    def discard(self) -> bool:
        """Read and drop what has arrived. Return False at the end of the connection."""
        try:
            return bool(self.socket.recv(DISCARD_BYTES))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def drop_unsent(self) -> None:
        """Forget the frames of which no byte has been sent, so that a closing message gets through."""
        # The next frame takes the number of the first of these: no receiver has seen it.
        self._num_enqueued -= len(self._queue) + sum(starts for _, starts, _ in self._outgoing)
        self._queue.clear()
        kept: deque[tuple[memoryview, bool, Callable[[], None] | None]] = deque()
        while self._outgoing and not self._outgoing[0][1]:
            kept.append(self._outgoing.popleft())
        self._outgoing = kept

    def stop_sending(self) -> None:
        """Stop sending."""
        self.writable = self.blocked = False
        self._queue.clear()
        self._outgoing.clear()

    def finish_sending(self) -> None:
        """Close the sending direction, and go on reading."""
        self.stop_sending()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.busy_seconds()  # kept
        self.open = False
        self.stop_sending()
        self.socket.close()

    def _unsent_bytes(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.socket, _UNSENT_BYTES, bytes(4)), sys.byteorder)

    def _fill(self) -> None:
        while self._queue and len(self._outgoing) < BUFFERS_PER_CALL:
            frame = self._queue.popleft()
            has_body = frame.body.nbytes > 0
            self._outgoing.append((memoryview(frame.seal()), True, None if has_body else frame.on_sent))
            if has_body:
                self._outgoing.append((frame.body.data, False, frame.on_sent))

    def _sent(self, count: int) -> None:
        self.taken_bytes += count
        while count:
            view, _, on_sent = self._outgoing.popleft()
            if count < len(view):
                self._outgoing.appendleft((view[count:], False, on_sent))
                return
            count -= len(view)
            if on_sent is not None:
                self._sent_calls.append(on_sent)

    def _ended(self, cause: str) -> None:
        error = self.conversation.lost(cause)
        if error is not None:
            raise error  # still open: a peer that has only half closed can be told
        self.close()
