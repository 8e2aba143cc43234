"""A parameter server: connections, state machine and journal, in one loop.

The endpoint's thread receives frames. The thread that calls `run` takes them in the order of arrival, writes those that
change the state to the journal, and sends what `ServerStateMachine` answers.

On failure: a lost worker is waited for. The job ends with one error at all workers when one that it needs stays away
for longer than the patience. A server that is started again continues from its checkpoint and journal.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np

from gradwire.core.counts import Count
from gradwire.core.errors import FrameError, SyncError
from gradwire.net.liveness import STALL_TIMEOUT
from gradwire.net.server import Server, ServerOptions, away, finished_early, stalled
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.round import Round
from gradwire.parameter_server.server import Message, ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

MAX_QUEUED_BYTES = 64 << 20
"""Maximum bytes of a worker's frames that wait in the queue. Above, its connection is not read."""
_STALL_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class ParameterServerOptions(ServerOptions):
    """How a parameter server runs.

    Attributes:
        stall_timeout: Longest time that a live worker may take to push for a step that others have pushed for; see
            `gradwire.net.liveness.STALL_TIMEOUT`. Workers have the same limit in `ConnectionOptions`.
        state: Folder of checkpoint and journal; None keeps no state.
        checkpoint_bytes: Size of the journal at which a checkpoint is written and a new journal begins. The folder has
            up to two of each.
        fsync: When the journal is written to disk: ``"always"``, before the server answers, so that a power failure
            loses nothing that a worker has been told; or ``"checkpoint"``, with each checkpoint. Until then the
            operating system keeps it, so that the end of this process loses nothing.
        optimizers: Import paths of optimizers beyond `torch.optim`.
    """

    stall_timeout: timedelta = STALL_TIMEOUT
    state: Path | None = None
    checkpoint_bytes: int = 1 << 28
    fsync: str = "checkpoint"
    optimizers: tuple[str, ...] = ()


class ParameterServer(Server):
    """One server. See `Server`.

    Args:
        options: How the server runs.

    Attributes:
        machine: State machine of the server.

    Raises:
        StateError: The state is in use by another server, or cannot be used.
    """

    options: ParameterServerOptions

    def __init__(self, options: ParameterServerOptions) -> None:
        super().__init__(options)
        self.machine = ServerStateMachine(options.workers, self._epoch, ParameterShard(options.optimizers))
        with contextlib.ExitStack() as undo:
            self._journal: Journal | None = None
            if options.state is not None:
                self._journal = Journal(options.state, self.machine, options.checkpoint_bytes, options.fsync)
                undo.callback(self._journal.close, checkpoint=False)
            self._listen(lambda: None if self._journal is None else self._journal.restore())
            undo.pop_all()
        self._finished_before = set(self.machine.finished)  # in an earlier process of this server
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued_bytes = [0] * options.workers
        self._queue_lock = threading.Lock()
        self._versions_before = sum(round_.version for round_ in self.machine.rounds)  # of an earlier process
        self._num_updates_sent = 0
        self._connections: dict[int, int] = {}  # connection of each worker's last JOIN
        self._missing_since: dict[int, float] = {}  # workers without which no step can be closed
        self._open: dict[int, tuple[int, float]] = {}  # tensors with a push: the step, and since when
        self._next_stall_check = 0.0

    def counts(self) -> list[Count]:
        rounds = list(self.machine.rounds)
        versions = [round_.version for round_ in rounds] or [0]
        oldest = min((since for _, since in list(self._open.values())), default=None)
        queued = "Bytes of a worker's frames that wait to be taken."
        return [
            *super().counts(),
            Count("parameters", "Pieces of the model on this server. Large parameters are split.", len(rounds)),
            Count("steps_total", "Steps that all parameters have taken.", min(versions)),
            Count(
                "steps_ahead",
                "Steps of the parameter that has taken most, beyond those.",
                max(versions) - min(versions),
            ),
            Count(
                "updates_total",
                "Updates of parameters, each encoded once for all workers.",
                self._num_updates,
            ),
            Count(
                "updates_sent_total",
                "Updates sent to workers. Those beyond updates_total did not need an encode of their own.",
                self._num_updates_sent,
            ),
            Count("pushes_waiting", "Pushes for steps that are not closed.", sum(map(_num_waiting, rounds))),
            Count(
                "open_step_seconds", "Age of the oldest open step.", 0 if oldest is None else time.monotonic() - oldest
            ),
            *(
                Count("queued_bytes", queued, num_bytes, (("worker", str(worker)),))
                for worker, num_bytes in enumerate(self._queued_bytes)
            ),
        ]

    def _workers(self) -> tuple[Collection[int], Collection[int]]:
        return set(self.machine.present), set(self.machine.finished)

    # -- on the endpoint's thread ----------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        self.machine.admit(peer, header)

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        self._note_queued(peer, HEADER_BYTES + body.nbytes)
        self._events.put(partial(self._take, peer, self._endpoint.connection(peer), header, body))

    def left(self, peer: int, error: SyncError | None) -> None:
        self._events.put(partial(self._leave, peer, error))

    def failed(self, error: SyncError) -> None:
        self._events.put(partial(self._fail, error))

    def _note_queued(self, peer: int, num_bytes: int) -> None:
        with self._queue_lock:
            before = self._queued_bytes[peer]
            self._queued_bytes[peer] = now = before + num_bytes
            if before > MAX_QUEUED_BYTES or now > MAX_QUEUED_BYTES:
                self._endpoint.pause(peer, now > MAX_QUEUED_BYTES)

    # -- the loop --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self.machine.over:
            self._check_stopped()
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=0.5)()
                self._check_finished()
            self._check_away()
            self._check_stalled()
        self._on_event(f"Updates: {self._num_updates} encoded, {self._num_updates_sent} sent to workers.")

    @property
    def _num_updates(self) -> int:
        """Updates since this process was started."""
        return sum(round_.version for round_ in list(self.machine.rounds)) - self._versions_before

    def _resumable(self) -> bool:
        return self._journal is not None

    def _release(self, done: bool) -> None:
        if self._journal is not None:
            self._journal.close(checkpoint=done)

    def _take(self, worker: int, connection: int, header: Header, body: np.ndarray) -> None:
        self._note_queued(worker, -HEADER_BYTES - body.nbytes)
        if header.kind is FrameKind.JOIN:
            self._on_event(f"Worker {worker}: joined")
            self._connections[worker] = connection
        try:
            messages = self.machine.receive(worker, header, body)
        except FrameError as error:
            self._refuse(worker, str(error), connection, present=worker in self.machine.present)
            return
        if header.kind is FrameKind.JOIN:
            self._finished_before.discard(worker)
            self._refused.pop(worker, None)
        if self._journal is not None:
            self._journal.note(header, body)
        self._send(messages)

    def _leave(self, worker: int, error: SyncError | None) -> None:
        self._on_event(f"Worker {worker}: {error or 'finished'}")
        messages = self.machine.leave(worker, finished=error is None)
        if self._journal is not None:
            self._journal.note_leave(worker, finished=error is None)
            self._journal.commit()  # who has finished does not come back to say so again
        self._send(messages)

    def _fail(self, error: SyncError) -> None:
        raise error

    def _send(self, messages: list[Message]) -> None:
        if self._journal is not None and messages:
            self._journal.commit()
        for worker, header, body in messages:
            self._endpoint.send(worker, header, body, self._connections.get(worker, 0))
            self._num_updates_sent += header.kind is FrameKind.DELTA
        while self.machine.rejected:
            worker, reason = self.machine.rejected.popitem()
            self._refuse(worker, reason, self._connections.get(worker, 0), present=worker in self.machine.present)

    # -- workers that are waited for -------------------------------------------------------------------------

    def _check_away(self) -> None:
        """End the job if a worker that it needs stays away for longer than the patience."""
        missing = self.machine.missing()
        if missing and not self._waiting():
            missing = [worker for worker in missing if worker not in self.machine.finished]
        self._check_refused(missing)
        now = time.monotonic()
        self._missing_since = {worker: self._missing_since.get(worker, now) for worker in missing}
        for worker, since in self._missing_since.items():
            patience = self._patience(worker)
            if now - since > patience.total_seconds():
                if not self._enough_finished():
                    same = [each for each in missing if self._patience(each) == patience]
                    gone = [each for each in same if now - self._missing_since[each] > patience.total_seconds()]
                    raise away(gone, patience, min(gone, key=self._missing_since.__getitem__))
                self._finish()
                return

    def _patience(self, worker: int) -> timedelta:
        """How long a missing worker is waited for."""
        has_come = worker in self.machine.incarnations
        return self.options.patience if has_come else self.options.start_timeout

    def _check_stalled(self) -> None:
        """End the job if workers hold up a step. Those that are connected are named, if there are any."""
        now = time.monotonic()
        if now < self._next_stall_check:
            return
        self._next_stall_check = now + _STALL_CHECK_SECONDS
        before, self._open = self._open, {}
        limit = self.options.stall_timeout.total_seconds()
        for tensor, round_ in enumerate(self.machine.rounds):
            if not round_.pushes:
                continue
            version, since = before.get(tensor, (-1, now))
            self._open[tensor] = round_.version, since if version == round_.version else now
            if now - self._open[tensor][1] > limit:
                late = set(range(self.options.workers)) - round_.pushes.keys() - self.machine.finished
                raise stalled(sorted(late & self.machine.present or late), f"gradients of step {round_.version}", limit)

    def _check_finished(self) -> None:
        """End the job if workers wait for one that has finished: they would wait forever."""
        machine = self.machine
        finished = machine.finished - self._finished_before  # those of earlier processes may come back
        if not finished or machine.config is None or self.options.workers - len(finished) >= machine.config.needed:
            return
        if self._waiting():
            if not machine.config.backups:
                raise finished_early(machine.finished, "gradients")
            self._finish()  # the others have missed steps, and have batches left

    def _waiting(self) -> set[int]:
        """Workers that have pushed for a step that is not closed."""
        steps = (pushes for round_ in self.machine.rounds for pushes in list(round_.waiting.values()))
        return {worker for pushes in steps for worker in pushes} - self.machine.finished

    def _enough_finished(self) -> bool:
        """Whether, with backups, too few workers are left to close another step."""
        config = self.machine.config
        return config is not None and config.backups > 0 and len(self.machine.finished) >= config.needed

    def _finish(self) -> None:
        late = sorted(set(range(self.options.workers)) - self.machine.finished)
        self._on_event(f"Enough workers have finished. Workers {late} have batches left.")
        self.machine.finish()


def _num_waiting(round_: Round) -> int:
    return sum(map(len, list(round_.waiting.values())))
