"""The engine: runs task graphs from a computation queue and a communication queue, driven by dependency counts.

Encodes, decodes and merges run on the engine's thread, lowest priority number first. Sends go to the transport, whose
send queues are the communication queue. Received frames end `recv` tasks. Nothing blocks in a callback.

Guarantees: a frame is matched to exactly one `recv`. Frames that come before their `recv` exists are kept, up to a
limit. The first failure of any kind ends the engine, with one typed error that names rank, tensor and phase; every
later call raises it again.

Source: HiPress (SOSP 2021), section 3.2. Differences: its communication queue is a separate thread. Here it is the
transport's, which saves one thread switch per frame.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from gradwire.core.errors import FrameError, SyncError
from gradwire.core.events import Event, EventStream
from gradwire.net.transport import Callbacks, Transport
from gradwire.sync.engine_errors import closed, located, raised, sent_twice, stalled
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.sync.job import EncodedChunk
from gradwire.wire.frame import HEADER_BYTES, Header

logger = logging.getLogger("gradwire")

_FRAME_GRACE_SECONDS = 1.0
_FUTURE_GRACE_SECONDS = 10.0  # the code behind a future has its own deadline, and knows better which rank is late
_ABORT_SECONDS = 2.0


class ReceivedFrame(NamedTuple):
    """A received frame: the value of a `recv` task."""

    header: Header
    body: np.ndarray


class Engine:
    """Runs graphs until it is closed or fails.

    Args:
        transport: Transport of the frames. The engine starts and closes it.
        admit: Raises `FrameError` for a header that does not fit what the ranks agreed on.
        events: Stream of metrics.
        stall_timeout: Longest time that a live peer may take to send a frame that is waited for.
        on_failure: Called once with the error and the current state, before anyone else is notified. Writes the flight
            recorder's file.
        early_bytes_limit: Most bytes, headers included, of one peer's frames that have no `recv` yet. It applies before
            the transport starts, which may already hold frames of a fast peer.

    Attributes:
        error: The error that ended the engine, or None.
        early_bytes_limit: See above; may be raised later.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        admit: Callable[[Header], None],
        events: EventStream,
        stall_timeout: timedelta,
        on_failure: Callable[[SyncError, dict[str, Any]], None],
        early_bytes_limit: int = 1 << 20,
    ) -> None:
        self.transport = transport
        self.error: SyncError | None = None
        self.early_bytes_limit = early_bytes_limit
        self._admit = admit
        self._events = events
        self._stall_seconds = stall_timeout.total_seconds()
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._ready: list[tuple[int, int, int, Task]] = []
        self._order = itertools.count()
        self._waiting: dict[FrameKey, Task] = {}
        self._early_frames: dict[FrameKey, ReceivedFrame] = {}
        self._awaited: set[Task] = set()  # tasks whose futures are not done
        self._lost_peers: list[int] = []  # peers that left without a closing message
        self._check_at = 0.0  # when to look for stalls next, in seconds of the monotonic clock
        self._early_bytes = [0] * transport.world_size
        self._active: set[TaskGraph] = set()
        self._closing = False
        self._aborting: threading.Thread | None = None
        transport.start(Callbacks(self._check_header, self._on_frame, self.fail, self._is_missed))
        self._thread = threading.Thread(target=self._loop, name="gradwire-engine", daemon=True)
        self._thread.start()

    # -- called by the synchronizer --------------------------------------------------------------------------

    def run(self, graph: TaskGraph) -> None:
        """Start a graph and return at once.

        Raises:
            SyncError: The engine has failed (the same error) or was closed.

        On failure: the graph fails with `error`, which `wait_idle` also raises.
        """
        with self._condition:
            if self.error is None and not self._closing:
                self._start(graph)
                return
        self._raise_if_failed()
        raise closed()

    def _start(self, graph: TaskGraph) -> None:
        """Queue the tasks that can run. Holds the lock."""
        self._active.add(graph)
        now = time.monotonic()
        for task in graph.tasks:
            task.started = now
        ended = [task for task in graph.tasks if task.key is not None and self._claim(task)]
        for task in graph.tasks:
            if task.pending == 0 and task.run is not None:
                self._push(task)
        for task in ended:
            self._end(task)
        for error in map(self.transport.departed, {key.peer for key in self._waiting}):
            if error is not None:
                self.fail(error)
                return
        self._condition.notify_all()

    @property
    def idle(self) -> bool:
        """Whether all graphs have ended without failure."""
        with self._condition:
            return not self._active and self.error is None

    def wait_idle(self) -> None:
        """Block until every graph has ended.

        Raises:
            SyncError: The engine failed, or it was closed before they ended. Raised within the timeouts.
        """
        with self._condition:
            while self._active and self.error is None and not self._closing:
                self._condition.wait()
            abandoned = bool(self._active) and self.error is None
        self._raise_if_failed()
        if abandoned:
            raise closed()

    def _raise_if_failed(self) -> None:
        with self._condition:
            error, aborting = self.error, self._aborting
        if error is not None:
            # The caller may end its process at once. By then, the peers must have been told which rank failed.
            if aborting is not None:
                aborting.join(_ABORT_SECONDS)
            raise error

    def fail(self, error: SyncError) -> None:
        """Fail all graphs and peers with `error`. Only the first call counts."""
        with self._condition:
            if self.error is not None or self._closing:
                return
            self.error = error = located(error, [*self._waiting.values(), *self._awaited])
            reason = str(error)
            tensor, detail = error.tensor or "", {"message": reason}
            self._events.emit(Event("failure", time.monotonic(), tensor=tensor, peer=error.rank, detail=detail))
            try:
                self._on_failure(error, self._state())
            except Exception:
                logger.exception("The flight recorder could not be written.")
            abandoned = list(self._active)
            self._active.clear()
            self._ready.clear()
            self._waiting.clear()
            self._early_frames.clear()
            self._awaited.clear()
            self._condition.notify_all()
            # Not from this thread: it may be the transport's own, which cannot wait for itself.
            self._aborting = threading.Thread(
                target=self._abort, args=(error, reason, abandoned), name="gradwire-abort", daemon=True
            )
            self._aborting.start()

    def _abort(self, error: SyncError, reason: str, abandoned: list[TaskGraph]) -> None:
        self.transport.abort(reason, error.rank)
        for graph in abandoned:
            graph.fail(error)

    def close(self) -> None:
        """End the threads, and fail graphs that still run. Call `wait_idle` first to let them finish. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        if self._aborting is not None:
            self._aborting.join()
        self.transport.close()
        for graph in list(self._active):
            graph.fail(closed())

    # -- received frames, on the transport's thread ----------------------------------------------------------

    def _check_header(self, peer: int, header: Header) -> None:
        self._admit(header)
        early = self._early_bytes[peer] + HEADER_BYTES + header.length
        if early > self.early_bytes_limit:
            raise FrameError(
                f"Rank {peer} is more than a step ahead: it has sent {early} bytes in frames that nothing waits for "
                f"(limit {self.early_bytes_limit}). Submit the same tensors in the same order on every rank."
            )

    def _on_frame(self, peer: int, header: Header, body: np.ndarray) -> None:
        key = FrameKey(peer, header.kind, header.round, header.tensor, header.stage, header.partition)
        frame = ReceivedFrame(header, body)
        with self._condition:
            task = self._waiting.pop(key, None)
            if task is None:
                if key in self._early_frames:
                    self.fail(sent_twice(key))
                    return
                self._early_frames[key] = frame
                self._early_bytes[peer] += HEADER_BYTES + body.nbytes  # an empty body costs memory too
                return
            task.value = frame
            self._record_recv(task)
            self._end(task)
            self._condition.notify_all()

    def _is_missed(self, peer: int, said_goodbye: bool) -> bool:
        """Whether a peer that has left is needed now. If not, the next step that waits for it fails."""
        with self._condition:
            if not said_goodbye:
                self._lost_peers.append(peer)
            # A future may depend on every rank, but the code behind it learns of closing messages itself.
            return any(key.peer == peer for key in self._waiting) or bool(self._lost_peers and self._awaited)

    def _claim(self, task: Task) -> bool:
        """Return whether the frame of a new `recv` task is already here; if not, wait for it. Holds the lock."""
        assert task.key is not None
        frame = self._early_frames.pop(task.key, None)
        if frame is None:
            self._waiting[task.key] = task
            return False
        self._early_bytes[task.key.peer] -= HEADER_BYTES + frame.body.nbytes
        task.value = frame
        self._record_recv(task)
        return True

    def _record_recv(self, task: Task) -> None:
        nbytes = HEADER_BYTES + task.value.header.length if isinstance(task.value, ReceivedFrame) else 0
        self._record(task, "recv", task.started, nbytes)

    def _record(self, task: Task, kind: str, start: float, nbytes: int) -> None:
        graph, duration, detail = task.graph, time.monotonic() - start, {"phase": task.phase}
        self._events.emit(Event(kind, start, duration, graph.name, graph.round, nbytes, task.peer, detail))

    # -- the computation queue, on the engine's thread -------------------------------------------------------

    def _push(self, task: Task) -> None:
        """Queue a task that can run. Holds the lock."""
        # Sends first: they are quick, and the link should never wait for the processor.
        urgency = 0 if task.kind == "send" else 1
        heapq.heappush(self._ready, (urgency, task.graph.priority, next(self._order), task))

    def _end(self, task: Task) -> None:
        """Mark a task as ended, and queue the tasks that waited only for it. Holds the lock."""
        for successor in task.successors:
            successor.pending -= 1
            if successor.pending == 0:
                self._push(successor)
        graph = task.graph
        graph.remaining -= 1
        if graph.remaining == 0:
            self._push(Task("merge", graph, "finish", graph.finish, is_last=True))

    def _loop(self) -> None:
        while True:
            with self._condition:
                while not self._ready:
                    if self._closing:
                        return
                    self._condition.wait(self._seconds_to_check())
                    self._check_stalls()
                task = heapq.heappop(self._ready)[-1]
            self._execute(task)

    def _execute(self, task: Task) -> None:
        graph = task.graph
        assert task.run is not None, f"{task.phase} has nothing to run"
        start = time.monotonic()
        try:
            task.value = task.run()
        except Exception as error:  # the engine's thread must never die silently
            self.fail(raised(error, task))
            return
        if isinstance(task.value, Future):
            self._await_future(task, task.value)
            return
        if task.is_last:
            with self._condition:
                self._active.discard(graph)
                self._condition.notify_all()
            return
        if task.kind != "send":
            self._record(task, task.kind, start, task.value.body.nbytes if isinstance(task.value, EncodedChunk) else 0)
        with self._condition:
            if self.error is None:
                self._end(task)

    # -- futures ---------------------------------------------------------------------------------------------

    def _await_future(self, task: Task, future: Future[Any]) -> None:
        task.started = time.monotonic()
        with self._condition:
            self._awaited.add(task)
            error = self.transport.departed(self._lost_peers[0]) if self._lost_peers else None
            if error is not None:
                self.fail(error)
        future.add_done_callback(lambda done: self._on_future_done(task, done))

    def _on_future_done(self, task: Task, future: Future[Any]) -> None:
        """End a task whose future is done. Runs on any thread."""
        error = future.exception()
        if error is not None:
            self.fail(raised(error, task))
            return
        with self._condition:
            if self.error is not None or self._closing:
                return
            self._awaited.discard(task)
            task.value = future.result()
            self._record_recv(task)
            self._end(task)
            self._condition.notify_all()

    # -- deadlines and messages ------------------------------------------------------------------------------

    def _seconds_to_check(self) -> float | None:
        """Seconds until the next check for stalls; None if nothing is waited for. Holds the lock."""
        return max(0.0, self._check_at - time.monotonic()) if self._waiting or self._awaited else None

    def _check_stalls(self) -> None:
        """Fail if a frame or a future is late. Nearly every frame calls it, so it checks at most once per interval.

        Holds the lock.
        """
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + min(1.0, self._stall_seconds / 4)
        if self._awaited:
            self._check_stall(min(self._awaited, key=lambda task: task.started), _FUTURE_GRACE_SECONDS)
        if not self._waiting:
            return
        # A frame of stage 0 depends on its sender alone, so a missing one proves that the sender is late. A rank that
        # lacks only later stages gives ranks that know more some time to report who is late.
        key, oldest = min(self._waiting.items(), key=lambda item: (item[0].stage, item[1].started))
        self._check_stall(oldest, _FRAME_GRACE_SECONDS if key.stage else 0.0)

    def _check_stall(self, task: Task, grace: float) -> None:
        waited = time.monotonic() - task.started
        if self.error is None and waited > self._stall_seconds + grace:
            self.fail(stalled(task, waited, self._stall_seconds))

    def _state(self) -> dict[str, Any]:
        """Return the state for the flight recorder. Holds the lock."""
        now = time.monotonic()
        waiting = sorted([*self._waiting.values(), *self._awaited], key=lambda task: task.started)
        return {
            "active": sorted(graph.name for graph in self._active),
            "waiting": [
                {"tensor": task.graph.name, "phase": task.phase, "rank": task.peer, "round": task.graph.round,
                 "seconds": now - task.started}
                for task in waiting
            ],
            "sent_bytes": list(self.transport.sent_bytes),
            "received_bytes": list(self.transport.received_bytes),
            "early_bytes": list(self._early_bytes),
        }  # fmt: skip
