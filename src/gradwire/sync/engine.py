"""The engine: runs task graphs from a computation queue and a communication queue, driven by dependency counts.

Encodes, decodes and merges run on the engine's own thread, lowest priority number first. Sends go straight to the
transport, whose send queues are the communication queue; arrivals end `recv` tasks. Nothing blocks in a callback.

Guarantees: a frame is matched to exactly one `recv`; frames that come before their `recv` exists are kept within a
bound; the first failure of any kind ends the engine once, with one typed error that names rank, tensor and phase, and
that every later call raises again.

Source: HiPress (SOSP 2021), section 3.2. Differences: its communication queue is a thread of its own; here it is the
transport's, which spares a hand-over between threads a frame.
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
from gradwire.sync.failure import closed, located, raised, stalled
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.sync.job import EncodedChunk
from gradwire.wire.frame import HEADER_BYTES, Header

logger = logging.getLogger("gradwire")

_GRACE_SECONDS = 1.0
_ANSWER_GRACE_SECONDS = 10.0  # for whoever is asked, who has a deadline, too, and knows better who is late
_FAREWELL_SECONDS = 2.0
FINISH = "finish"  # phase of the last task of every graph, which the engine adds itself


class ReceivedFrame(NamedTuple):
    """A frame, as a `recv` task's value."""

    header: Header
    body: np.ndarray


class Engine:
    """Runs graphs until it is closed or fails.

    Args:
        transport: carries the frames; the engine starts it, and closes it at the end.
        admit: refuses (by `FrameError`) a header that does not fit what this job agreed on.
        events: where the metrics go.
        stall_timeout: how long a live peer may take to send a frame that is waited for.
        on_failure: called once with the error and the state of the moment, before anybody else learns of it: writes
            the flight recorder's file.
        early_bytes_limit: most bytes a peer may have in frames that came before their `recv`, headers included. In
            force before the transport starts, since a quick peer's first frames may be waiting in it.

    Attributes:
        error: what ended the engine, or None.
        early_bytes_limit: see above; may be raised later.
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
        self._early: dict[FrameKey, ReceivedFrame] = {}
        self._asked: set[Task] = set()  # whose futures are not done
        self._lost: list[int] = []  # peers that are gone without a goodbye
        self._early_bytes = [0] * transport.world_size
        self._active: set[TaskGraph] = set()
        self._closing = False
        self._aborting: threading.Thread | None = None
        transport.start(Callbacks(self._check, self._arrive, self.fail, self._needs))
        self._thread = threading.Thread(target=self._loop, name="gradwire-engine", daemon=True)
        self._thread.start()

    # -- called by the synchronizer --------------------------------------------------------------------------

    def run(self, graph: TaskGraph) -> None:
        """Start a graph and return at once.

        Raises:
            SyncError: the engine has failed before; the same error as then. Or it has been closed.

        On failure: the graph fails with `error`, which `wait_idle` raises, too.
        """
        with self._condition:
            if self.error is None and not self._closing:
                self._start(graph)
                return
        self._raise_if_failed()
        raise closed()

    def _start(self, graph: TaskGraph) -> None:
        """Make ready what can run. Holds the lock."""
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
        """Whether every graph has ended, and none has failed."""
        with self._condition:
            return not self._active and self.error is None

    def wait_idle(self) -> None:
        """Block until every graph has ended.

        Raises:
            SyncError: the engine failed, never later than the deadlines allow; or it was closed before they ended.
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
            # The caller may end its process at once; the peers must have heard by then whose fault it is.
            if aborting is not None:
                aborting.join(_FAREWELL_SECONDS)
            raise error

    def fail(self, error: SyncError) -> None:
        """End everything with `error`. Only the first call counts."""
        with self._condition:
            if self.error is not None or self._closing:
                return
            self.error = error = located(error, [*self._waiting.values(), *self._asked])
            reason = str(error)
            self._events.emit(
                Event(
                    "failure",
                    time.monotonic(),
                    tensor=error.tensor or "",
                    peer=error.rank,
                    detail={"message": str(error)},
                )
            )
            try:
                self._on_failure(error, self._state())
            except Exception:
                logger.exception("The flight recorder could not be written.")
            abandoned = list(self._active)
            self._active.clear()
            self._ready.clear()
            self._waiting.clear()
            self._early.clear()
            self._asked.clear()
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
        """End the threads. Graphs still running are abandoned; `wait_idle` first for good order. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        if self._aborting is not None:
            self._aborting.join()
        self.transport.close()
        for graph in list(self._active):
            graph.fail(closed())

    # -- arrivals, on the transport's thread -----------------------------------------------------------------

    def _check(self, peer: int, header: Header) -> None:
        self._admit(header)
        early = self._early_bytes[peer] + HEADER_BYTES + header.length
        if early > self.early_bytes_limit:
            raise FrameError(
                f"Expected rank {peer} to be at most a step ahead, got {early} bytes of frames that nothing waits for "
                f"(limit {self.early_bytes_limit}). Do: submit the same tensors in the same order on every rank."
            )

    def _arrive(self, peer: int, header: Header, body: np.ndarray) -> None:
        key = FrameKey(peer, header.kind, header.round, header.tensor, header.stage, header.partition)
        arrival = ReceivedFrame(header, body)
        with self._condition:
            task = self._waiting.pop(key, None)
            if task is None:
                if key in self._early:
                    self.fail(SyncError(f"Expected each frame once, got {key} again.", rank=peer, phase="recv"))
                    return
                self._early[key] = arrival
                self._early_bytes[peer] += HEADER_BYTES + body.nbytes  # an empty body costs memory too
                return
            task.value = arrival
            self._record_arrival(task)
            self._end(task)
            self._condition.notify_all()

    def _needs(self, peer: int, said_goodbye: bool) -> bool:
        """Whether a peer that is gone is missed now; if not, the next step that waits for it fails."""
        with self._condition:
            if not said_goodbye:
                self._lost.append(peer)
            # An answer may depend on every rank. Of goodbyes the one who answers hears, too.
            return any(key.peer == peer for key in self._waiting) or bool(self._lost and self._asked)

    def _claim(self, task: Task) -> bool:
        """Give a new `recv` task its frame if that is here already, else wait for it."""
        assert task.key is not None
        arrival = self._early.pop(task.key, None)
        if arrival is None:
            self._waiting[task.key] = task
            return False
        self._early_bytes[task.key.peer] -= HEADER_BYTES + arrival.body.nbytes
        task.value = arrival
        self._record_arrival(task)
        return True

    def _record_arrival(self, task: Task) -> None:
        now = time.monotonic()
        nbytes = HEADER_BYTES + task.value.header.length if isinstance(task.value, ReceivedFrame) else 0
        graph = task.graph
        self._events.emit(
            Event(
                "recv",
                task.started,
                now - task.started,
                graph.name,
                graph.round,
                nbytes,
                task.peer,
                {"phase": task.phase},
            )
        )

    # -- the computation queue, on the engine's thread -------------------------------------------------------

    def _push(self, task: Task) -> None:
        # Sends first: they only hand bytes on, and the link should never wait for the processor.
        urgency = 0 if task.kind == "send" else 1
        heapq.heappush(self._ready, (urgency, task.graph.priority, next(self._order), task))

    def _end(self, task: Task) -> None:
        """Mark a task as ended and make ready what waited only for it. Holds the lock."""
        for successor in task.successors:
            successor.pending -= 1
            if successor.pending == 0:
                self._push(successor)
        graph = task.graph
        graph.remaining -= 1
        if graph.remaining == 0:
            self._push(Task("merge", graph, FINISH, graph.finish))

    def _loop(self) -> None:
        while True:
            with self._condition:
                while not self._ready:
                    if self._closing:
                        return
                    self._condition.wait(self._next_check())
                    self._check_stalls()
                task = heapq.heappop(self._ready)[-1]
            self._execute(task)

    def _execute(self, task: Task) -> None:
        graph = task.graph
        assert task.run is not None, f"{task.phase} has nothing to run"
        start = time.monotonic()
        try:
            task.value = task.run()
        except Exception as error:  # the engine's thread must never die in silence
            self.fail(raised(error, task))
            return
        if isinstance(task.value, Future):
            self._wait_for(task, task.value)
            return
        if task.phase is FINISH:
            with self._condition:
                self._active.discard(graph)
                self._condition.notify_all()
            return
        if task.kind != "send":
            self._events.emit(
                Event(
                    task.kind,
                    start,
                    time.monotonic() - start,
                    graph.name,
                    graph.round,
                    task.value.body.nbytes if isinstance(task.value, EncodedChunk) else 0,
                    detail={"phase": task.phase},
                )
            )
        with self._condition:
            if self.error is None:
                self._end(task)

    # -- futures ---------------------------------------------------------------------------------------------

    def _wait_for(self, task: Task, future: Future[Any]) -> None:
        task.started = time.monotonic()
        with self._condition:
            self._asked.add(task)
            error = self.transport.departed(self._lost[0]) if self._lost else None
            if error is not None:
                self.fail(error)
        future.add_done_callback(lambda done: self._land(task, done))

    def _land(self, task: Task, future: Future[Any]) -> None:
        """End a task whose future is done; on any thread."""
        error = future.exception()
        if error is not None:
            self.fail(raised(error, task))
            return
        with self._condition:
            if self.error is not None or self._closing:
                return
            self._asked.discard(task)
            task.value = future.result()
            self._record_arrival(task)
            self._end(task)
            self._condition.notify_all()

    # -- deadlines and messages ------------------------------------------------------------------------------

    def _next_check(self) -> float | None:
        return min(1.0, self._stall_seconds / 4) if self._waiting or self._asked else None

    def _check_stalls(self) -> None:
        if self._asked:
            self._check_stall(min(self._asked, key=lambda task: task.started), _ANSWER_GRACE_SECONDS)
        if not self._waiting:
            return
        # A frame of stage 0 depends on its sender alone, so its absence is evidence. Who lacks only later stages gives
        # a better informed rank time to say whose fault it is.
        key, oldest = min(self._waiting.items(), key=lambda item: (item[0].stage, item[1].started))
        self._check_stall(oldest, _GRACE_SECONDS if key.stage else 0.0)

    def _check_stall(self, task: Task, grace: float) -> None:
        waited = time.monotonic() - task.started
        if self.error is None and waited > self._stall_seconds + grace:
            self.fail(stalled(task, waited, self._stall_seconds))

    def _state(self) -> dict[str, Any]:
        """What the flight recorder wants to know."""
        now = time.monotonic()
        waiting = sorted([*self._waiting.values(), *self._asked], key=lambda task: task.started)
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
