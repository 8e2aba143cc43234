"""A parameter server: connections, the server's end of the protocol, and a journal, in one loop.

The hub's thread takes frames off the network; the thread that calls `run` takes them in the order in which they came,
writes down those that change the state, and lets `ServerStateMachine` decide what is sent.

On failure: a worker that is lost is waited for; the job ends with one error at all workers when too few are there for
longer than the patience. A server that is started again goes on from its checkpoint and journal.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from gradwire.core.errors import FrameError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.net.stopping import Stoppable
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.server import Message, ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

logger = logging.getLogger("gradwire")
MAX_QUEUED_BYTES = 64 << 20
"""Of a worker's frames that wait to be taken: it is not read until there are fewer."""
STALL_PATIENCES = 5
"""For so many times the patience a step waits for workers that are there: one may evaluate, or compile, in between."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class ServerOptions:
    """How a parameter server runs.

    Attributes:
        workers: how many there are.
        host: address to listen at.
        port: port to listen at; 0 for any.
        job: name of the job; several may run on a machine.
        state: folder of checkpoint and journal; None keeps nothing.
        checkpoint_bytes: how long the journal grows before a checkpoint takes its place.
        timeout: how long a worker may be silent.
        patience: how long the job waits for workers that are lost; for those that hang, `STALL_PATIENCES` as long.
        start_timeout: how long it waits until all workers have come.
        optimizers: import paths of optimizers beyond those of torch.optim.
        key_file: see `job_key`.
        insecure: see `job_key`.
    """

    workers: int
    host: str = "127.0.0.1"
    port: int = 0
    job: str = "gradwire"
    state: Path | None = None
    checkpoint_bytes: int = 1 << 28
    timeout: timedelta = timedelta(seconds=60)
    patience: timedelta = timedelta(seconds=120)
    start_timeout: timedelta = timedelta(seconds=600)
    optimizers: tuple[str, ...] = ()
    key_file: Path | None = None
    insecure: bool = False


@dataclass(frozen=True)
class _Frame:
    worker: int
    connection: int
    header: Header
    body: np.ndarray


@dataclass(frozen=True)
class _Left:
    worker: int
    error: SyncError | None


class ParameterServer(Stoppable):
    """One server.

    Args:
        options: see there.

    Attributes:
        address: where it listens.
        end: its end of the protocol.

    Raises:
        OptionError: it could be reached from other machines, and there is no key.
        OSError: the address is taken.
        StateError: the state is in use by another server, or cannot be used.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        key: JobKey = job_key(options.host, options.job, file=options.key_file, insecure=options.insecure)
        if options.insecure:
            logger.warning("The parameter server at %s takes workers without a secret key.", options.host)
        epoch = job_epoch(options.job)
        member = GroupMember(options.job, options.workers, options.workers + 1, epoch)
        self.shard = ParameterShard(options.optimizers)
        self.end = ServerStateMachine(options.workers, options.workers, epoch, self.shard)
        with contextlib.ExitStack() as undo:
            self._journal: Journal | None = None
            if options.state is not None:
                self._journal = Journal(options.state, self.end, self.shard, options.checkpoint_bytes)
                undo.callback(self._journal.close, checkpoint=False)
            address = (options.host, options.port)
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            listener = undo.enter_context(socket.create_server(address, family=family, backlog=128))
            if self._journal is not None:  # last, as it is the one that changes files
                self._journal.restore()
            callers = frozenset(range(options.workers))
            self._hub = ReconnectingEndpoint(
                member, key, self, timeout=options.timeout, listener=listener, callers=callers
            )
            undo.pop_all()
        self._finished_before = set(self.end.finished)  # at an earlier start of this server
        self.address: tuple[str, int] = (options.host, int(listener.getsockname()[1]))
        self._events: queue.SimpleQueue[_Frame | _Left | SyncError] = queue.SimpleQueue()
        self._queued_bytes = [0] * options.workers
        self._queue_lock = threading.Lock()
        self._connections: dict[int, int] = {}  # on which each worker has said its last JOIN
        self._lost_since: float | None = None
        self._open: dict[int, tuple[int, float]] = {}  # tensors with a push: the step, and when it was first seen
        self._look_at = 0.0

    # -- on the hub's thread ---------------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> None:
        self.end.admit(peer, header)

    def joined(self, peer: int) -> None:
        pass  # it says JOIN first

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        self._note_queued(peer, HEADER_BYTES + body.nbytes)
        self._events.put(_Frame(peer, self._hub.connection(peer), header, body))

    def _note_queued(self, peer: int, num_bytes: int) -> None:
        with self._queue_lock:
            self._queued_bytes[peer] += num_bytes
            self._hub.pause(peer, self._queued_bytes[peer] > MAX_QUEUED_BYTES)

    def left(self, peer: int, error: SyncError | None) -> None:
        self._events.put(_Left(peer, error))

    def failed(self, error: SyncError) -> None:
        self._events.put(error)

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, on_event: Callable[[str], None] = logger.info) -> None:
        """Serve until all workers have said goodbye.

        Args:
            on_event: told what happens, one line each.

        Raises:
            PeerTimeoutError: too few workers were there for longer than the patience; or one was there, and held up a
                step for `STALL_PATIENCES` times as long.
            PeerLostError: a worker has finished, and others wait for it.
            DisagreementError: the workers differ in what they train.
            ServerStoppedError: `stop` was called. Where this keeps state, a successor can go on.
        """
        self._hub.start()
        done = False
        try:
            while len(self.end.finished) < self.options.workers:
                self._check_stopped()
                self._turn(on_event)
            done = True
        except BaseException as error:
            self._tell(self._hub, error, resumable=self._journal is not None)
            raise
        finally:
            self._hub.close()
            if self._journal is not None:
                self._journal.close(checkpoint=done)

    def _turn(self, on_event: Callable[[str], None]) -> None:
        try:
            event = self._events.get(timeout=0.5)
        except queue.Empty:
            self._check_patience(on_event)
            self._check_stalls()
            return
        if isinstance(event, SyncError):
            raise event
        if isinstance(event, _Left):
            on_event(f"Worker {event.worker}: {event.error or 'finished'}")
            self._send(self.end.leave(event.worker, finished=event.error is None))
            if self._journal is not None:
                self._journal.note_leave(event.worker, finished=event.error is None)
        else:
            self._note_queued(event.worker, -HEADER_BYTES - event.body.nbytes)
            self._take(event, on_event)
        self._check_finished(on_event)
        self._check_patience(on_event)
        self._check_stalls()

    def _take(self, event: _Frame, on_event: Callable[[str], None]) -> None:
        if event.header.kind is FrameKind.JOIN:
            on_event(f"Worker {event.worker}: joined")
            self._connections[event.worker] = event.connection
        try:
            messages = self.end.receive(event.worker, event.header, event.body)
        except FrameError as error:
            self._hub.dismiss(event.worker, str(error), event.connection)
            return
        if event.header.kind is FrameKind.JOIN:
            self._finished_before.discard(event.worker)
        if self._journal is not None:
            self._journal.note(event.header, event.body)
        self._send(messages)

    def _send(self, messages: list[Message]) -> None:
        for worker, header, body in messages:
            self._hub.send(worker, header, body, self._connections.get(worker, 0))
        while self.end.turned_away:
            worker, reason = self.end.turned_away.popitem()
            self._hub.dismiss(worker, reason, self._connections.get(worker, 0))

    def _check_patience(self, on_event: Callable[[str], None]) -> None:
        missing = self.end.missing()
        if missing and not self._waiting():
            missing = [worker for worker in missing if worker not in self.end.finished]
        if not missing:
            self._lost_since = None
            return
        all_came = len(self.end.incarnations) == self.options.workers
        patience = self.options.patience if all_came else self.options.start_timeout
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now - self._lost_since > patience.total_seconds():
            if self._enough_finished():
                self._finish(on_event)
                return
            raise PeerTimeoutError(
                f"Expected workers {missing} within {patience.total_seconds():g} s, got nothing of them. Look at their "
                "logs; start them again within the patience, or start the server with more of it.",
                rank=missing[0],
            )

    def _check_stalls(self) -> None:
        """A worker that is connected and does not go on holds up a step as a lost one does."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        before, self._open = self._open, {}
        limit = STALL_PATIENCES * self.options.patience.total_seconds()
        for tensor, round_ in enumerate(self.end.rounds):
            if not round_.pushes:
                continue
            version, since = before.get(tensor, (-1, now))
            self._open[tensor] = round_.version, since if version == round_.version else now
            if now - self._open[tensor][1] > limit:
                late = sorted(set(range(self.options.workers)) - round_.pushes.keys() - self.end.finished)
                raise PeerTimeoutError(
                    f"Expected workers {late} to push for step {round_.version} within {limit:g} s of the first, got "
                    "nothing. Do: look at their logs; start the server with more patience if steps may take so long.",
                    rank=late[0] if late else None,
                )

    def _check_finished(self, on_event: Callable[[str], None]) -> None:
        """Workers that wait for one that has finished would wait for ever."""
        end = self.end
        gone = end.finished - self._finished_before  # who has finished earlier may come back for more, within patience
        if not gone or end.agreement is None or self.options.workers - len(gone) >= end.agreement.needed:
            return
        waiting = self._waiting()
        if waiting and end.agreement.backups:  # who has missed steps has batches left
            self._finish(on_event)
        elif waiting:
            raise PeerLostError(
                f"Expected all workers to run as many steps, but workers {sorted(end.finished)} have finished and "
                f"{sorted(waiting)} have not. Do: give all the same number of batches.",
                rank=min(end.finished),
            )

    def _waiting(self) -> set[int]:
        """Workers that have pushed for a step which is open."""
        return {worker for round_ in self.end.rounds for worker in round_.pushes} - self.end.finished

    def _enough_finished(self) -> bool:
        """Whether a step's worth of workers has finished: with backups, the others have come too late for more."""
        agreement = self.end.agreement
        return agreement is not None and agreement.backups > 0 and len(self.end.finished) >= agreement.needed

    def _finish(self, on_event: Callable[[str], None]) -> None:
        late = sorted(set(range(self.options.workers)) - self.end.finished)
        on_event(f"Enough workers have finished; batches of workers {late} were left.")
        self.end.finished.update(late)
