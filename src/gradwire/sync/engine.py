"""The engine: runs operations from a computation queue and a communication queue, driven by dependency counts.

Encodes, decodes and merges run on the engine's threads, lowest priority number first. Kernels release the interpreter's
lock, so that chunks are encoded side by side. Sends go to the transport, whose send queues are the communication queue
and whose thread computes checksums of large frames and copies them to the kernel. Received frames end `recv`
operations. Nothing blocks in a callback.

Guarantees: a frame is matched to exactly one `recv`. Frames that come before their run has begun are kept, up to a
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
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from gradwire.compressors.base.registry import DENSE_NAME, code
from gradwire.core import threads as core_threads
from gradwire.core.buffers import MIN_BYTES
from gradwire.core.errors import SyncError
from gradwire.core.events import Event, EventStream
from gradwire.kernels.cpu.parallel import num_cores, one_thread
from gradwire.net.forks import ProcessBound
from gradwire.net.transport import Callbacks, Transport
from gradwire.sync.abort import Abort
from gradwire.sync.early_frames import EarlyFrames
from gradwire.sync.engine_errors import Waiting, closed, forked, located, raised, sent_twice, stuck, unasked
from gradwire.sync.operations import FrameKey, Op
from gradwire.sync.run import Run
from gradwire.sync.waits import FINISH, FUTURE_GRACE_SECONDS, LOAD, Waits, lacks, op_of
from gradwire.wire.frame import Header
from gradwire.wire.payload import Payload

logger = logging.getLogger("gradwire")

_LOOK_SECONDS = 1.0  # how often a thread that waits for all runs looks for what nobody else could tell it


def default_threads() -> int:
    """Number of computation threads: this rank's share of the cores, without one for the model; at least 1."""
    return max(1, num_cores() - 1)


class Engine(ProcessBound):
    """Runs operations until it is closed or fails.

    Args:
        transport: Transport of the frames. The engine starts and closes it.
        admit: Raises `FrameError` for a header that does not fit what the ranks agreed on.
        events: Stream of metrics.
        stall_timeout: Longest time that a live peer may take to send a frame that is waited for.
        on_failure: Called once, on a thread of its own, with the error and the state at that moment. Writes the flight
            recorder's file. Nobody waits for it longer than two seconds.
        early_bytes_limit: Most bytes, headers included, of one peer's frames that no run waits for yet. It applies
            before the transport starts, which may already hold frames of a fast peer.
        threads: Number of computation threads; None means `default_threads`.

    Attributes:
        error: The error that ended the engine, or None.
        early_frames: Frames that came before their run has begun.
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
        threads: int | None = None,
    ) -> None:
        self.transport = transport
        self.error: SyncError | None = None
        self.early_frames = EarlyFrames(transport.world_size, early_bytes_limit)
        self._admit = admit
        self._events = events
        self._stall_seconds = stall_timeout.total_seconds()
        self._dense = code(DENSE_NAME)
        self._make_lock()
        self._ready: list[tuple[int, int, int, Run, int]] = []
        self._order = itertools.count()
        self._active: set[Run] = set()
        self._waits = Waits(self._stall_seconds)
        self._lost_peers: list[int] = []  # peers that left without a closing message
        self._closing = False
        self._abort = Abort(transport, events, on_failure)
        callbacks = Callbacks(self._check_header, self._on_frame, self.fail, self._is_missed, self._destination)
        transport.start(callbacks)
        self._threads = [
            core_threads.make(f"gradwire-engine-{index}", self._loop, self.fail)
            for index in range(default_threads() if threads is None else threads)
        ]
        for thread in self._threads:
            thread.start()
        self._bind()

    def _make_lock(self) -> None:
        lock = threading.RLock()
        self._work = threading.Condition(lock)  # operations can run, or the engine ends
        self._ended = threading.Condition(lock)  # a run has ended, or the engine

    def _release(self) -> None:
        self._make_lock()
        self.error = forked()

    # -- called by the synchronizer --------------------------------------------------------------------------

    def run(self, run: Run, loading: Future[None] | None = None) -> None:
        """Start a run and return at once.

        Args:
            run: What to do.
            loading: Done when the gradients are there; None if they are.

        Raises:
            SyncError: The engine has failed (the same error) or was closed.

        On failure: the run fails with `error`, which `wait_idle` also raises.
        """
        with self._work:
            is_open = self.error is None and not self._closing
            if is_open:
                self._active.add(run)
        if not is_open:
            self.raise_if_failed()
            raise closed()
        if loading is None:
            self._start(run)
        else:
            self._await_future(run, LOAD, loading)

    def _start(self, run: Run) -> None:
        """Queue the operations that can run."""
        operations, received = run.operations, []
        with self._work:
            if self.error is not None or self._closing:
                return
            run.started = time.monotonic()
            for index in operations.roots:
                self._push(run, index)
            if operations.recvs:
                assert run.round not in self._waits.receiving, "a round has one run"
                self._waits.receiving[run.round] = run
                for key, payload in self.early_frames.take(run.round).items():
                    if key not in operations.recvs:
                        self.fail(unasked(key.peer, run.name))
                        return
                    run.pending[operations.recvs[key]] = 0
                    received.append((operations.recvs[key], payload))
                for peer in operations.senders:
                    error = self.transport.departed(peer)
                    if error is not None and lacks(run, peer):
                        self.fail(error)
                        return
            if not operations.ops:
                self._push(run, FINISH)
            self._work.notify()  # a thread may have waited for nothing, and must look for stalls now
        for index, payload in received:
            self._receive(run, index, payload)

    @property
    def idle(self) -> bool:
        """Whether all runs have ended without failure."""
        with self._work:
            return not self._active and self.error is None

    def wait_idle(self) -> None:
        """Block until every run has ended.

        Raises:
            SyncError: The engine failed, or it was closed before they ended. Raised within the timeouts.
        """
        remaining, since = -1, 0.0  # operations that have not ended, and when one last did
        with self._ended:
            while self._active and self.error is None and not self._closing:
                if self._ended.wait(_LOOK_SECONDS):
                    continue
                before, remaining = remaining, sum(run.remaining for run in self._active)
                since = time.monotonic() if remaining != before else since
                self._check_alive(time.monotonic() - since)
            abandoned = bool(self._active) and self.error is None
        self.raise_if_failed()
        if abandoned:
            raise closed()

    def _check_alive(self, waited: float) -> None:
        """Fail if nothing can end the runs, since no operation has ended for too long. Holds the lock.

        Args:
            waited: Seconds in which none has ended.
        """
        if self._closing or not self._active:
            return
        self._check_stalls()  # all threads may be busy with an operation that does not end
        if waited > self._stall_seconds + 2 * FUTURE_GRACE_SECONDS:
            self.fail(stuck(min(self._active, key=lambda run: run.started), waited))

    def longest_wait(self) -> Waiting | None:
        """Return what has waited longest, for people to look at. Any thread may ask; it looks at all that waits."""
        with self._work:
            return min(self._waits, key=lambda each: each.started, default=None)

    def lost_peer(self) -> SyncError | None:
        """Return the error of the engine, or of a peer that is gone, whether or not a run waits for it."""
        others = (peer for peer in range(self.transport.world_size) if peer != self.transport.rank)
        return self.error or next(filter(None, map(self.transport.departed, others)), None)

    def raise_if_failed(self) -> None:
        """Raise the error that ended the engine, if one has."""
        with self._work:
            error = self.error
        if error is not None:
            self._abort.wait_until_told()
            raise error

    def fail(self, error: SyncError) -> None:
        """Fail all runs and peers with `error`. Only the first call counts."""
        with self._work:
            if self.error is not None or self._closing:
                return
            self.error = error = located(error, list(self._waits))
            state: dict[str, Any] = {}
            try:
                state = self._state()
            except BaseException:  # the peers and all who wait must still be told
                logger.exception("The flight recorder's file will lack the state of the engine.")
            abandoned = list(self._active)
            self._active.clear()
            self._ready.clear()
            self.early_frames.clear()
            self._waits.clear()
            self._ended.notify_all()
            self._abort.begin(error, state, abandoned)

    def close(self) -> None:
        """End the threads, and fail runs that have not ended. Call `wait_idle` first to let them finish. Idempotent."""
        with self._work:
            self._closing = True
            self._work.notify_all()
            self._ended.notify_all()
        for thread in self._threads:
            core_threads.end(thread)
        self._abort.end()
        self.transport.close()
        for run in list(self._active):
            run.fail(closed())

    # -- received frames, on the transport's thread ----------------------------------------------------------

    def _check_header(self, peer: int, header: Header) -> None:
        self._admit(header)
        self.early_frames.check(peer, header)

    def _destination(self, peer: int, header: Header) -> np.ndarray | None:
        """Return where the body of a large frame is needed, so that nothing holds or copies it."""
        if header.length < MIN_BYTES:
            return None
        with self._work:
            run = self._waits.receiving.get(header.round)
            index = None if run is None else run.operations.recvs.get(_key_of(peer, header))
            if run is None or index is None or not (run.pending[index] and run.operations.overwrites[index]):
                return None
            return run.destination(run.operations.ops[index].chunk, header.length)

    def _on_frame(self, peer: int, header: Header, body: np.ndarray) -> None:
        key = _key_of(peer, header)
        payload = Payload.received(body, header.flags, header.sender)
        with self._work:
            run = self._waits.receiving.get(header.round)
            if run is None:
                if not self.early_frames.keep(header.round, key, payload):
                    self.fail(sent_twice(header))
                return
            index = run.operations.recvs.get(key)
            if index is None or not run.pending[index]:
                self.fail(unasked(peer, run.name) if index is None else sent_twice(header))
                return
            run.pending[index] = 0
        self._receive(run, index, payload)

    def _receive(self, run: Run, index: int, payload: Payload) -> None:
        """End a `recv` that is not pending any more."""
        self._record(run, index, "recv", run.started, self.transport.prefix_bytes + payload.body.nbytes)
        self._end(run, index, payload)

    def _is_missed(self, peer: int, said_goodbye: bool) -> bool:
        """Whether a peer that has left is needed now. If not, the next step that waits for it fails."""
        with self._work:
            if not said_goodbye:
                self._lost_peers.append(peer)
            return self._waits.need(peer, bool(self._lost_peers))

    def _record(self, run: Run, index: int, kind: str, start: float, nbytes: int) -> None:
        """Emit an event. Does not hold the lock, because a listener may block: a trace does if its disk hangs."""
        operations = run.operations
        peer, detail = operations.ops[index].peer, operations.details[index]
        self._events.emit(Event(kind, start, time.monotonic() - start, run.name, run.round, nbytes, peer, detail))

    # -- the computation queue, on the engine's threads ------------------------------------------------------

    def _push(self, run: Run, index: int) -> None:
        """Queue an operation that can run. Holds the lock."""
        # Sends first: they are quick, and the link should never wait for the processor.
        urgency = 0 if index >= 0 and run.operations.ops[index].kind == "send" else 1
        heapq.heappush(self._ready, (urgency, run.priority, next(self._order), run, index))
        self._work.notify()

    def _end(self, run: Run, index: int, result: Any = None) -> None:
        """Mark an operation as ended, and queue those that waited only for it."""
        operations = run.operations
        with self._work:
            if self.error is not None:
                return
            if run.num_users[index]:
                run.results[index] = result
            for successor in operations.successors[index]:
                run.pending[successor] -= 1
                if run.pending[successor] == 0:
                    self._push(run, successor)
            for used in operations.ops[index].inputs:
                run.num_users[used] -= 1
                if run.num_users[used] == 0:
                    run.results[used] = None
            run.remaining -= 1
            if run.remaining == 0:
                if operations.recvs:
                    del self._waits.receiving[run.round]
                self._push(run, FINISH)

    def _loop(self) -> None:
        # With several threads, each kernel keeps to its own.
        with one_thread() if len(self._threads) > 1 else nullcontext():
            self._work_until_closed()

    def _work_until_closed(self) -> None:
        while True:
            with self._work:
                while not self._ready:
                    if self._closing:
                        return
                    self._work.wait(self._waits.seconds_to_check())
                    self._check_stalls()
                *_, run, index = heapq.heappop(self._ready)
            self._execute(run, index)

    def _execute(self, run: Run, index: int) -> None:
        if index == FINISH:
            self._finish(run)
            return
        op, start = run.operations.ops[index], time.monotonic()
        inputs, result = [run.results[used] for used in op.inputs], None
        try:
            if op.call:
                result = getattr(run.codec, op.call)(op.chunk, inputs, op.stage)
            elif run.lends(inputs[0]):
                with self._work:
                    self._waits.awaited[run, index] = start
                    self._work.notify()
                self._send(run, op, inputs[0], partial(self._on_sent, run, index))
                return
            else:
                self._send(run, op, inputs[0])
        except BaseException as error:  # whatever a codec raises
            self.fail(raised(error, run, op))
            return
        if isinstance(result, Future):
            self._await_future(run, index, result)
            return
        if op.kind != "send":
            self._record(run, index, op.kind, start, result.body.nbytes if isinstance(result, Payload) else 0)
        self._end(run, index, result)

    def _send(self, run: Run, op: Op, payload: Payload, on_sent: Callable[[], None] | None = None) -> None:
        assert op.peer is not None and op.frame is not None
        fields, chunk = run.operations.fields, op.chunk
        header = Header(
            op.frame,
            compressor=self._dense if op.dense else fields.compressor,
            flags=payload.flags,
            sender=self.transport.rank,
            stage=op.stage,
            dtype=fields.dtype,
            epoch=self.transport.epoch,
            round=run.round,
            tensor=fields.tensor,
            partition=chunk.index,
            offset=fields.offset + chunk.offset,
            count=chunk.count,
            members=fields.members,
        )
        start = time.monotonic()
        self.transport.send(op.peer, header, payload.body, on_sent)
        duration, nbytes = time.monotonic() - start, self.transport.prefix_bytes + payload.body.nbytes
        self._events.emit(Event("send", start, duration, run.name, run.round, nbytes, op.peer))

    def _on_sent(self, run: Run, index: int) -> None:
        """End a send whose payload is not needed any more. Runs on any thread."""
        with self._work:
            if self._waits.awaited.pop((run, index), None) is not None and not self._closing:
                self._end(run, index)

    def _finish(self, run: Run) -> None:
        try:
            run.finish()
        except BaseException as error:
            with self._work:
                is_over = self.error is not None or self._closing
            self.fail(raised(error, run, op_of(run, FINISH)))
            if is_over:  # others were told while this run counted as ended
                run.fail(self.error or closed())
            return
        with self._work:
            self._active.discard(run)
            self._ended.notify_all()

    # -- futures ---------------------------------------------------------------------------------------------

    def _await_future(self, run: Run, index: int, future: Future[Any]) -> None:
        """End an operation, or start a run, when a future is done."""
        with self._work:
            self._waits.awaited[run, index] = time.monotonic()
            self._work.notify()
            error = self.transport.departed(self._lost_peers[0]) if self._lost_peers and index != LOAD else None
            if error is not None:
                self.fail(error)
        future.add_done_callback(lambda done: self._on_future_done(run, index, done))

    def _on_future_done(self, run: Run, index: int, future: Future[Any]) -> None:
        """Take the result of a future that is done. Runs on any thread."""
        error = future.exception(0)
        if error is not None:
            self.fail(raised(error, run, op_of(run, index)))
            return
        with self._work:
            started = self._waits.awaited.pop((run, index), None)
            if started is None or self.error is not None or self._closing:
                return
        if index == LOAD:
            self._start(run)
            return
        self._record(run, index, "recv", started, 0)
        self._end(run, index, future.result(0))

    # -- deadlines and messages ------------------------------------------------------------------------------

    def _check_stalls(self) -> None:
        """Fail if a frame or a future is late. Holds the lock."""
        error = self._waits.stalled()
        if error is not None:
            self.fail(error)

    def _state(self) -> dict[str, Any]:
        """Return the state for the flight recorder. Holds the lock."""
        return {
            "active": sorted(run.name for run in self._active),
            "waiting": self._waits.described(),
            "sent_bytes": list(self.transport.sent_bytes),
            "received_bytes": list(self.transport.received_bytes),
            "early_bytes": list(self.early_frames.nbytes),
        }


def _key_of(peer: int, header: Header) -> FrameKey:
    where = header.partition, header.offset, header.count
    return FrameKey(peer, header.kind, header.stage, header.tensor, header.members, *where)
