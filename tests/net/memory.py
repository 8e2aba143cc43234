"""A network in memory, between ranks that are threads of one process, with switches for faults.

For tests of strategies. It uses the wire format: every frame is packed into bytes and parsed again. Frames arrive in
order, on one thread per rank. Queues are not bounded, and time is not modeled.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.net.conversation import Conversation, PeerIds
from gradwire.net.transport import Callbacks, PeerTransport
from gradwire.wire.frame import FrameKind, Header, seal

from ..wire.golden import whole

logger = logging.getLogger("gradwire")

# The end of a sender's byte stream.
_END = None
_Arrival = tuple[int, "np.ndarray | SyncError | None"]


class MemoryNetwork:
    """The ranks of one group, all in this process.

    Args:
        world_size: Number of ranks.
        timeout: Longest silence of a rank.
        epoch: Epoch of the group.

    Attributes:
        transports: The transport of each rank.
    """

    def __init__(self, world_size: int, *, timeout: timedelta = timedelta(seconds=10), epoch: int = 0x67726164) -> None:
        self.transports = [MemoryTransport(self, rank, world_size, epoch, timeout) for rank in range(world_size)]

    def __enter__(self) -> MemoryNetwork:
        return self

    def __exit__(self, *exception: object) -> None:
        for transport in self.transports:
            transport.thaw()
        for transport in self.transports:
            transport.close()

    def kill(self, rank: int) -> None:
        """End a rank as SIGKILL would: its callbacks are not called any more, and its connections close."""
        self.transports[rank].kill()

    def freeze(self, rank: int) -> None:
        """Pause a rank as SIGSTOP would: frames from it and to it wait."""
        self.transports[rank].freeze()

    def thaw(self, rank: int) -> None:
        """Resume a frozen rank, as SIGCONT would."""
        self.transports[rank].thaw()


class MemoryTransport(PeerTransport):
    """One rank of a `MemoryNetwork`, which makes it."""

    def __init__(self, network: MemoryNetwork, rank: int, world_size: int, epoch: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch
        self.sent_bytes = [0] * world_size
        self._network = network
        self._inbox: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        now = time.monotonic()
        self._conversations = {
            peer: Conversation(PeerIds(rank, peer, epoch), timeout, now) for peer in range(world_size) if peer != rank
        }
        self._callbacks: Callbacks | None = None
        self._thread: threading.Thread | None = None
        self._running = threading.Event()  # cleared while frozen
        self._running.set()
        self._lock = threading.Lock()  # orders what goes out, and the end
        self._ended = False
        self._killed = False

    def start(self, callbacks: Callbacks) -> None:
        """Begin to deliver, from a thread of this rank."""
        assert self._thread is None, "start is called once"
        self._callbacks = callbacks
        for conversation in self._conversations.values():
            conversation.begin(callbacks.admit, time.monotonic(), callbacks.destination)
        self._thread = threading.Thread(target=self._run, name=f"gradwire-memory-{self.rank}", daemon=True)
        self._thread.start()

    def send(self, peer: int, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        """Queue one frame for `peer`. The body is copied here, as a network would."""
        self._check_outgoing(peer, header)
        frame = np.concatenate([np.frombuffer(seal(header, body), dtype=np.uint8), body])
        gone = self.departed(peer)
        if gone is not None:
            self._inbox.put((peer, gone))
            return
        with self._lock:
            self.sent_bytes[peer] += frame.nbytes
            self._put(peer, frame)
        if on_sent is not None:
            on_sent()

    def abort(self, reason: str, blame: int | None = None) -> None:
        """Tell every peer why this rank gives up, then close."""
        self._end(FrameKind.ABORT, reason, blame)
        self._join()

    def close(self) -> None:
        """Say goodbye to every peer and end the thread."""
        self._end(FrameKind.BYE)
        self._join()

    def kill(self) -> None:
        """See `MemoryNetwork.kill`."""
        self._killed = True
        self._running.set()
        self._end(None)

    def freeze(self) -> None:
        """See `MemoryNetwork.freeze`."""
        self._running.clear()

    def thaw(self) -> None:
        """See `MemoryNetwork.thaw`."""
        self._running.set()

    def _put(self, peer: int, frame: np.ndarray) -> None:
        self._running.wait()
        if not self._ended and not self._killed:
            self._network.transports[peer]._inbox.put((self.rank, frame))
            self._conversations[peer].liveness.sent(time.monotonic())

    def _end(self, kind: FrameKind | None, reason: str = "", blame: int | None = None) -> None:
        with self._lock:
            if self._ended:
                return
            for peer, conversation in self._conversations.items():
                if kind is not None:
                    frame = conversation.control(kind, reason, blame)
                    self._put(peer, np.frombuffer(whole(frame), dtype=np.uint8))
                self._network.transports[peer]._inbox.put((self.rank, _END))
            self._ended = True
        self._inbox.put((self.rank, _END))  # wakes this rank's own thread

    def _join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        assert self._callbacks is not None
        try:
            while self._step():
                pass
        except SyncError as error:
            self._fail(error)
        except Exception as error:  # a callback raised: the step cannot end well any more
            self._fail(SyncError(f"A callback of the transport raised {error!r}."))

    def _fail(self, error: SyncError) -> None:
        assert self._callbacks is not None
        if self._ended:
            return
        try:
            self._callbacks.fail(error)
        except Exception:  # the peers must still be told
            logger.exception("The fail callback of a transport raised on %s", error)
        self._end(FrameKind.ABORT, str(error), error.rank)

    def _step(self) -> bool:
        """Handle one arrival or run the timers. Return False once this rank has ended."""
        looked_at = time.monotonic()
        deadline = min((c.liveness.next_deadline() for c in self._open()), default=looked_at + 1)
        try:
            sender, frame = self._inbox.get(timeout=max(0.0, deadline - looked_at))
        except queue.Empty:
            self._running.wait()
            self._run_timers(looked_at)
            return not self._ended
        self._running.wait()
        if self._ended:
            return False
        if isinstance(frame, SyncError):
            raise frame
        self._take(sender, frame)
        return True

    def _take(self, sender: int, frame: np.ndarray | None) -> None:
        assert self._callbacks is not None
        conversation = self._conversations[sender]
        if frame is None:
            if conversation.lost("the peer closed it") is None:
                return
        else:
            for header, body in _feed(conversation, frame):
                if self._ended:
                    return
                self._callbacks.deliver(sender, header, body)
        if conversation.end is not None:
            self._callbacks.check_end(conversation)

    def _run_timers(self, looked_at: float) -> None:
        for peer, conversation in self._conversations.items():
            if conversation.end is not None:
                continue
            if conversation.liveness.silent(looked_at):
                raise conversation.silence()
            if conversation.liveness.heartbeat_due(looked_at):
                frame = np.frombuffer(whole(conversation.control(FrameKind.HEARTBEAT)), dtype=np.uint8)
                with self._lock:
                    self._put(peer, frame)

    def _open(self) -> list[Conversation]:
        return [conversation for conversation in self._conversations.values() if conversation.end is None]


def _feed(conversation: Conversation, frame: np.ndarray) -> Iterator[tuple[Header, np.ndarray]]:
    """Pass received bytes to a conversation, as many at a time as it wants, and yield its data frames."""
    at = 0
    while at < frame.nbytes:
        buffer = conversation.wanted()
        taken = min(len(buffer), frame.nbytes - at)
        buffer[:taken] = frame.data[at : at + taken]
        at += taken
        yield from conversation.advance(taken, time.monotonic())
